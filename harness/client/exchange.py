"""One request from start to row: bytes from the transport go through a reader into the stream
machine, and the user's rule says when to leave: before the sending, and after each receive.

The think time passes while the answer is still read (a reader's screen fills further), then the
bytes that have already arrived are read, then t0 is stamped and the user leaves. So `tokens_read`
is what this host had received at t0, and a token still unread in the kernel shows up as a reset.
Connections that a way of leaving leaves open linger until the load ends, and are then reset.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Event
from typing import Final
from urllib.parse import quote

import httpx

from harness.client.connection import Http1Connection
from harness.client.conversation import Conversation, limits
from harness.client.discarded import Discarded
from harness.client.http_requests import HttpClient
from harness.client.leave import leave
from harness.client.reader import Reader, StreamReader, TappedReader, UnaryReader
from harness.client.sse import EndlessEventError
from harness.client.stream import ENDED_EARLY
from harness.client.transport import GaveUpError, WireRequest, head_of
from harness.client.wire_log import WireLog
from harness.http_client import is_out_of_handles
from harness.records import Delivery, Outcome, RequestRow, Way, WireClose
from harness.workload.abandon import LeaveRule, RequestSpec
from harness.workload.plan import LoadPlan

_MAX_REFUSAL_BYTES: Final = 65536
_SHOWN_CHARS: Final = 200
_KEEP_OPEN: Final = "import os\nwhile os.read(0, 4096): pass"


def keep_open(descriptors: Sequence[int]) -> None:
    """A child keeps these open until standard input ends; the caller may close its own at once."""
    subprocess.Popen([sys.executable, "-I", "-S", "-c", _KEEP_OPEN], pass_fds=descriptors)


class StreamClient(HttpClient):
    """`give_up` is called with the reason when the client itself cannot continue."""

    def __init__(
        self,
        plan: LoadPlan,
        *,
        api_key: str | None,
        give_up: Callable[[str], None] = lambda _why: None,
        wire: WireLog | None = None,
    ) -> None:
        super().__init__(plan, api_key=api_key, wire=wire)
        self.lingering: list[Http1Connection] = []
        self.give_up = give_up

    def close(self) -> None:
        """Close the idle connections and reset the lingering ones: now, or, if the plan says so,
        after the harness has seen the server settle."""
        if self.lingering and self.plan.left_open_outlive:
            keep_open([connection.sock.fileno() for connection in self.lingering])
        self.reset_lingering()
        super().close()

    def reset_lingering(self) -> None:
        """The connections whose users have left without closing them."""
        for connection in self.lingering:
            connection.reset()
        self.lingering.clear()

    @property
    def num_reused(self) -> int:
        """Requests that went over a connection which had served another one."""
        return sum(frontend.transport.num_reused for frontend in self._frontends)

    def begin(self, spec: RequestSpec, prompt: str, leave_rule: LeaveRule) -> Conversation:
        return Http1Exchange(self, self.build(spec, prompt), spec, leave_rule)

    def build(self, spec: RequestSpec, prompt: str) -> WireRequest:
        raw_path, fields, encoded = self.message(spec, prompt)
        return WireRequest(
            head=head_of(raw_path, fields, encoded),
            body=encoded,
            connect_s=self.connect_s,
            next_byte_s=self.plan.run.timeout_s,
            way=spec.way,
        )

    def build_cancel(self, spec: RequestSpec) -> WireRequest:
        path, frontend = self.plan.target.cancel_path, self.frontend_of(spec.user)
        assert path is not None
        path = path.replace("{id}", quote(spec.request_id, safe=""))
        return WireRequest(
            head=head_of(frontend.path(path), frontend.fields),
            connect_s=self.connect_s,
            next_byte_s=self.connect_s,
        )


def _read_refusal(connection: Http1Connection) -> bytes:
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


class Http1Exchange:
    """Sends one request, and reads the answer until it ends, or its user leaves after `_think_ns`
    (None: reads on)."""

    def __init__(
        self, client: StreamClient, request: WireRequest, spec: RequestSpec, leave_rule: LeaveRule
    ) -> None:
        sent_ns = time.perf_counter_ns()
        self.stream = client.machine(spec, sent_ns)
        is_stream = spec.delivery is Delivery.STREAM
        self._reader: Reader = (
            StreamReader(self.stream, client.step) if is_stream else UnaryReader(self.stream)
        )
        request.tap = None if client.wire is None else client.wire.tap(spec)
        if request.tap is not None:
            self._reader = TappedReader(self._reader, self.stream, request.tap)
        self._client = client
        self.frontend = client.frontend_of(spec.user)
        self._request = request
        self._spec = spec
        self._way = spec.way or Way.FIN
        self._leave_rule = leave_rule
        self._sent_ns = sent_ns
        request.limit, self._later_limit = limits(client.plan.run, spec.delivery, sent_ns)
        self._think_ns: int | None = None
        self._has_tokens = False
        self._leaves_at_once = self._is_leaving = self._waits = False
        self._resumed: Event | None = None  # of a user that reads nothing for a while
        self._connection: Http1Connection | None = None
        self._discarded: Discarded | None = None
        self.bytes_read = 0  # of the body

    def see_through(self) -> None:
        try:
            self._converse()
        except httpx.TimeoutException as error:
            self._end_badly(self.stream.time_out, error)
        except (httpx.TransportError, EndlessEventError) as error:
            self._end_badly(self.stream.break_off, error)
            if isinstance(error.__cause__, OSError) and is_out_of_handles(error.__cause__):
                self._client.give_up(str(error))

    def _end_badly(self, end: Callable[[int, str], None], error: Exception) -> None:
        """An event that is there without its blank line may still say how the answer ended."""
        now_ns = time.perf_counter_ns()
        if self.stream.outcome is None and self._discarded is None:
            self._reader.read_rest(now_ns)
        if self.stream.outcome is None:
            end(now_ns, str(error))

    def note_wire(self, row: RequestRow) -> None:
        row.resent = self._request.is_resent
        row.frontend = self.frontend.number
        if not self._request.is_opened and row.outcome is not Outcome.FAILED:
            row.wire_close = WireClose.UNOPENED
        if row.outcome is Outcome.ABANDONED:
            row.way = self._way.value
        if self._request.tap is not None:
            self._request.tap.ended(row)

    def leave_at_once(self, way: Way | None) -> None:
        if way in (Way.KILLED, Way.STOP_READING) and way is not self._spec.way:
            raise ValueError(f"{way} needs a connection made for it: name the way in the request")
        if self._is_leaving or self.stream.outcome is not None:
            return
        self._way = way or self._way
        self._leaves_at_once, self._think_ns = True, 0
        self._request.leaves_at_ns = time.perf_counter_ns()

    def stall(self) -> None:
        """Read nothing more after the next bytes, until `resume`, or until the user leaves."""
        self._resumed = Event()

    @property
    def is_stalled(self) -> bool:
        return self._resumed is not None and not self._resumed.is_set()

    def resume(self) -> None:
        assert self._resumed is not None
        self._resumed.set()

    def set_aside(self) -> bool:
        """Decode nothing any more: `discard` throws away what comes, so that one process can hold a
        thousand streams. False: this connection must be read (TLS)."""
        if self._connection is None or self._connection.tls is not None:
            return False
        self._discarded = self._discarded or Discarded()
        self.stall()
        return True

    def discard(self) -> None:
        """Throw away what has come since the last time, and notice the end of the answer."""
        connection, discarded = self._connection, self._discarded
        if connection is None or discarded is None or not self._is_idle:
            return
        discarded.take(connection.receive_raw_present())
        if discarded.has_ended:
            self.resume()

    @property
    def _is_idle(self) -> bool:
        """It waits in `_read` until it is resumed."""
        return self._waits and self.stream.outcome is None and not self._is_leaving

    @property
    def waits_for_interrupt(self) -> bool:
        return self._leaves_at_once and not self._is_leaving and self.stream.can_leave

    def _converse(self) -> None:
        think_ns = 0 if self._leaves_at_once else self._leave_rule(0)
        self._think_ns = think_ns
        if think_ns is not None and self._spec.counts_from_start:
            self._request.leaves_at_ns = self._sent_ns + think_ns
        else:
            self._request.patience_ns = think_ns
        try:
            with self.frontend.transport.open(self._request) as connection:
                self._read(connection)
                if connection.is_kept:
                    self._client.lingering.append(connection)
        except GaveUpError:
            t0_ns = time.perf_counter_ns()
            self.stream.leave(t0_ns, think_ns=think_ns or 0, wire_close=WireClose.UNOPENED)

    def _read(self, connection: Http1Connection) -> None:
        stream, self._connection = self.stream, connection

        def take(chunk: bytes, t_ns: int) -> bool:
            return self._take(connection, chunk, t_ns)

        if connection.has_head:
            if self._request.tap is not None:
                self._request.tap.head(connection.received_ns, connection.status_code)
            stream.headers(connection.status_code)
            if connection.status_code != 200:
                stream.refusal(_read_refusal(connection), time.perf_counter_ns())
                return
        while stream.outcome is None:
            if self._think_ns is not None and stream.can_leave and not connection.is_complete:
                self._think_and_leave(connection, self._think_ns)
                continue
            with suppress(GaveUpError):  # `leave_at_once`
                self._wait_until_resumed()
                if self._discarded is not None and self._discarded.has_ended:
                    self._end_unread(self._discarded)
                elif not connection.receive_each(take):
                    self._reader.end()

    def _wait_until_resumed(self) -> None:
        if self._resumed is None:
            return
        self._waits = True
        try:
            self._resumed.wait()
        finally:
            self._waits = False

    def _end_unread(self, discarded: Discarded) -> None:
        now_ns = time.perf_counter_ns()
        if not discarded.is_whole:
            self.stream.break_off(now_ns, discarded.error or ENDED_EARLY)
            return
        self.stream.finish()
        self.stream.body_ended(now_ns)

    def _take(self, connection: Http1Connection, chunk: bytes, t_ns: int) -> bool:
        """Read; return whether to read on at once, as after most tokens."""
        stream = self.stream
        self.bytes_read += len(chunk)
        self._reader.read(chunk, t_ns)
        think_ns = self._leave_rule(stream.tokens_for_plan)
        self._think_ns = 0 if self._leaves_at_once else think_ns
        if stream.tokens_read and not self._has_tokens:
            self._has_tokens = True
            if connection.limit is not None:
                connection.limit = self._later_limit
            return False
        return self._think_ns is None and stream.outcome is None and not self.is_stalled

    def _think_and_leave(self, connection: Http1Connection, think_ns: int) -> None:
        stream, self._is_leaving = self.stream, True
        if not self._read_last(connection, think_ns):
            return
        if self._way is Way.CANCEL:
            self._ask_to_cancel(connection, think_ns)
            return
        tap = self._request.tap
        unread = 0 if tap is None else connection.unread_bytes()
        t0_ns, wire_close = leave(self._way, connection)
        if tap is not None:
            tap.left(t0_ns, self._way, unread, wire_close)
        if self._way is Way.KILLED and connection.has_head:
            self._read_to_the_end(connection)  # what the process had received by t0 and passed on
            if not self.stream.can_leave:
                return  # the answer had already ended
        stream.leave(t0_ns, think_ns=think_ns, wire_close=wire_close)
        if self._way.reads_on:
            self._read_on(connection)

    def _read_last(self, connection: Http1Connection, think_ns: int) -> bool:
        """Read what comes while the user thinks. False: the answer has ended by then."""
        if self._discarded is not None:
            self._discarded.take(connection.receive_raw_present())
            if self._discarded.has_ended:
                self._end_unread(self._discarded)
        elif connection.has_head:  # else patience has ended already
            leaves_at_ns = time.perf_counter_ns() + think_ns
            if connection.leaves_at_ns is not None and not self._leaves_at_once:
                leaves_at_ns = connection.leaves_at_ns
            self._read_until(connection, leaves_at_ns)
        return self.stream.can_leave and not connection.is_complete

    def _read_until(self, connection: Http1Connection, leaves_at_ns: int) -> None:
        """Read while the user thinks, then what has arrived by then. Bytes that arrive during this
        last read stay unread: a server that never pauses would otherwise keep the user for ever."""
        stream = self.stream
        while stream.can_leave and (wait_ns := leaves_at_ns - time.perf_counter_ns()) > 0:
            chunk = connection.receive_within(wait_ns / 1e9)
            if chunk is None:
                break
            self._reader.read(chunk, connection.received_ns)
        present = connection.receive_present()
        while stream.can_leave and (chunk := next(present, None)) is not None:
            self._reader.read(chunk, connection.received_ns)

    def _ask_to_cancel(self, connection: Http1Connection, think_ns: int) -> None:
        request = self._client.build_cancel(self._spec)
        asking = self.frontend.transport.connect(request)
        try:
            t0_ns = time.perf_counter_ns()
            asking.send(request.head, request.next_byte_s)
            if self._request.tap is not None:
                self._request.tap.left(t0_ns, Way.CANCEL, 0, WireClose.NOTHING)
            self.stream.leave(t0_ns, think_ns=think_ns, wire_close=WireClose.NOTHING)
            self._read_on(connection)
            asking.receive_head()
            if not 200 <= asking.status_code < 300:
                self.stream.complain(f"the cancel endpoint answered HTTP {asking.status_code}")
        except httpx.TransportError as error:
            if self.stream.outcome is None:
                raise
            self.stream.complain(f"the cancel endpoint did not answer: {error}")
        finally:
            asking.close()

    def _read_on(self, connection: Http1Connection) -> None:
        with suppress(httpx.TimeoutException):
            self._read_to_the_end(connection)
            self._reader.end()

    def _read_to_the_end(self, connection: Http1Connection) -> None:
        """However it ends; raises a time-out only."""
        try:
            if not connection.has_head:
                connection.receive_head()
            while (chunk := connection.receive()) is not None:
                self._reader.read(chunk, connection.received_ns)
        except httpx.TimeoutException:
            raise
        except (httpx.TransportError, EndlessEventError):
            return
