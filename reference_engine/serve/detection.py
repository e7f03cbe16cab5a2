"""How the server learns that a client has left.

    FIN, RST           connection_lost, or http.disconnect     CONNECTION   at once, or when the
                       (under another server: OSError                       next write fails
                       from send)
    vanished           nothing acknowledged in time            HEARTBEAT    heartbeat_s and
                       (see http.bound_silence)                             ack_timeout_s
    reads no more      send does not get through, and its      STALL        stall_timeout_s and a
                       machine acknowledges nothing more                    quarter, once all
                                                                            buffers are full
    promised to ping   did not (the link has the timer)        PING         its keep_alive_s

The HTTP protocol puts a ClientConnection into the scope and reports to it directly, so a middleware
that keeps `http.disconnect` to itself hides nothing. Other servers report a closed connection only
to a task that waits in `receive`.
"""

import asyncio
import contextlib
import errno
from collections.abc import Callable
from types import TracebackType
from typing import Final, Protocol

from starlette.types import Message, Receive, Scope, Send

from reference_engine.context import DetectionMethod

EXTENSION: Final = "walkaway.connection"
HEARTBEAT: Final = b": heartbeat\n\n"
# Linux reports unacknowledged packets with the last error that it saw.
_UNACKNOWLEDGED: Final = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_LOOKS: Final = 4  # within the time, where there may be progress
_CLIENT_GONE: Final = 499  # nginx's status for this; no client reads it


class RanOutError(Exception):
    """A wait took too long."""


class ReusableTimeout:
    """`with patience: await something()` raises RanOutError after `seconds`; 0: never.

    For many short waits of the task that makes it: entering is an assignment, and one timer checks
    now and then, where `asyncio.timeout` makes a timer for each wait. `goes_on` returns whether
    there was progress since its last call; while there is, the wait continues, and ends up to a
    quarter late.
    """

    def __init__(self, seconds: float, goes_on: Callable[[], bool] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._seconds = seconds
        self._goes_on = goes_on
        self._since: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_over = False
        self._num_cancelled = 0

    def stop(self) -> None:
        """Call it after the last wait: an earlier one may have left a timer."""
        if self._timer is not None:
            self._timer.cancel()

    def __enter__(self) -> None:
        self._since = self._loop.time()
        if self._timer is None and self._seconds:
            self._look_later(self._since)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._since = None
        if not self._is_over:
            return
        self._is_over = False
        assert self._task is not None
        is_ours_alone = self._task.uncancel() <= self._num_cancelled
        if is_ours_alone and kind is asyncio.CancelledError:
            raise RanOutError from error

    def _look_later(self, since: float) -> None:
        end = since + self._seconds
        if self._goes_on is not None:
            end = min(end, self._loop.time() + self._seconds / _LOOKS)
        self._timer = self._loop.call_at(end, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._since is None:
            return
        if self._goes_on is not None and self._goes_on():
            self._since = self._loop.time()
        if self._loop.time() < self._since + self._seconds:
            self._look_later(self._since)
            return
        assert self._task is not None
        self._is_over = True
        self._num_cancelled = self._task.cancelling()
        self._task.cancel()


class AbortableTransport(Protocol):
    def abort(self) -> None: ...


def method_of(error: Exception | None) -> DetectionMethod:
    if isinstance(error, OSError) and error.errno in _UNACKNOWLEDGED:
        return DetectionMethod.HEARTBEAT
    return DetectionMethod.CONNECTION


class ClientConnection:
    """The connection of one request, which reports its end once.

    `num_taken`: bytes that the other end has acknowledged. The HTTP protocol calls `lost` when the
    client is gone, and `closed` when the connection is closed.
    """

    def __init__(
        self,
        transport: AbortableTransport,
        resume_reading: Callable[[], None],
        num_taken: Callable[[], int],
    ) -> None:
        self._transport = transport
        self._resume_reading = resume_reading
        self._num_taken = num_taken
        self._last_taken = 0
        self._on_lost: Callable[[DetectionMethod], None] | None = None
        self._lost: DetectionMethod | None = None
        self._closed = asyncio.Event()

    def watch(self, on_lost: Callable[[DetectionMethod], None]) -> None:
        self._resume_reading()  # a connection that is not read does not report its end
        self._on_lost = on_lost
        if self._lost is not None:
            on_lost(self._lost)

    def unwatch(self) -> None:
        self._on_lost = None

    def lost(self, method: DetectionMethod) -> None:
        if self._lost is None:
            self._lost = method
            if self._on_lost is not None:
                self._on_lost(method)

    def closed(self) -> None:
        self._closed.set()

    def takes_more(self) -> bool:
        before, self._last_taken = self._last_taken, self._num_taken()
        return self._last_taken > before

    async def abort(self) -> None:
        self._transport.abort()
        await self._closed.wait()


class WatchedClient:
    """Sends to the client of one request and watches it; calls `on_left` once.

    The task that sends must make it.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        stall_timeout_s: float,
        on_left: Callable[[DetectionMethod], None],
    ) -> None:
        self._connection: ClientConnection | None = (scope.get("extensions") or {}).get(EXTENSION)
        self._receive = receive
        self._send = send
        self._stall_timeout_s = stall_timeout_s
        self._until_stall = ReusableTimeout(
            stall_timeout_s, None if self._connection is None else self._connection.takes_more
        )
        self._on_left = on_left
        self._has_started = False
        self.has_left = False

    async def listen(self) -> None:
        if self._connection is not None:
            self._connection.watch(self._left)
        try:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            self._left(DetectionMethod.CONNECTION)
        finally:
            if self._connection is not None:
                self._connection.unwatch()
            self._until_stall.stop()

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._has_started = True
        await self._try({"type": "http.response.start", "status": status, "headers": headers})

    async def send(self, body: bytes, *, is_last: bool = False) -> None:
        await self._try({"type": "http.response.body", "body": body, "more_body": not is_last})

    async def send_heartbeat(self) -> None:
        beat = {"type": "http.response.body", "body": HEARTBEAT, "more_body": True}
        await self._try(beat)

    async def dismiss(self) -> None:
        """Drop all bytes still held for a client that has left.

        Without any response a middleware would report a bug, so one is begun.
        """
        self.has_left = True
        if self._connection is not None:
            await self._connection.abort()
        if not self._has_started:
            head = {"type": "http.response.start", "status": _CLIENT_GONE, "headers": []}
            with contextlib.suppress(OSError):
                async with asyncio.timeout(self._stall_timeout_s):
                    await self._send(head)
                    await self._send({"type": "http.response.body", "body": b""})

    async def _try(self, message: Message) -> None:
        if self.has_left:
            return
        try:
            with self._until_stall:
                await self._send(message)
        except RanOutError:
            self._left(DetectionMethod.STALL)
        except OSError as error:
            self._left(method_of(error))

    def _left(self, method: DetectionMethod) -> None:
        if not self.has_left:
            self.has_left = True
            self._on_left(method)
