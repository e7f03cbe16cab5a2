"""A request's context: through it alone is a request cancelled, across threads and tiers.

A stop is graceful: the engine generates no more, and what is in the stream is still delivered. A
kill is a stop after which nobody reads: its client gets nothing more of what is in the stream. A
context passes both on to its children, in the order in which they were linked, so a chain of tiers
is a chain of contexts:

    client leaves ─▶ frontend's context ─▶ prefill worker's ─▶ decode worker's
                          └─▶ one child for each of the n answers

The first reason wins: several causes may meet, and only the first is recorded. Names and behaviour
follow Dynamo's `Context`.
"""

import contextlib
import threading
from collections.abc import Callable, Mapping
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

if TYPE_CHECKING:
    import asyncio


class CancelReason(StrEnum):
    USER_DISCONNECT = "user_disconnect"
    CLIENT_TIMEOUT = "client_timeout"
    SERVER_SHUTDOWN = "server_shutdown"
    RATE_LIMIT = "rate_limit"
    API = "api"
    FRONTEND_LOST = "frontend_lost"
    ERROR = "error"


class DetectionMethod(StrEnum):
    """How the server learned that a client is gone; NONE for other cancellations.

    CONNECTION: the connection ended (FIN or RST), whether a read or a write met that first: the
    transport reports one error for both. HEARTBEAT: sent bytes were not acknowledged in time, so
    the client vanished. PING: a client did not send the ping it had promised. STALL: a client
    stopped reading. GRPC: gRPC ended the call; it reports a cancellation, a deadline and a lost
    connection in the same way.
    """

    CONNECTION = "connection"
    HEARTBEAT = "heartbeat"
    PING = "ping"
    STALL = "stall"
    GRPC = "grpc"
    NONE = "none"


class Cancellation(NamedTuple):
    reason: CancelReason
    method: DetectionMethod
    t_ns: int


class Signal(IntEnum):
    """Ordered: a kill includes a stop."""

    STOP = 1
    KILL = 2


Watcher = Callable[[Signal, Cancellation | None], object]


class Context:
    """`_signal`, `_cancellation` and `_watchers` change only under `_lock`.

    Watchers are called without the lock, by the thread that cancels: once for a stop, once for a
    kill; a kill that no stop preceded is one call.
    """

    __slots__ = (
        "__weakref__",
        "_cancellation",
        "_id",
        "_lock",
        "_signal",
        "_watchers",
        "metadata",
    )

    def __init__(self, id: str | None = None, metadata: Mapping[str, str] | None = None) -> None:  # noqa: A002 Dynamo's name
        self._id = str(uuid4()) if id is None else id
        self.metadata = dict(metadata or {})
        self._lock = threading.Lock()
        self._signal: Signal | None = None
        self._cancellation: Cancellation | None = None
        self._watchers: list[Watcher] = []

    def __repr__(self) -> str:
        return f"<Context {self._id} {'going on' if self._signal is None else self._signal.name}>"

    def id(self) -> str:
        return self._id

    def is_stopped(self) -> bool:
        """True after a kill, too."""
        return self._signal is not None

    def is_killed(self) -> bool:
        return self._signal is Signal.KILL

    @property
    def signal(self) -> Signal | None:
        return self._signal

    @property
    def cancellation(self) -> Cancellation | None:
        """The first one that was given; None also for a cancellation without a reason."""
        return self._cancellation

    def stop_generating(self, why: Cancellation | None = None) -> bool:
        """False if it was stopped before: then nothing changes."""
        return self._cancel(Signal.STOP, why)

    stop = stop_generating

    def kill(self, why: Cancellation | None = None) -> bool:
        return self._cancel(Signal.KILL, why)

    def link_child(self, child: "Context") -> None:
        """Pass on to `child` what comes, and at once what has come."""
        self.watch(child._cancel)

    def unlink_child(self, child: "Context") -> None:
        self.unwatch(child._cancel)

    def detached(self, id: str) -> "Context":  # noqa: A002
        """An independent context with a copy of the metadata."""
        return Context(id, self.metadata)

    def watch(self, watcher: Watcher) -> None:
        """Call it at once if the context is cancelled already. The second of two equal watchers is
        not kept.
        """
        with self._lock:
            if watcher in self._watchers:
                return
            self._watchers.append(watcher)
            signal, why = self._signal, self._cancellation
        if signal is not None:
            watcher(signal, why)

    def unwatch(self, watcher: Watcher) -> None:
        with self._lock, contextlib.suppress(ValueError):
            self._watchers.remove(watcher)

    def stopped(self) -> "asyncio.Future[bool]":
        """Belongs to the running event loop; any thread may stop the context."""
        return self._reached(Signal.STOP)

    def killed(self) -> "asyncio.Future[bool]":
        return self._reached(Signal.KILL)

    async_killed_or_stopped = stopped

    def _cancel(self, signal: Signal, why: Cancellation | None) -> bool:
        with self._lock:
            if self._signal is not None and self._signal >= signal:
                return False
            if self._signal is None:
                self._cancellation = why
            self._signal, why = signal, self._cancellation
            watchers = list(self._watchers)
        for watcher in watchers:
            watcher(signal, why)
        return True

    def _reached(self, wanted: Signal) -> "asyncio.Future[bool]":
        import asyncio  # here, so that the worker starts without it

        loop = asyncio.get_running_loop()
        future: asyncio.Future[bool] = loop.create_future()

        def resolve() -> None:
            if not future.done():
                future.set_result(True)

        def note(signal: Signal, _: Cancellation | None) -> None:
            if signal >= wanted:
                with contextlib.suppress(RuntimeError):  # that loop has ended
                    loop.call_soon_threadsafe(resolve)

        if self._signal is not None and self._signal >= wanted:
            resolve()
            return future
        future.add_done_callback(lambda _: self.unwatch(note))
        self.watch(note)
        return future
