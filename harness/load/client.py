"""One request from start to row: bytes from the transport go through a reader into the stream
machine, and the user's rule says when to leave: before the sending, and after each receive.

Leaving is an act at a moment. The think time passes while the answer is still read (a reader's
screen goes on filling), then the bytes that have already arrived are read, then t0 is stamped and
the user leaves (`harness.load.leave` has the ways). So `tokens_read` is what this host had received
at t0, not merely what the program had processed, and a token still unread in the kernel shows up as
a reset.

Some ways leave a connection open that no user reads. It lingers until the load ends, or until the
server had time to settle after it, and is then reset.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Final

import httpx
import msgspec

from harness.load.connect import NoHandleLeftError
from harness.load.connection import Connection, Limit
from harness.load.dialect import request_body
from harness.load.leave import READS_ON, CancelRequest, cancel_url, leave
from harness.load.sse import EndlessEventError, SSEDecoder
from harness.load.stream import StreamMachine
from harness.load.transport import GaveUpError, SocketTransport, WireRequest, head_of, opened
from harness.records import Delivery, Outcome, RequestRow, Role, Way, WireClose
from harness.workload.abandon import LeaveRule, RequestSpec
from harness.workload.observed_latency import StepEstimate
from harness.workload.plan import LoadPlan
from harness.workload.workload import RunSettings

MAX_ANSWER_BYTES: Final = 1 << 26  # of an answer in one piece
_MAX_REFUSAL_BYTES: Final = 65536
_SHOWN_CHARS: Final = 200
_KEEP_OPEN: Final = "import os\nwhile os.read(0, 4096): pass"


def keep_open(descriptors: Sequence[int]) -> None:
    """A child keeps these open until standard input ends; the caller may close its own at once."""
    subprocess.Popen([sys.executable, "-I", "-S", "-c", _KEEP_OPEN], pass_fds=descriptors)


class StreamClient:
    """Sends requests to one server. `open_streams`: the requests now in flight.

    `give_up` is called with the reason when the client itself cannot go on.
    """

    def __init__(
        self,
        plan: LoadPlan,
        *,
        api_key: str | None,
        give_up: Callable[[str], None] = lambda _why: None,
    ) -> None:
        self.open_streams = 0
        self._give_up = give_up
        self.step = StepEstimate()
        self._plan = plan
        self._lingering: list[Connection] = []
        self._connect_s = plan.run.connect_timeout_s or plan.run.timeout_s
        self._url = httpx.URL(plan.url.rstrip("/") + plan.target.path)
        self._transport = SocketTransport(
            self._url, ca_file=plan.ca_file, keep_alive=plan.run.keep_alive
        )
        self._transport.load_trust()
        self._fields = _fields(plan, self._url, api_key)

    def close(self) -> None:
        """Close the idle connections and reset the lingering ones: now, or, if the plan says so,
        after the harness has seen the server settle."""
        if self._lingering and self._plan.left_open_outlive:
            keep_open([connection.sock.fileno() for connection in self._lingering])
        for connection in self._lingering:
            connection.reset()
        self._lingering.clear()
        self._transport.close()

    def ask(
        self,
        spec: RequestSpec,
        prompt: str,
        leave_rule: LeaveRule,
        keep: Callable[[RequestRow], None],
    ) -> None:
        """Send one request and see it through. `keep` gets its row, even if this call is killed."""
        request = self._build(spec, prompt)
        sent_ns = time.perf_counter_ns()
        stream = StreamMachine(
            spec,
            sent_ns=sent_ns,
            continuous_usage=self._plan.target.continuous_usage,
            usage_per_choice=self._plan.target.usage_per_choice,
        )
        self.open_streams += 1
        try:
            self._see_through(request, spec, stream, leave_rule, sent_ns)
        except httpx.TimeoutException as error:
            stream.time_out(time.perf_counter_ns(), str(error))
        except (httpx.TransportError, EndlessEventError) as error:
            stream.break_off(time.perf_counter_ns(), str(error))
            if isinstance(error, NoHandleLeftError):
                self._give_up(str(error))
        except Exception as error:
            if stream.outcome is None:
                stream.break_off(time.perf_counter_ns(), f"a bug of the client: {error!r}")
            raise
        except BaseException:
            if stream.outcome is None:
                stream.cut(time.perf_counter_ns())
            raise
        finally:
            self.open_streams -= 1
            row = stream.row()
            row.resent = request.is_resent
            if not request.is_opened and row.outcome is not Outcome.FAILED:
                row.wire_close = WireClose.UNOPENED
            keep(row)

    def _see_through(
        self,
        request: WireRequest,
        spec: RequestSpec,
        stream: StreamMachine,
        leave_rule: LeaveRule,
        sent_ns: int,
    ) -> None:
        think_ns = leave_rule(0)
        request.limit, later_limit = limits(self._plan.run, spec.delivery, sent_ns)
        if think_ns is not None and spec.counts_from_start:
            request.leaves_at_ns = sent_ns + think_ns
        else:
            request.patience_ns = think_ns
        try:
            with opened(self._transport, request) as connection:
                is_stream = spec.delivery is Delivery.STREAM
                exchange = Exchange(
                    connection,
                    stream,
                    StreamReader(stream, self.step) if is_stream else UnaryReader(stream),
                    leave_rule=leave_rule,
                    way=spec.way or Way.FIN,
                    after_first_token=later_limit,
                    cancel=lambda: self._cancel_request(spec.request_id),
                )
                exchange.see_through(think_ns)
                if connection.is_kept:
                    self._lingering.append(connection)
        except GaveUpError:
            t0_ns = time.perf_counter_ns()
            stream.leave(t0_ns, think_ns=think_ns or 0, wire_close=WireClose.UNOPENED)

    def _build(self, spec: RequestSpec, prompt: str) -> WireRequest:
        body = request_body(
            self._plan.target,
            self._plan.model,
            prompt,
            max_tokens=spec.max_tokens,
            delivery=spec.delivery,
            n=spec.n,
            temperature=0.0 if spec.role is Role.CANARY else None,
        )
        encoded = msgspec.json.encode(body)
        is_stream = spec.delivery is Delivery.STREAM
        fields = [
            *self._fields,
            (b"x-request-id", spec.request_id.encode()),
            (b"accept", b"text/event-stream" if is_stream else b"application/json"),
        ]
        return WireRequest(
            head=head_of(self._url.raw_path, fields, encoded),
            body=encoded,
            connect_s=self._connect_s,
            next_byte_s=self._plan.run.timeout_s,
            way=spec.way,
        )

    def _cancel_request(self, request_id: str) -> CancelRequest:
        assert self._plan.target.cancel_path is not None
        url = httpx.URL(cancel_url(self._plan.url, self._plan.target.cancel_path, request_id))
        return CancelRequest(self._transport, url.raw_path, self._fields, self._connect_s)


def _fields(plan: LoadPlan, url: httpx.URL, api_key: str | None) -> list[tuple[bytes, bytes]]:
    """The headers of all requests. The plan's override ours, except those of a single request."""
    headers = httpx.Headers(
        {
            "host": url.netloc.decode("ascii"),
            "user-agent": "walkaway",
            "accept-encoding": "identity",
            "connection": "keep-alive" if plan.run.keep_alive else "close",
            "content-type": "application/json",
        }
    )
    if api_key is not None:
        headers["authorization"] = f"Bearer {api_key}"
    headers.update(plan.headers)
    ours = (b"accept", b"x-request-id", b"content-length")
    return [pair for pair in headers.raw if pair[0].lower() not in ours]


