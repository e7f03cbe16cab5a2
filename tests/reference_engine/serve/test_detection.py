"""Detection of a client's leaving: each way by itself, and with middlewares in between."""

import asyncio
import errno
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from starlette.middleware.base import BaseHTTPMiddleware

from reference_engine.serve.detection import EXTENSION, ClientConnection, method_of
from tests.reference_engine.fake_worker import AsgiClient, FakeWorker, output, respond, settled

pytestmark = pytest.mark.anyio


class FakeTransport:
    """A connection that ends when it is aborted, as the HTTP protocol would report."""

    def __init__(self) -> None:
        self.was_aborted = False
        self.resumed = 0
        self.num_taken = 0
        self.connection = ClientConnection(self, self._resume, lambda: self.num_taken)
        self.extensions = {EXTENSION: self.connection}

    def abort(self) -> None:
        self.was_aborted = True
        asyncio.get_running_loop().call_soon(self.end)

    def end(self, error: Exception | None = None) -> None:
        self.connection.lost(method_of(error))
        self.connection.closed()

    def _resume(self) -> None:
        self.resumed += 1


@pytest.mark.parametrize(
    ("error", "method"),
    [
        (None, "connection"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), "connection"),
        (BrokenPipeError(errno.EPIPE, "pipe"), "connection"),
        (TimeoutError(errno.ETIMEDOUT, "no acknowledgement"), "heartbeat"),
        (OSError(errno.EHOSTUNREACH, "no route"), "heartbeat"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_the_connection_tells_at_once(
    error: Exception | None, method: str, stream: bool
) -> None:
    worker, transport = FakeWorker(), FakeTransport()
    client = AsgiClient(respond(worker, stream=stream), extensions=transport.extensions)
    await worker.arrived.wait()
    await settled(lambda: transport.resumed == 1)
    transport.end(error)
    assert worker.aborts() == [("req-1", "user_disconnect")], "in the same turn of the loop"
    client.leave()
    await client.finished()
    assert worker.methods() == {method: 1}
    assert worker.events().count("disconnected") == 1


async def test_a_connection_that_ended_before_anybody_watched() -> None:
    worker, transport = FakeWorker(), FakeTransport()
    transport.end()
    client = AsgiClient(respond(worker), extensions=transport.extensions)
    await client.finished()
    assert worker.events() == ["arrived", "disconnected", "abort_sent"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_server_that_raises_from_send(stream: bool) -> None:
    worker = FakeWorker()
    client = AsgiClient(respond(worker, stream=stream))
    await worker.arrived.wait()
    worker.say(output(" word", 1))
    await settled(lambda: bool(client.sent) or not stream)
    client.send_error = OSError(errno.EPIPE, "gone")
    worker.say(output(" word", 2, None if stream else "length"))
    await client.finished()
    assert worker.methods() == ({"write": 1} if stream else {}), "a whole body comes after the end"


async def test_a_server_that_raises_what_its_kernel_said() -> None:
    worker = FakeWorker()
    client = AsgiClient(respond(worker))
    await settled(lambda: len(client.sent) == 2)
    client.send_error = TimeoutError(errno.ETIMEDOUT, "no acknowledgement")
    worker.say(output(" word", 1))
    await client.finished()
    assert worker.methods() == {"heartbeat": 1}


async def test_neither_connection_nor_timers_keep_a_request_that_has_ended() -> None:
    worker, transport = FakeWorker(keep_results=0), FakeTransport()
    app = respond(worker, deadline_s=1000.0, keep_alive_s=1000.0)
    client = AsgiClient(app, extensions=transport.extensions)
    await worker.arrived.wait()
    request = weakref.ref(worker.link.live["req-1"])
    worker.say(output(" word", 1, "stop"))
    await client.finished()
    del client, app
    gc.collect()
    assert request() is None
    transport.end()


async def test_a_heartbeat_that_cannot_be_sent() -> None:
    worker = FakeWorker()
    client = AsgiClient(respond(worker))
    await settled(lambda: len(client.sent) == 2)
    client.send_error = OSError(errno.EPIPE, "gone")
    await client.finished()
    assert worker.methods() == {"heartbeat": 1}
    assert asyncio.get_running_loop().time() == pytest.approx(5.0)


async def test_a_silent_stream_gets_heartbeats_while_it_waits_and_between_tokens() -> None:
    worker = FakeWorker()
    client = AsgiClient(respond(worker))
    await asyncio.sleep(11)
    assert client.body.count(b": heartbeat\n\n") == 2
    worker.say(output(" word", 1))
    await asyncio.sleep(4)
    worker.say(output(" word", 2))
    await asyncio.sleep(6)
    assert client.body.count(b": heartbeat\n\n") == 3
    worker.say(output("", 2, "stop"))
    await client.finished()
    assert len(client.chunks) == 4


async def test_heartbeats_can_be_off() -> None:
    worker = FakeWorker(heartbeat_s=0.0)
    client = AsgiClient(respond(worker))
    await asyncio.sleep(1000)
    worker.say(output("", 0, "stop"))
    await client.finished()
    assert b"heartbeat" not in client.body


async def test_a_body_gets_no_heartbeats() -> None:
    worker = FakeWorker()
    client = AsgiClient(respond(worker, stream=False))
    await asyncio.sleep(100)
    assert client.sent == []
    worker.say(output(" word", 1, "stop"))
    await client.finished()


async def test_a_client_that_stops_reading_is_bounded_and_cut_off() -> None:
    worker, transport = FakeWorker(stall_timeout_s=4.0), FakeTransport()
    client = AsgiClient(respond(worker), extensions=transport.extensions)
    await settled(lambda: len(client.sent) == 2)
    client.reads.clear()
    worker.say(output(" word", 1))
    await client.finished()
    assert asyncio.get_running_loop().time() == pytest.approx(4.0)
    assert worker.methods() == {"stall": 1}
    assert transport.was_aborted, "what is held for it must not be sent first"


async def test_a_client_that_reads_slowly_is_waited_for_as_long_as_it_reads() -> None:
    worker, transport = FakeWorker(stall_timeout_s=4.0), FakeTransport()
    client = AsgiClient(respond(worker), extensions=transport.extensions)
    await settled(lambda: len(client.sent) == 2)
    client.reads.clear()
    worker.say(output(" word", 1))
    for _ in range(20):
        await asyncio.sleep(2)
        transport.num_taken += 300
    assert worker.methods() == {}
    await client.finished()
    assert worker.methods() == {"stall": 1}
    assert 44.0 <= asyncio.get_running_loop().time() <= 45.0


async def test_a_client_that_stops_reading_during_a_heartbeat_has_stalled() -> None:
    worker = FakeWorker(stall_timeout_s=4.0)
    client = AsgiClient(respond(worker))
    await settled(lambda: len(client.sent) == 2)
    client.reads.clear()
    await client.finished()
    assert worker.methods() == {"stall": 1}


async def test_a_client_that_does_not_read_its_end_is_cut_off_too() -> None:
    worker, transport = FakeWorker(), FakeTransport()
    client = AsgiClient(respond(worker, stream=False), extensions=transport.extensions)
    await worker.arrived.wait()
    client.reads.clear()
    worker.say(output(" word", 1, "length"))
    await client.finished()
    assert transport.was_aborted
    assert worker.events() == ["arrived", "disconnected"]
    assert worker.aborts() == [], "its request had ended before"
    assert worker.link.collector.unread_answers == 1


async def test_a_promised_ping_that_does_not_come() -> None:
    worker, transport = FakeWorker(), FakeTransport()
    client = AsgiClient(respond(worker, keep_alive_s=3.0), extensions=transport.extensions)
    await worker.arrived.wait()
    (request,) = worker.link.live.values()
    for _ in range(3):
        await asyncio.sleep(2.0)
        worker.link.ping(request)
    await client.finished()
    assert asyncio.get_running_loop().time() == pytest.approx(9.0)
    assert worker.methods() == {"ping": 1}
    assert worker.events() == ["arrived", "disconnected", "abort_sent"]
    assert transport.was_aborted


async def test_a_client_leaves_once() -> None:
    worker = FakeWorker()
    client = AsgiClient(respond(worker, keep_alive_s=3.0))
    await worker.arrived.wait()
    client.leave()
    await client.finished()
    await asyncio.sleep(10)  # the worker has lost the abort; no ping comes
    assert worker.events() == ["arrived", "disconnected", "abort_sent"]


def behind_nothing(app: Any) -> Any:
    return app


def behind_base_http_middleware(app: Any) -> Any:
    async def dispatch(request: Any, call_next: Any) -> Any:
        return await call_next(request)

    return BaseHTTPMiddleware(app, dispatch)


def behind_a_swallower(app: Any) -> Any:
    """Keeps http.disconnect to itself, as a middleware that reads ahead might."""

    async def swallow(scope: Any, receive: Any, send: Any) -> None:
        async def receive_else() -> Any:
            message = await receive()
            if message["type"] == "http.disconnect":
                await asyncio.get_running_loop().create_future()
            return message

        await app(scope, receive_else, send)

    return swallow


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "unary"])
@pytest.mark.parametrize("is_generating", [False, True], ids=["waiting", "generating"])
@pytest.mark.parametrize("wrap", [behind_nothing, behind_base_http_middleware, behind_a_swallower])
async def test_no_middleware_hides_a_disconnect(
    wrap: Callable[[Any], Any], is_generating: bool, stream: bool
) -> None:
    worker, transport = FakeWorker(), FakeTransport()
    client = AsgiClient(wrap(respond(worker, stream=stream)), extensions=transport.extensions)
    await worker.arrived.wait()
    if is_generating:
        worker.say(output(" word", 1))
        if stream:
            await client.got_text.wait()
    await settled(lambda: transport.resumed == 1)
    transport.end()
    client.leave()
    assert worker.aborts() == [("req-1", "user_disconnect")]
    await client.finished()
    assert worker.events() == ["arrived", "disconnected", "abort_sent"]
    assert worker.methods() == {"connection": 1}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "unary"])
async def test_base_http_middleware_under_a_server_without_our_protocol(stream: bool) -> None:
    worker = FakeWorker()
    client = AsgiClient(behind_base_http_middleware(respond(worker, stream=stream)))
    await worker.arrived.wait()
    client.leave()
    await client.finished()
    assert worker.methods() == {"connection": 1}


async def test_a_stall_behind_a_middleware() -> None:
    worker, transport = FakeWorker(stall_timeout_s=4.0), FakeTransport()
    app = behind_base_http_middleware(respond(worker))
    client = AsgiClient(app, extensions=transport.extensions)
    await worker.arrived.wait()
    client.reads.clear()
    for number in range(1, 4):
        worker.say(output(" word", number))
    await worker.aborted.wait()
    assert worker.methods() == {"stall": 1}
    client.reads.set()  # the server lets go of a send when its connection has ended
    await client.finished()
