"""The commands and contexts of requests, from the threads that hear frontends to the step loop.

A frontend's `AddRequest` makes a context. Each cancellation of it, in whatever thread, puts a
`CancelCommand` into the inbox, which the loop finds at its next boundary. The loop keeps contexts
alive as long as their requests; `Requests` holds only weak references.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple
from weakref import WeakValueDictionary

from reference_engine.context import Cancellation, CancelReason, Context, DetectionMethod, Signal
from reference_engine.protocol import AddRequest, KVBlocks, SetFaults


class Added(NamedTuple):
    """A frontend's request. The n answers to one prompt are the children of `parent`, which lives
    as long as they do. `blocks` are what a prefill worker hands over with it.
    """

    request: AddRequest
    frontend: str
    context: Context
    parent: Context | None = None
    blocks: bytes | bytearray = b""


class CancelCommand(NamedTuple):
    """`why` is one object for all answers that are cancelled together."""

    request_id: str
    why: Cancellation


class TakenOver(NamedTuple):
    """The decode worker has the request, and its blocks."""

    request_id: str


class DecodeWorkerLost(NamedTuple):
    """No request can continue."""


class Inspection(NamedTuple):
    """Asks for the engine's checks of itself, whose failure becomes the exception of `result`."""

    result: Future[None]


Command = Added | CancelCommand | TakenOver | DecodeWorkerLost | SetFaults | Inspection


class Heard(NamedTuple):
    t_ns: int
    command: Command


class Inbox:
    """A queue from reading threads to one working thread.

    `put` and `drain` each read the clock under one lock: a command stamped before a step started is
    always applied before that step.
    """

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._changed = threading.Condition()
        self._commands: list[Heard] = []
        self._closed = False

    def put(self, command: Command) -> None:
        with self._changed:
            self._commands.append(Heard(self._now_ns(), command))
            self._changed.notify()

    def together(self) -> AbstractContextManager[object]:
        """No boundary comes between the commands that a thread puts inside."""
        return self._changed

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def drain(self, *, timeout_s: float | None) -> tuple[int, list[Heard]] | None:
        """The step boundary: its time, and all commands heard before it. None once it is closed.

        Waits for a command, at most `timeout_s` (None: as long as it takes).
        """
        with self._changed:
            if timeout_s != 0.0:
                self._changed.wait_for(lambda: self._commands or self._closed, timeout_s)
            if self._closed:
                return None
            commands, self._commands = self._commands, []
            return self._now_ns(), commands


class _Arriving(NamedTuple):
    added: Added
    num_bytes: int
    blocks: bytearray


class Requests:
    """The live requests of one frontend and their parents, by name. One thread calls it.

    `_arriving`: requests whose blocks have not all come yet.
    """

    def __init__(self, frontend: str, inbox: Inbox, now_ns: Callable[[], int]) -> None:
        self._frontend = frontend
        self._inbox = inbox
        self._now_ns = now_ns
        self._contexts: WeakValueDictionary[str, Context] = WeakValueDictionary()
        self._arriving: dict[str, _Arriving] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._contexts

    def add(self, message: AddRequest) -> None:
        context, parent = Context(message.request_id), None
        if message.parent_id is not None:
            parent = self._contexts.get(message.parent_id) or Context(message.parent_id)
            self._contexts[message.parent_id] = parent
        self._contexts[message.request_id] = context
        added, given = Added(message, self._frontend, context, parent), message.handed_over
        if given is not None and given.num_bytes:
            arriving = _Arriving(added, given.num_bytes, bytearray())
            self._arriving[message.request_id] = arriving
        else:
            self._put(added)

    def take_in(self, piece: KVBlocks) -> None:
        arriving = self._arriving.get(piece.request_id)
        if arriving is not None:  # else it was cancelled
            arriving.blocks.extend(piece.data)
            if len(arriving.blocks) >= arriving.num_bytes:
                self._put_arriving(piece.request_id)

    def _put_arriving(self, name: str) -> None:
        arriving = self._arriving.pop(name, None)
        if arriving is not None:
            self._put(arriving.added._replace(blocks=arriving.blocks))

    def _put(self, added: Added) -> None:
        self._inbox.put(added)
        # Only now may a cancellation follow it into the inbox.
        added.context.watch(partial(self._pass_on, added.request.request_id))
        if added.parent is not None:
            added.parent.link_child(added.context)

    def cancel(self, name: str, signal: Signal, reason: CancelReason) -> bool:
        """A request, or a parent with its children. True if it was live and not yet cancelled."""
        self._put_arriving(name)  # without the rest of its blocks
        context = self._contexts.get(name)
        return context is not None and self._cancel(context, signal, reason)

    def cancel_all(self, reason: CancelReason) -> int:
        """Kill what there is; returns how many were not yet cancelled, a parent with its children
        being one.
        """
        with self._inbox.together():
            for name in list(self._arriving):
                self._put_arriving(name)
            # Parents stand before their children.
            contexts = list(self._contexts.values())
            return sum(self._cancel(context, Signal.KILL, reason) for context in contexts)

    def _cancel(self, context: Context, signal: Signal, reason: CancelReason) -> bool:
        is_first = not context.is_stopped()
        why = Cancellation(reason, DetectionMethod.NONE, self._now_ns())
        with self._inbox.together():
            (context.kill if signal is Signal.KILL else context.stop)(why)
        return is_first

    def _pass_on(self, request_id: str, _: Signal, why: Cancellation | None) -> None:
        assert why is not None, "a worker's context was cancelled without a reason"
        self._inbox.put(CancelCommand(request_id, why))
