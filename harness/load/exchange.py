"""One request whose connection is open: it is read, and left when its user wants to leave.

Bytes are passed on at once. When the user wants to leave, the think time passes while reading goes
on, then the bytes that have already arrived are read, and then the user leaves.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

import httpx

from harness.load.connection import Connection, Limit
from harness.load.leave import READS_ON, CancelRequest, leave
from harness.load.sse import EndlessEventError, SSEDecoder
from harness.load.stream import StreamMachine
from harness.records import Way
from harness.workload.abandon import LeaveRule
from harness.workload.observed_latency import StepEstimate

MAX_ANSWER_BYTES: Final = 1 << 26  # of an answer in one piece


class Reader(Protocol):
    """Takes the bytes of a body as they come, with the time of their receive; those that come after
    leaving by the `late` methods."""

    def read(self, chunk: bytes, t_ns: int, /) -> None: ...
    def end(self) -> None: ...
    def read_late(self, chunk: bytes) -> None: ...
    def end_late(self) -> None: ...


class StreamReader:
    """Server-sent events. Gaps between tokens go to `step`."""

    def __init__(self, stream: StreamMachine, step: StepEstimate | None) -> None:
        self._stream = stream
        self._step = step
        self._decoder = SSEDecoder()

    def read(self, chunk: bytes, t_ns: int, /) -> None:
        stream = self._stream
        for event in self._decoder.feed(chunk, t_ns):
            if stream.outcome is not None:
                return
            before = stream.tokens_read
            stream.event(event, t_ns)
            if (
                stream.tokens_read != before
                and self._step is not None
                and (gap_ns := stream.last_gap_ns) is not None
            ):
                self._step.observe(gap_ns)

    def end(self) -> None:
        self._stream.body_ended(time.perf_counter_ns())

    def read_late(self, chunk: bytes) -> None:
        for event in self._decoder.feed(chunk, time.perf_counter_ns()):
            self._stream.late_event(event)

    def end_late(self) -> None:
        self._stream.late_end(time.perf_counter_ns())


class UnaryReader:
    """A body that means nothing before it is complete."""

    def __init__(self, stream: StreamMachine, max_bytes: int = MAX_ANSWER_BYTES) -> None:
        self._stream = stream
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._size = 0

    def read(self, chunk: bytes, _t_ns: int, /) -> None:
        self._parts.append(chunk)
        self._size += len(chunk)
        if self._size > self._max_bytes:
            raise EndlessEventError(f"the answer has more than {self._max_bytes} bytes")

    def end(self) -> None:
        self._stream.answer(b"".join(self._parts), time.perf_counter_ns())

    def read_late(self, chunk: bytes) -> None:
        self.read(chunk, time.perf_counter_ns())

    def end_late(self) -> None:
        t_ns = time.perf_counter_ns()
        self._stream.late_event(b"".join(self._parts))
        self._stream.late_end(t_ns)


_MAX_BYTES: Final = 65536
_SHOWN_CHARS: Final = 200


def read_refusal(connection: Connection) -> bytes:
    """The body of an error, as far as it comes: its status has already decided the outcome.

    A redirect or a compressed body is replaced by words that say what to do.
    """
    if 300 <= connection.status_code < 400 and (place := connection.header(b"location")):
        shown = place.decode("utf-8", "replace")[:_SHOWN_CHARS]
        return f"the server redirects to {shown}: name that address as the target".encode()
    if connection.is_encoded:
        return b"the body is compressed, though the request did not allow that"
    body = b""
    try:
        while len(body) < _MAX_BYTES and (chunk := connection.receive()) is not None:
            body += chunk
    except httpx.TransportError:
        return body
    return body


class Exchange:
    """Reads one answer until it ends, or its user leaves.

    `after_first_token` replaces the connection's limit then. `cancel` makes a request to the
    server's cancel endpoint.

    Its state: `_think_ns`, how long to think before leaving, once the user wants to, and
    `_has_tokens`, whether the first has come.
    """

    def __init__(
        self,
        connection: Connection,
        stream: StreamMachine,
        reader: Reader,
        *,
        leave_rule: LeaveRule,
        way: Way,
        after_first_token: Limit | None,
        cancel: Callable[[], CancelRequest],
    ) -> None:
        self._connection = connection
        self._stream = stream
        self._reader = reader
        self._leave_rule = leave_rule
        self._way = way
        self._after_first_token = after_first_token
        self._cancel = cancel
        self._think_ns: int | None = None
        self._has_tokens = False

    def see_through(self, think_ns: int | None) -> None:
        """Read until there is an outcome. `think_ns`: what the rule said before the sending."""
        connection, stream = self._connection, self._stream
        self._think_ns = think_ns
        if connection.has_head and not self._is_accepted():
            return
        while stream.outcome is None:
            if self._think_ns is not None and stream.can_leave and not connection.is_complete:
                self._think_and_leave(self._think_ns)
            elif not connection.receive_each(self._take):
                self._reader.end()

    def _take(self, chunk: bytes, t_ns: int) -> bool:
        """Read; return whether nothing changed by it, as for most tokens."""
        stream = self._stream
        self._reader.read(chunk, t_ns)
        self._think_ns = self._leave_rule(stream.tokens_read)
        if stream.tokens_read and not self._has_tokens:
            self._has_tokens = True
            if self._connection.limit is not None:
                self._connection.limit = self._after_first_token
            return False
        return self._think_ns is None and stream.outcome is None

    def _is_accepted(self) -> bool:
        connection = self._connection
        self._stream.headers(connection.status_code)
        if connection.status_code == 200:
            return True
        self._stream.refusal(read_refusal(connection), time.perf_counter_ns())
        return False

    def _think_and_leave(self, think_ns: int) -> None:
        connection, stream = self._connection, self._stream
        if connection.has_head:  # else patience has ended already
            leaves_at_ns = connection.leaves_at_ns or time.perf_counter_ns() + think_ns
            self._read_until(leaves_at_ns)
            if connection.is_complete or not stream.can_leave:
                return  # the answer ended while the user was thinking
        if self._way is Way.CANCEL:
            self._ask_to_cancel(think_ns)
        else:
            self._leave(think_ns)

    def _read_until(self, leaves_at_ns: int) -> None:
        """Read while the user thinks, and then the bytes that have come by then. Bytes that come
        meanwhile are left: a server that never pauses would keep the user for ever."""
        connection, stream = self._connection, self._stream
        while stream.can_leave and (wait_ns := leaves_at_ns - time.perf_counter_ns()) > 0:
            chunk = connection.receive_within(wait_ns / 1e9)
            if chunk is None:
                break
            self._reader.read(chunk, connection.received_ns)
        present = connection.receive_present()
        while stream.can_leave and (chunk := next(present, None)) is not None:
            self._reader.read(chunk, connection.received_ns)

    def _leave(self, think_ns: int) -> None:
        t0_ns, wire_close = leave(self._way, self._connection)
        if self._way is Way.KILLED:
            self._read_what_was_passed_on()
            if not self._stream.can_leave:
                return  # the answer had already ended
        self._stream.leave(t0_ns, think_ns=think_ns, wire_close=wire_close)
        if self._way in READS_ON:
            self._read_on()

    def _ask_to_cancel(self, think_ns: int) -> None:
        with self._cancel() as request:
            t0_ns, wire_close = request.send()
            self._stream.leave(t0_ns, think_ns=think_ns, wire_close=wire_close)
            self._read_on()
            if (problem := request.problem()) is not None:
                self._stream.complain(problem)

    def _read_what_was_passed_on(self) -> None:
        """Read what the killed process had received by t0 and passed on to us."""
        if not self._connection.has_head:
            return
        connection = self._connection
        with _until_it_breaks():
            while (chunk := connection.receive()) is not None:
                self._reader.read(chunk, connection.received_ns)

    def _read_on(self) -> None:
        """Read what still comes, until the server ends it or nothing comes in time."""
        connection = self._connection
        try:
            with _until_it_breaks():
                if not connection.has_head:
                    connection.receive_head(None)
                while (chunk := connection.receive()) is not None:
                    self._reader.read_late(chunk)
            self._reader.end_late()
        except httpx.TimeoutException:
            return


@contextmanager
def _until_it_breaks() -> Iterator[None]:
    """The end of the connection is expected here; a time-out is raised."""
    try:
        yield
    except httpx.TimeoutException:
        raise
    except (httpx.TransportError, EndlessEventError):
        return
