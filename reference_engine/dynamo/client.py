"""The calling side: choose an instance, call it, and read its items as a stream.

A caller that is no longer interested says so in one of three ways: it stops the context that it
gave (items already here are still read), it drops the stream, or it dies. A dropped stream kills
its call, but not the caller's context. A stream that is kept keeps its handler running, read or
not, until WINDOW_BYTES are unread.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sized
from functools import partial
from itertools import count
from math import inf
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec

from reference_engine.connection import PeerConnection
from reference_engine.context import Cancellation, CancelReason, Context, DetectionMethod, Signal
from reference_engine.dynamo.calls import (
    WINDOW_BYTES,
    Call,
    CancelCall,
    Serving,
    StreamEnd,
    StreamItem,
    Taken,
    ToCaller,
    check_linkage,
    decode,
    encode,
)
from reference_engine.dynamo.discovery import Instance, find
from reference_engine.dynamo.router import NoInstanceError, RoutedInstance, Router
from reference_engine.wire import Beats, Failed, Hello, LearnedBy, ProtocolError

_CONNECT_S: Final = 2.0
_LOOK_EVERY_S: Final = 0.05  # into the folder
_SHUN_S: Final = 2.0  # what could not be reached


class HandlerError(ValueError):
    """The handler raised; the message is its error's."""


class WorkerLostError(ConnectionError):
    """The process that served the call has gone."""


class Annotated(msgspec.Struct, frozen=True):
    """An item, as Dynamo wraps it. Errors are raised, so it never holds one."""

    item: Any

    def data(self) -> Any:
        return self.item

    def is_error(self) -> bool:
        return False


class Outgoing:
    """One call, as its caller sees it; all its state changes on the event loop.

    `context` is the call's own, a child of the one that was `given`. `items` have come, but are not
    read yet; `is_over`: no others will be taken in.
    """

    def __init__(
        self,
        link: "Link",
        number: int,
        given: Context | None,
        on_end: Callable[[Exception | None], object],
    ) -> None:
        self._link = link
        self._number = number
        self._given = given
        self._on_end = on_end
        self.context = Context() if given is None else Context(given.id(), given.metadata)
        self.items: deque[msgspec.Raw] = deque()
        self.is_over = False
        self.failure: Exception | None = None
        self.news = asyncio.Event()
        self.has_ended = asyncio.Event()
        self._num_taken = 0

    def start(self, endpoint: str, request: msgspec.Raw) -> None:
        check_linkage(self.context)
        message = Call(
            number=self._number,
            endpoint=endpoint,
            request=request,
            context_id=self.context.id(),
            metadata=self.context.metadata,
            signal=None if self._given is None else self._given.signal,
        )
        self._link.send(message)
        self.context.watch(self._signalled)
        if self._given is not None:
            self._given.link_child(self.context)

    def _signalled(self, signal: Signal, why: Cancellation | None) -> None:
        """Runs in the cancelling thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the connection
            self._link.loop.call_soon_threadsafe(self._cancelled, signal, why)

    def _cancelled(self, signal: Signal, why: Cancellation | None) -> None:
        if signal is Signal.KILL:
            self.items.clear()
        self.is_over = True
        self.news.set()
        self._link.send(CancelCall(number=self._number, signal=signal, why=why))

    def arrived(self, data: msgspec.Raw) -> None:
        if not self.is_over:
            self.items.append(data)
            self.news.set()

    def ended(self, failure: Exception | None) -> None:
        if not self.is_over:
            self.failure = failure
        self.is_over = True
        self.news.set()
        self.has_ended.set()
        self.context.unwatch(self._signalled)
        if self._given is not None:
            self._given.unlink_child(self.context)
        self._on_end(failure)

    def take(self) -> msgspec.Raw:
        data = self.items.popleft()
        self._num_taken += len(data)
        if self._num_taken >= WINDOW_BYTES // 4:
            self._link.send(Taken(number=self._number, num_bytes=self._num_taken))
            self._num_taken = 0
        return data


class ResponseStream(AsyncIterator[Any]):
    """The items of a call, which runs while this object lives."""

    def __init__(self, call: Outgoing, *, annotated: bool) -> None:
        self._call = call
        self._annotated = annotated
        self._loop = asyncio.get_running_loop()

    @property
    def unread(self) -> Sized:
        return self._call.items

    async def ended(self) -> None:
        """Returns when the handler has ended, which is after the end of a stopped call's stream."""
        await self._call.has_ended.wait()

    async def __anext__(self) -> Any:
        call = self._call
        while not call.items:
            if call.is_over:
                failure, call.failure = call.failure, None
                raise failure or StopAsyncIteration
            call.news.clear()
            await call.news.wait()
        item = decode(call.take())
        return Annotated(item) if self._annotated else item

    def __del__(self) -> None:
        self._call.items.clear()
        if not self._call.is_over:
            now_ns = time.perf_counter_ns()
            why = Cancellation(CancelReason.USER_DISCONNECT, DetectionMethod.NONE, now_ns)
            # Not at once: this may run wherever memory is taken, even under the context's lock.
            with contextlib.suppress(RuntimeError):  # that loop has ended, and the connection
                self._loop.call_soon_threadsafe(self._call.context.kill, why)


