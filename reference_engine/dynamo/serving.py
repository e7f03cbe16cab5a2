"""The serving side: one port on which other processes call the handlers of this one.

A call is a task that draws items from its handler, an async generator, and ends it in one of two
ways: the handler returns, or it is closed (GeneratorExit) at a yield. A handler whose context is
cancelled is resumed once more, so that it can look at the context and end in its own manner; at its
next yield it is closed. What it yields meanwhile is not sent. A handler that awaits is not
interrupted; it can await its context.
"""

import asyncio
import contextlib
import inspect
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
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
    ToHandlers,
    decode,
    encode,
)
from reference_engine.wire import (
    HELLO_BYTES,
    HELLO_S,
    MAX_FRAME_BYTES,
    Beats,
    Failed,
    Hello,
    LearnedBy,
    ProtocolError,
    check_hello,
)

Handler = Callable[..., AsyncGenerator[Any, None]]
_MAX_ERROR: Final = 2000  # characters
log: Final = logging.getLogger("reference_engine.dynamo")


class Served:
    """A handler, its running calls, and how its cancelled calls learned of the cancellation."""

    def __init__(self, path: str, handler: Handler) -> None:
        if inspect.iscoroutinefunction(handler):
            raise TypeError(f"the handler of {path} must yield: write it as an async generator")
        self.path = path
        self.is_draining = False
        self._handler = handler
        self._takes_context = "context" in inspect.signature(handler).parameters
        self.calls: dict[asyncio.Task[None], Running] = {}
        self.cancellations: Counter[LearnedBy] = Counter()

    def start(self, request: Any, context: Context) -> AsyncGenerator[Any, None]:
        items = self._handler(request, *((context,) if self._takes_context else ()))
        if not isinstance(items, AsyncGenerator):
            raise TypeError(f"the handler of {self.path} made {items!r}, no async generator")
        return items

    async def end(self) -> None:
        """Refuse new calls, and wait for the others."""
        self.is_draining = True
        while self.calls:
            await asyncio.wait(self.calls)