def limits(run: RunSettings, delivery: Delivery, sent_ns: int) -> tuple[Limit | None, Limit | None]:
    """The limit until the first token, and the limit from there on."""
    total = first = None
    if (total_s := run.total_timeout_s) is not None:
        complaint = f"the answer was not complete {total_s:g} s after the sending"
        total = first = Limit(sent_ns + int(total_s * 1e9), complaint)
    if (first_s := run.first_token_timeout_s) is not None and delivery is Delivery.STREAM:
        first_token = Limit(
            sent_ns + int(first_s * 1e9), f"no token came {first_s:g} s after the sending"
        )
        first = first_token if total is None else min(first_token, total)
    return first, total


class StreamReader:
    """Reads server-sent events: the bytes of each receive with its time; after leaving, by the
    `late` methods. Gaps between tokens go to `step`."""

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
    """Reads a body that means nothing before it is complete."""

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


def _read_refusal(connection: Connection) -> bytes:
    """The body of an error, as far as it comes; its status has already decided the outcome. For a
    redirect and a compressed body, an explanation instead."""
    if 300 <= connection.status_code < 400 and (place := connection.header(b"location")):
        shown = place.decode("utf-8", "replace")[:_SHOWN_CHARS]
        return f"the server redirects to {shown}: name that address as the target".encode()
    if connection.is_encoded:
        return b"the body is compressed, though the request did not allow that"
    body = b""
    try:
        while len(body) < _MAX_REFUSAL_BYTES and (chunk := connection.receive()) is not None:
            body += chunk
    except httpx.TransportError:
        return body
    return body


class Exchange:
    """Reads one answer until it ends, or its user leaves.

    `after_first_token` replaces the connection's limit at the first token. `cancel` makes a request
    to the server's cancel endpoint. `_think_ns`: the pause before leaving; None: the user reads on.
    """

    def __init__(
        self,
        connection: Connection,
        stream: StreamMachine,
        reader: StreamReader | UnaryReader,
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
        """Read until there is an outcome. `think_ns`: the rule's answer before the sending."""
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
        """Read; return whether reading simply goes on, as after most tokens."""
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
        self._stream.refusal(_read_refusal(connection), time.perf_counter_ns())
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
        """Read while the user thinks, then what has arrived by then. Bytes that arrive during this
        last read stay unread: a server that never pauses would otherwise keep the user for ever."""
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
        with closing(self._cancel()) as request:
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
        """Read until the server ends the answer or nothing comes in time."""
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
    """Accept the end of the connection, however it ends; raise a time-out."""
    try:
        yield
    except httpx.TimeoutException:
        raise
    except (httpx.TransportError, EndlessEventError):
        return