class Link:
    """The connection to a serving process; `_calls` holds each call until its handler has ended."""

    def __init__(self, beats: Beats | None) -> None:
        self.loop = asyncio.get_running_loop()
        self.is_lost = False
        self._numbers = count(1)
        self._calls: dict[int, Outgoing] = {}
        self._first_word: asyncio.Future[Serving] = self.loop.create_future()
        self._connection = PeerConnection[ToCaller](
            msgspec.msgpack.Decoder(ToCaller),
            on_message=self._hear,
            on_lost=self._lose,
            beats=beats,
        )

    async def open(self, instance: Instance, name: str) -> "Link":
        """Raises OSError: there is no answer, or a refusal."""
        try:
            async with asyncio.timeout(_CONNECT_S):
                address = instance.host, instance.port
                await self.loop.create_connection(lambda: self._connection, *address)
                self._connection.send(Hello(peer=name, secret=instance.secret))
                serving = await self._first_word
            if serving.instance_id != instance.instance_id:
                raise WorkerLostError(f"another process has taken port {instance.port}")
        except BaseException:
            self._first_word.cancel()
            self.close()
            raise
        return self

    def call(
        self,
        endpoint: str,
        request: msgspec.Raw,
        given: Context | None,
        on_end: Callable[[Exception | None], object],
    ) -> Outgoing:
        """Raises ConnectionError, TypeError or ValueError, and then does not call `on_end`."""
        if self.is_lost:
            raise WorkerLostError("the serving process is gone")
        number = next(self._numbers)
        call = Outgoing(self, number, given, on_end)
        call.start(endpoint, request)
        self._calls[number] = call
        return call

    def send(self, message: object) -> None:
        with contextlib.suppress(ConnectionError):  # then its calls have ended
            self._connection.send(message)

    def close(self) -> None:
        self._connection.close()
        self._lose(LearnedBy.CONNECTION_DROPPED, None)

    def _hear(self, message: ToCaller) -> None:
        match message:
            case StreamItem(number=number, data=data) if number in self._calls:
                self._calls[number].arrived(data)
            case StreamEnd(number=number, error=error) if number in self._calls:
                failure = None if error is None else HandlerError(error)
                self._calls.pop(number).ended(failure)
            case Serving() if not self._first_word.done():
                self._first_word.set_result(message)
            case Failed(message=why):
                raise ProtocolError(why)
            case _:
                raise ProtocolError(f"{type(message).__name__} out of place")

    def _lose(self, learned_by: LearnedBy, error: Exception | None) -> None:
        self.is_lost = True
        why = f"the serving process is gone ({error or learned_by})"
        if not self._first_word.done():
            self._first_word.set_exception(WorkerLostError(why))
        for call in self._calls.values():
            call.ended(WorkerLostError(why))
        self._calls.clear()


