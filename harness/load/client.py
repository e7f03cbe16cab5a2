"""One request from start to row: moves bytes from the transport through a reader into the stream
machine, and asks the user whether to leave: before it is sent, and after each receive.

Leaving is an act, with a time: the think time passes while the answer is still read (a reader's
screen goes on filling), then whatever has already arrived is read too, and then t0 is stamped and
the user is gone (`harness.load.leave` has the ways). So `tokens_read` is what this host had
received at t0, not merely what the program had got round to, and a token still unread in the
kernel shows up as a reset.

Some ways leave a connection open that no user reads. It lingers until the load ends, or until the
server had time to settle after it, and is then reset.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

import httpx
import msgspec

from harness.load.connect import NoHandleLeftError
from harness.load.connection import Connection, Limit
from harness.load.dialect import request_body
from harness.load.exchange import Exchange, StreamReader, UnaryReader
from harness.load.leave import CancelRequest, cancel_url
from harness.load.sse import EndlessEventError
from harness.load.stream import StreamMachine
from harness.load.transport import GaveUpError, SocketTransport, WireRequest, head_of, opened
from harness.records import Delivery, Outcome, RequestRow, Role, Way, WireClose
from harness.workload.abandon import LeaveRule, RequestSpec
from harness.workload.observed_latency import StepEstimate
from harness.workload.plan import LoadPlan
from harness.workload.workload import RunSettings

_PROGRAM: Final = "import os\nwhile os.read(0, 4096): pass"


def keep_open(descriptors: Sequence[int]) -> None:
    """Keep these open until standard input ends. The caller may close its own at once."""
    subprocess.Popen([sys.executable, "-I", "-S", "-c", _PROGRAM], pass_fds=descriptors)


class StreamClient:
    """Sends requests to one server. `open_streams` is the number of requests now in flight.

    `give_up` is called with the reason where it cannot go on, and that is not the server's doing.
    Its state: `_lingering`, the connections that users left open.
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
        """Close the connections that no request uses, and reset those that users left open; by a
        plan that says so, only when the harness has seen the server settle."""
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
        """Send one request and see it through. `keep` gets its row, also if this call is killed."""
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
                exchange = self._exchange(spec, stream, connection, leave_rule, later_limit)
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

    def _exchange(
        self,
        spec: RequestSpec,
        stream: StreamMachine,
        connection: Connection,
        leave_rule: LeaveRule,
        later_limit: Limit | None,
    ) -> Exchange:
        is_stream = spec.delivery is Delivery.STREAM
        return Exchange(
            connection,
            stream,
            StreamReader(stream, self.step) if is_stream else UnaryReader(stream),
            leave_rule=leave_rule,
            way=spec.way or Way.FIN,
            after_first_token=later_limit,
            cancel=lambda: self._cancel_request(spec.request_id),
        )

    def _cancel_request(self, request_id: str) -> CancelRequest:
        assert self._plan.target.cancel_path is not None
        url = httpx.URL(cancel_url(self._plan.url, self._plan.target.cancel_path, request_id))
        return CancelRequest(self._transport, url.raw_path, self._fields, self._connect_s)


def _fields(plan: LoadPlan, url: httpx.URL, api_key: str | None) -> list[tuple[bytes, bytes]]:
    """The headers of all requests. The plan's win, but for those that name the request."""
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
