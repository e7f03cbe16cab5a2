"""Detection of a client's leaving: each way by itself, and with middlewares in between."""

import asyncio
import errno
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from starlette.middleware.base import BaseHTTPMiddleware

from reference_engine.serve.detection import (
    EXTENSION,
    ClientConnection,
    RanOutError,
    ReusableTimeout,
    method_of,
)
from tests.reference_engine.fake_worker import asked, output, settled

pytestmark = pytest.mark.anyio

LEFT = ["arrived", "disconnected", "abort_sent"]


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
async def test_the_connection_tells_by_its_error_how_it_ended(
    error: Exception | None, method: str
) -> None:
    transport = FakeTransport()
    transport.end(error)
    worker, client = asked(extensions=transport.extensions)
    await client.finished()
    assert worker.events() == LEFT, "although it ended before the request began"
    assert worker.methods() == {method: 1}


@pytest.mark.parametrize(
    ("stream", "error", "has_token", "methods"),
    [
        (True, errno.EPIPE, True, {"connection": 1}),
        (True, errno.ETIMEDOUT, True, {"heartbeat": 1}),
        (True, errno.EPIPE, False, {"connection": 1}),
        (False, errno.EPIPE, True, {}),  # a whole body comes after the end
    ],
)
async def test_a_server_that_raises_from_send(
    stream: bool, error: int, has_token: bool, methods: dict[str, int]
) -> None:
    worker, client = asked(stream=stream)
    await settled(lambda: len(client.sent) == 2 or not stream)
    client.send_error = OSError(error, "gone")
    if has_token:
        worker.say(output(" word", 1, None if stream else "length"))
    await client.finished()
    assert worker.methods() == methods
    assert asyncio.get_running_loop().time() == pytest.approx(0.0 if has_token else 5.0)


async def test_neither_connection_nor_timers_keep_a_request_that_has_ended() -> None:
    transport = FakeTransport()
    bounds: dict[str, Any] = {"deadline_s": 1000.0, "keep_alive_s": 1000.0}
    limits = {"keep_results": 0}
    worker, client = asked(limits=limits, extensions=transport.extensions, **bounds)
    request = weakref.ref(worker.link.live["req-1"])
    worker.say(output(" word", 1, "stop"))
    await client.finished()
    del client
    gc.collect()
    assert request() is None
    transport.end()


@pytest.mark.parametrize("heartbeat_s", [5.0, 0.0])
async def test_a_silent_stream_gets_heartbeats_while_it_waits_and_between_tokens(
    heartbeat_s: float,
) -> None:
    limits = {"heartbeat_s": heartbeat_s}
    (worker, client), (_, whole) = asked(limits=limits), asked(limits=limits, stream=False)
    beats = [0] * 2
    for place, wait_s in enumerate((11, 10)):
        await asyncio.sleep(wait_s)
        beats[place] = client.body.count(b": heartbeat\n\n")
        worker.say(output(" word", place + 1))
        await asyncio.sleep(4)
    assert beats == ([2, 4] if heartbeat_s else [0, 0])
    assert whole.sent == [], "a body gets none"
    worker.say(output("", 2, "stop"))
    await client.finished()
    assert len(client.chunks) == 4
    whole.leave()
    await whole.finished()


@pytest.mark.parametrize("has_token", [True, False], ids=["token", "heartbeat"])
async def test_a_client_that_stops_reading_is_bounded_and_cut_off(has_token: bool) -> None:
    transport = FakeTransport()
    worker, client = asked(limits={"stall_timeout_s": 4.0}, extensions=transport.extensions)
    await settled(lambda: len(client.sent) == 2)
    client.reads.clear()
    if has_token:
        worker.say(output(" word", 1))
    await client.finished()
    assert asyncio.get_running_loop().time() == pytest.approx(4.0 if has_token else 9.0)
    assert worker.methods() == {"stall": 1}
    assert transport.was_aborted, "what is held for it must not be sent first"


async def test_a_client_that_reads_slowly_is_waited_for_as_long_as_it_reads() -> None:
    transport = FakeTransport()
    worker, client = asked(limits={"stall_timeout_s": 4.0}, extensions=transport.extensions)
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


async def test_a_client_that_does_not_read_its_end_is_cut_off_too() -> None:
    transport = FakeTransport()
    worker, client = asked(extensions=transport.extensions, stream=False)
    client.reads.clear()
    worker.say(output(" word", 1, "length"))
    await client.finished()
    assert transport.was_aborted
    assert worker.events() == ["arrived", "disconnected"]
    assert worker.aborts() == [], "its request had ended before"
    assert worker.link.collector.unread_answers == 1


@pytest.mark.parametrize("num_pings", [0, 3])
async def test_a_promised_ping_that_does_not_come(num_pings: int) -> None:
    transport = FakeTransport()
    worker, client = asked(extensions=transport.extensions, keep_alive_s=3.0)
    (request,) = worker.link.live.values()
    for _ in range(num_pings):
        await asyncio.sleep(2.0)
        worker.link.ping(request)
    await client.finished()
    assert asyncio.get_running_loop().time() == pytest.approx(2.0 * num_pings + 3.0)
    assert worker.methods() == {"ping": 1}
    assert worker.events() == LEFT
    assert transport.was_aborted


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
    transport = FakeTransport()
    worker, client = asked(wrap=wrap, extensions=transport.extensions, stream=stream)
    if is_generating:
        worker.say(output(" word", 1))
        await settled(lambda: client.got_text.is_set() or not stream)
    await settled(lambda: transport.resumed == 1)
    transport.end()
    client.leave()
    assert worker.aborts() == [("req-1", "user_disconnect")], "in the same turn of the loop"
    await client.finished()
    assert worker.events() == LEFT
    assert worker.methods() == {"connection": 1}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "unary"])
async def test_base_http_middleware_under_a_server_without_our_protocol(stream: bool) -> None:
    worker, client = asked(wrap=behind_base_http_middleware, stream=stream)
    client.leave()
    await client.finished()
    assert worker.methods() == {"connection": 1}


async def test_a_stall_behind_a_middleware() -> None:
    transport, limits = FakeTransport(), {"stall_timeout_s": 4.0}
    wrap = behind_base_http_middleware
    worker, client = asked(limits=limits, wrap=wrap, extensions=transport.extensions)
    client.reads.clear()
    for number in range(1, 4):
        worker.say(output(" word", number))
    await worker.aborted.wait()
    assert worker.methods() == {"stall": 1}
    client.reads.set()  # the server lets go of a send when its connection has ended
    await client.finished()


# Waits with a bound: they end as asyncio.timeout's do, and short waits cost no timer...


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_a_wait_ends_after_the_time_whenever_it_began() -> None:
    patience = ReusableTimeout(4.0)
    for _ in range(10):
        with patience:
            await asyncio.sleep(3)  # short waits never add up
    for end_s in (34.0, 38.0):
        with pytest.raises(RanOutError), patience:
            await asyncio.sleep(1000)
        assert now() == pytest.approx(end_s)
    with ReusableTimeout(0.0):
        await asyncio.sleep(1000)
    assert now() == pytest.approx(1038.0), "no patience is no bound"


@pytest.mark.parametrize("at_s", [1.0, 4.0])
async def test_being_cancelled_by_others_is_not_running_out_even_at_the_same_time(
    at_s: float,
) -> None:
    async def wait() -> None:
        with ReusableTimeout(4.0):
            await asyncio.sleep(1000)

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(at_s, waiting.cancel)
    with pytest.raises(asyncio.CancelledError):
        await waiting