class Links:
    """A process's connections to serving processes: one each, opened with the first call."""

    def __init__(self, name: str, beats: Beats | None) -> None:
        self._name = name
        self._beats = beats
        self._numbers = count(1)
        self._links: dict[int, asyncio.Task[Link]] = {}

    async def to(self, instance: Instance) -> Link:
        """Raises OSError."""
        task = self._links.get(instance.instance_id)
        if task is None or (task.done() and (task.exception() or task.result().is_lost)):
            name = f"{self._name}.{next(self._numbers)}"  # a lost link's name may still be in use
            task = asyncio.ensure_future(Link(self._beats).open(instance, name))
            self._links[instance.instance_id] = task
        return await asyncio.shield(task)  # others may wait for it, too

    def close(self) -> None:
        for task in self._links.values():
            if not task.done():
                task.cancel()
            elif task.exception() is None:
                task.result().close()
        self._links.clear()


class Client:
    """Calls an endpoint's instances. `_shunned`: unreachable ones, and until when they are not
    called.
    """

    def __init__(self, path: str, folder: Path, links: Links, random: Random) -> None:
        self._path = path
        self._folder = folder
        self._links = links
        self._router: Router[int] = Router(random)
        self._instances: dict[int, Instance] = {}
        self._shunned: dict[int, float] = {}
        self._looked_at = -inf

    def instance_ids(self) -> list[int]:
        now = asyncio.get_running_loop().time()
        if now - self._looked_at >= _LOOK_EVERY_S:
            self._looked_at = now
            self._instances = find(self._folder, self._path)
            known = self._router.names
            for gone in known:
                if gone not in self._instances:
                    self._router.down(gone)
            for found in self._instances:
                if found not in known and self._shunned.pop(found, -inf) <= now:
                    self._router.up(found)
        return self._router.names

    async def wait_for_instances(self) -> list[int]:
        while not (found := self.instance_ids()):  # noqa: ASYNC110 a folder sets no event
            await asyncio.sleep(_LOOK_EVERY_S)
        return found

    async def generate(
        self, request: Any, annotated: bool = True, context: Context | None = None
    ) -> ResponseStream:
        """Calls the instance with the fewest calls of this client."""
        choose = partial(self._router.choose, "least_loaded")
        return await self._call(choose, request, context, annotated=annotated)

    async def random(
        self, request: Any, annotated: bool = True, context: Context | None = None
    ) -> ResponseStream:
        choose = partial(self._router.choose, "random")
        return await self._call(choose, request, context, annotated=annotated)

    async def round_robin(
        self, request: Any, annotated: bool = True, context: Context | None = None
    ) -> ResponseStream:
        choose = partial(self._router.choose, "round_robin")
        return await self._call(choose, request, context, annotated=annotated)

    async def direct(
        self, request: Any, instance_id: int, annotated: bool = True, context: Context | None = None
    ) -> ResponseStream:
        choose = partial(self._router.direct, instance_id)
        return await self._call(choose, request, context, annotated=annotated)

    async def _call(
        self,
        choose: Callable[[], RoutedInstance[int]],
        request: Any,
        context: Context | None,
        *,
        annotated: bool,
    ) -> ResponseStream:
        """Raises NoInstanceError, and TypeError or ValueError for a request that is no JSON."""
        data = encode(request)
        while True:
            self.instance_ids()
            try:
                chosen = choose()
            except NoInstanceError as error:
                raise NoInstanceError(f"{self._path}: {error}") from None
            try:
                link = await self._links.to(self._instances[chosen.name])
                call = link.call(self._path, data, context, partial(self._ended, chosen))
            except BaseException as error:
                self._ended(chosen, error)
                if not isinstance(error, OSError):
                    raise
            else:
                return ResponseStream(call, annotated=annotated)

    def _ended(self, chosen: RoutedInstance[int], failure: BaseException | None) -> None:
        chosen.ended()
        if isinstance(failure, OSError):  # it is lost, or does not answer
            self._router.down(chosen.name)
            self._shunned[chosen.name] = asyncio.get_running_loop().time() + _SHUN_S
