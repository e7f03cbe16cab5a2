"""The HTTP protocol over real sockets: leaving is seen at once, whatever is in between."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest

from tests.reference_engine.fake_worker import output
from tests.reference_engine.served import Served
from tests.reference_engine.test_detection import (
    behind_a_swallower,
    behind_base_http_middleware,
    behind_nothing,
)

pytestmark = pytest.mark.anyio
LINGER_NOT = b"\x01\0\0\0\0\0\0\0"  # l_onoff 1, l_linger 0: closing sends RST


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "unary"])
@pytest.mark.parametrize("is_reset", [True, False], ids=["RST", "FIN"])
@pytest.mark.parametrize("wrap", [behind_nothing, behind_base_http_middleware, behind_a_swallower])
async def test_leaving_is_seen_behind_every_middleware(
    wrap: Callable[[Any], Any], is_reset: bool, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    served = Served(wrap, stream=stream)
    async with served.running():
        client = await served.client()
        if is_reset:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)
        client.close()
        await served.worker.aborted.wait()
    assert served.worker.methods() == {"connection": 1}
    assert served.worker.events() == ["arrived", "disconnected", "abort_sent"]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_leaving_after_a_body_so_long_that_reading_was_paused() -> None:
    served = Served(behind_a_swallower, stream=False)
    async with served.running():
        client = await served.client(b"x" * 1_000_000)
        client.close()
        await served.worker.aborted.wait()
    assert served.worker.methods() == {"connection": 1}


async def test_closing_its_side_while_much_is_still_to_be_sent() -> None:
    """The connection is ended, not drained: its client reads nothing, so that would never end."""
    served = Served(behind_nothing, stream=True)
    async with served.running():
        client = await served.client(receive_bytes=2048)
        for number in range(1, 200):
            served.worker.say(output(" word" * 1000, number))
            await asyncio.sleep(0)
        client.shutdown(socket.SHUT_WR)
        await served.worker.aborted.wait()
        client.close()
    assert served.worker.methods() == {"connection": 1}


async def test_a_pipelining_client_is_cut_off() -> None:
    served = Served(behind_nothing, stream=True)
    async with served.running():
        client = await served.client()
        await asyncio.get_running_loop().sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await served.worker.aborted.wait()
        client.close()
    assert len(served.worker.received) == 2, "one request and its abort"


async def test_a_connection_serves_one_request_after_the_other() -> None:
    served = Served(behind_nothing, stream=True)
    loop = asyncio.get_running_loop()
    async with served.running():
        client = await served.client()
        served.worker.say(output(" word", 1, "stop"))
        seen = b""
        while not seen.endswith(b"0\r\n\r\n"):
            seen += await loop.sock_recv(client, 65536)
        served.worker.arrived.clear()
        await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await served.worker.arrived.wait()
        client.close()
        await served.worker.aborted.wait()
    assert served.worker.aborts() == [("req-2", "user_disconnect")]


async def test_the_transport_holds_no_more_than_it_may() -> None:
    served = Served()
    async with served.running():
        client = await served.client()
        (connection,) = served.connections
        limits = connection.transport.get_write_buffer_limits()
        client.close()
        await served.worker.aborted.wait()
    assert limits == (1024, 4096)
