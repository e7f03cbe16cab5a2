"""What the HTTP protocol refuses over real sockets: heads without end, and what comes too late."""

import asyncio
import json
from typing import Any

import pytest

from reference_engine.serve.http import WatchedProtocol
from tests.reference_engine.fake_worker import output
from tests.reference_engine.served import Served, StoppedClock, read_to_the_end

pytestmark = pytest.mark.anyio
BODY_TO_COME = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{"


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


def error_of(answer: bytes, status: int) -> str:
    """The message of a whole answer in the shape of all errors."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    assert b"connection: close" in head
    assert b"content-length: %d" % len(body) in head
    error = json.loads(body)["error"]
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    return str(error["message"])


@pytest.mark.parametrize(
    "start",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\nx-endless: ",
        b"GET /",
        b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\nx-trailer: ",
    ],
    ids=["header", "path", "trailer"],
)
async def test_a_head_without_end_is_refused(start: bytes) -> None:
    served = Served()
    async with served.running():
        client = await served.sender(start + b"x" * 300_000)
        assert "65536 bytes" in error_of(await read_to_the_end(client), 431)
    assert served.worker.received == []


async def test_who_is_refused_may_go_on_sending_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reset connection would take the refusal along, on some systems before it is read."""
    monkeypatch.setattr("reference_engine.serve.http._LINGER_S", 3600)
    served = Served()
    loop = asyncio.get_running_loop()
    async with served.running():
        client = await served.sender(b"GET /" + b"x" * 100_000)
        assert b" 431 " in await loop.sock_recv(client, 65536)
        for _ in range(20):
            await loop.sock_sendall(client, b"x" * 100_000)
            await asyncio.sleep(0)
        client.close()


async def test_a_long_body_is_no_long_head() -> None:
    served = Served()
    async with served.running():
        client = await served.client(b"x" * 1_000_000)
        client.close()
        await served.worker.aborted.wait()


@pytest.fixture
def taken_in(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set when the server has read something."""
    event = asyncio.Event()
    data_received = WatchedProtocol.data_received

    def read(protocol: WatchedProtocol, data: bytes) -> None:
        data_received(protocol, data)
        event.set()

    monkeypatch.setattr(WatchedProtocol, "data_received", read)
    return event


@pytest.mark.parametrize("start", [b"GET / HTT", BODY_TO_COME], ids=["head", "body"])
async def test_a_request_that_does_not_come_whole_is_refused_in_time(
    start: bytes, taken_in: asyncio.Event
) -> None:
    clock = StoppedClock()
    served = Served(clock=clock, request_timeout_s=0.1)
    async with served.running():
        client = await served.sender(start)
        await taken_in.wait()
        clock.let_pass(0.1)
        assert "0.1 s" in error_of(await read_to_the_end(client), 408)
    assert served.worker.received == []


async def test_a_connection_on_which_nothing_comes_is_closed_in_time() -> None:
    served = Served(request_timeout_s=0.1)
    async with served.running():
        assert await read_to_the_end(await served.sender(b"")) == b""


async def test_an_answer_may_take_longer_than_its_request(taken_in: asyncio.Event) -> None:
    clock = StoppedClock()
    served = Served(clock=clock, request_timeout_s=0.1)
    async with served.running():
        client = await served.client()
        clock.let_pass(0.2)
        served.worker.say(output(" word", 1, "stop"))
        seen = b""
        while not seen.endswith(b"0\r\n\r\n"):
            seen += await asyncio.get_running_loop().sock_recv(client, 65536)
        taken_in.clear()
        await asyncio.get_running_loop().sock_sendall(client, b"GET / ")
        await taken_in.wait()
        clock.let_pass(0.1)
        assert "0.1 s" in error_of(await read_to_the_end(client), 408), "so is the next request"
    assert b"[DONE]" in seen


async def test_what_is_no_http_is_told_so() -> None:
    served = Served()
    async with served.running():
        client = await served.sender(b"\x16\x03\x01 is TLS\r\n\r\n")
        assert "Invalid HTTP request" in error_of(await read_to_the_end(client), 400)