class Running:
    """One call. `num_untaken` bytes were sent which its caller has not read."""

    def __init__(self, served: Served, context: Context) -> None:
        self.served = served
        self.context = context
        self._num_untaken = 0
        self._has_room = asyncio.Event()

    def cancel(
        self, learned_by: LearnedBy, signal: Signal, why: Cancellation | None = None
    ) -> None:
        """Counted once, whatever comes after."""
        if not self.context.is_stopped():
            self.served.cancellations[learned_by] += 1
        if signal is Signal.KILL:
            self.context.kill(why)
        else:
            self.context.stop(why)

    def taken(self, num_bytes: int) -> None:
        self._num_untaken -= num_bytes
        if self._num_untaken < WINDOW_BYTES:
            self._has_room.set()

    async def sent(self, num_bytes: int) -> None:
        """Returns when the caller has read enough, or the call is cancelled. Other calls get a
        turn, even if this one's handler never awaits.
        """
        self._num_untaken += num_bytes
        await asyncio.sleep(0)
        if self._num_untaken < WINDOW_BYTES:
            return
        self._has_room.clear()
        stopped, room = self.context.stopped(), asyncio.ensure_future(self._has_room.wait())
        try:
            await asyncio.wait((stopped, room), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            room.cancel()


class HandlerServer:
    """The handlers of a process, by their endpoints' names, and the connections of its callers."""

    def __init__(self, instance_id: int, secret: str, beats: Beats | None) -> None:
        self.instance_id = instance_id
        self.secret = secret
        self.beats = beats
        self.served: dict[str, Served] = {}
        self.callers: dict[str, Caller] = {}
        self._listening: asyncio.Task[asyncio.Server] | None = None

    async def listen(self, host: str) -> int:
        """The port, which is the same for all endpoints."""
        if self._listening is None:
            loop = asyncio.get_running_loop()
            opening = loop.create_server(lambda: Caller(self).connection, host, 0)
            self._listening = loop.create_task(opening)
        listening = await asyncio.shield(self._listening)
        return int(listening.sockets[0].getsockname()[1])

    def close(self) -> None:
        opened = self._listening
        if opened is not None and opened.done() and opened.exception() is None:
            opened.result().close()
        for caller in list(self.callers.values()):
            caller.connection.close()
        self.callers.clear()


class Caller:
    """A connected process, which has a name only after its Hello."""

    def __init__(self, server: HandlerServer) -> None:
        self._server = server
        self._name: str | None = None
        self._calls: dict[int, Running] = {}
        self.connection = PeerConnection[ToHandlers](
            msgspec.msgpack.Decoder(ToHandlers),
            on_message=self._hear,
            on_lost=self._lost,
            beats=server.beats,
        )
        self.connection.reader.max_bytes = HELLO_BYTES  # of a stranger, no more is kept
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(HELLO_S, self._refuse, "no Hello")

    def _hear(self, message: ToHandlers) -> None:
        if self._name is None:
            self._greet(message)
            return
        match message:
            case Call():
                self._start(message)
            case CancelCall(number=number) if call := self._calls.get(number):
                call.cancel(LearnedBy.CONTROL_MESSAGE, message.signal, message.why)
            case Taken(number=number) if call := self._calls.get(number):
                call.taken(message.num_bytes)
            case Hello():
                raise ProtocolError("a second Hello")
            case _:  # of a call that has ended meanwhile
                pass

    def _greet(self, hello: object) -> None:
        try:
            name = check_hello(hello, self._server.secret, self._server.callers).peer
        except ProtocolError as error:
            self._refuse(str(error))
            return
        self._deadline.cancel()
        self.connection.reader.max_bytes = MAX_FRAME_BYTES
        self._name = name
        self._server.callers[name] = self
        self._send(Serving(instance_id=self._server.instance_id))

    def _refuse(self, why: str) -> None:
        log.warning("a caller was refused: %s", why)
        self._deadline.cancel()
        self._send(Failed(message=why))
        self.connection.close()

    def _lost(self, learned_by: LearnedBy, error: Exception | None) -> None:
        self._deadline.cancel()
        if self._name is not None:
            self._server.callers.pop(self._name, None)
        if error is not None:
            log.warning("the connection of %s ended: %s", self._name or "a caller", error)
        now_ns = time.perf_counter_ns()
        why = Cancellation(CancelReason.FRONTEND_LOST, DetectionMethod.NONE, now_ns)
        for call in list(self._calls.values()):
            call.cancel(learned_by, Signal.KILL, why)

    def _send(self, message: object) -> None:
        with contextlib.suppress(ConnectionError):  # then the call has been killed
            self.connection.send(message)

    def _start(self, message: Call) -> None:
        served = self._server.served.get(message.endpoint)
        if message.number in self._calls:
            raise ProtocolError(f"call {message.number} exists already")
        if served is None or served.is_draining:
            error = f"this process no longer serves {message.endpoint}"
            self._send(StreamEnd(number=message.number, error=error))
            return
        call = Running(served, Context(message.context_id, message.metadata))
        if message.signal is not None:
            call.cancel(LearnedBy.CONTROL_MESSAGE, message.signal)
        self._calls[message.number] = call
        task = asyncio.get_running_loop().create_task(self._run(message, call))
        served.calls[task] = call
        task.add_done_callback(served.calls.pop)

    async def _run(self, message: Call, call: Running) -> None:
        error: str | None = None
        try:
            await self._draw(message, call)
        except (Exception, asyncio.CancelledError) as raised:
            is_meant = isinstance(raised, asyncio.CancelledError) and call.context.is_stopped()
            if not is_meant:  # as in Dynamo's examples, a handler may end so once it is cancelled
                log.exception("the handler of %s failed, %r", message.endpoint, call.context)
                text = f"{type(raised).__name__}: {raised}".removesuffix(": ")[:_MAX_ERROR]
                error = text.encode(errors="replace").decode()
        finally:
            del self._calls[message.number]
            self._send(StreamEnd(number=message.number, error=error))

    async def _draw(self, message: Call, call: Running) -> None:
        items = call.served.start(decode(message.request), call.context)
        async with contextlib.aclosing(items):
            may_have_looked = call.context.is_stopped()
            async for item in items:
                if may_have_looked:
                    return
                if not call.context.is_stopped():
                    data = encode(item)
                    self._send(StreamItem(number=message.number, data=data))
                    await call.sent(len(data))
                may_have_looked = call.context.is_stopped()
