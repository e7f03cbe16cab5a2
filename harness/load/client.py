"""One streamed request from start to row: moves bytes from the transport through the decoder into
the stream machine, and asks the user whether to leave: before it is sent, and after each receive.

Leaving is an act, with a time: the think time passes while the stream is still read (a reader's
screen goes on filling), then whatever has already arrived is read too, and then t0 is stamped and
the connection closed. So `tokens_read` is what this host had received at t0, not merely what
the program had got round to, and a token still unread in the kernel shows up as a reset.
"""

import time
from collections.abc import Callable
from typing import Final

import httpx

from harness.load.abandon import StepEstimate
from harness.load.dialect import request_body
from harness.load.plan import LoadPlan
from harness.load.sse import EventTooLargeError, SSEDecoder
from harness.load.stream import StreamMachine, Ticket
from harness.load.transport import (
    PATIENCE_NS,
    Connection,
    LeftBeforeHeadersError,
    SocketTransport,
    opened,
)
from harness.records import RequestRow

# Asked with the number of tokens read: None to read on, or how long to think before leaving. Asked
# with 0 before the request is sent; whoever will leave without a token thinks from the sending on.
LeaveRule = Callable[[int], int | None]

_MAX_REFUSAL_BYTES: Final = 65536


def never(_tokens_read: int) -> None:
    """The rule of those who stay."""


class StreamClient:
    """Asks one server. `open_streams` is the number of requests now in flight."""

    def __init__(self, plan: LoadPlan, *, api_key: str | None) -> None:
        self.open_streams = 0
        self.step = StepEstimate()
        self._plan = plan
        headers = {
            "accept": "text/event-stream",
            "accept-encoding": "identity",
            "connection": "close",
            "content-type": "application/json",
        }
        if api_key is not None:
            headers["authorization"] = f"Bearer {api_key}"
        self._http = httpx.Client(
            transport=SocketTransport(),
            timeout=plan.timeout_s,
            headers=headers | plan.headers,
            trust_env=False,
        )
        self._url = plan.url.rstrip("/") + plan.path

    def ask(
        self,
        ticket: Ticket,
        prompt: str,
        leave_rule: LeaveRule,
        keep: Callable[[RequestRow], None],
    ) -> None:
        """Send one request and see it through. `keep` gets its row, also if this call is killed."""
        request = self._http.build_request(
            "POST",
            self._url,
            content=request_body(self._plan, prompt, ticket.max_tokens),
            headers={"x-request-id": ticket.request_id},
        )
        think_ns: int | None = None
        stream = StreamMachine(
            ticket,
            sent_ns=time.perf_counter_ns(),
            continuous_usage=self._plan.continuous_usage,
        )
        self.open_streams += 1
        try:
            think_ns = leave_rule(0)
            request.extensions[PATIENCE_NS] = think_ns
            with opened(self._http, request) as connection:
                self._see_through(connection, stream, leave_rule, think_ns)
        except LeftBeforeHeadersError as left:
            assert think_ns is not None
            stream.leave(left.t0_ns, think_ns=think_ns, wire_close=left.wire_close)
        except httpx.TimeoutException as error:
            stream.time_out(time.perf_counter_ns(), str(error))
        except (httpx.TransportError, EventTooLargeError) as error:
            stream.break_off(time.perf_counter_ns(), str(error))
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
            keep(stream.row())

    def _see_through(
        self,
        connection: Connection,
        stream: StreamMachine,
        leave_rule: LeaveRule,
        think_ns: int | None,
    ) -> None:
        stream.headers(connection.status_code)
        if connection.status_code != 200:
            stream.refusal(_read_refusal(connection), time.perf_counter_ns())
            return
        decoder = SSEDecoder()
        leaves_at_ns = connection.leaves_at_ns
        while stream.outcome is None:
            if think_ns is not None and stream.can_leave and not connection.is_complete:
                leaves_at_ns = leaves_at_ns or time.perf_counter_ns() + think_ns
                self._leave(connection, stream, decoder, leaves_at_ns, think_ns)
            elif (chunk := connection.receive()) is not None:
                self._read(chunk, stream, decoder)
                think_ns = leave_rule(stream.tokens_read)
            else:
                stream.body_ended(time.perf_counter_ns())

    def _read(self, chunk: bytes, stream: StreamMachine, decoder: SSEDecoder) -> None:
        for event in decoder.feed(chunk, time.perf_counter_ns()):
            if stream.outcome is not None:
                return
            before = stream.tokens_read
            stream.event(event.data, event.t_ns)
            if stream.tokens_read != before and (gap_ns := stream.last_gap_ns) is not None:
                self.step.observe(gap_ns)

    def _leave(
        self,
        connection: Connection,
        stream: StreamMachine,
        decoder: SSEDecoder,
        leaves_at_ns: int,
        think_ns: int,
    ) -> None:
        while stream.can_leave:
            wait_s = (leaves_at_ns - time.perf_counter_ns()) / 1e9
            chunk = connection.receive_within(wait_s)
            if chunk is None:
                break
            self._read(chunk, stream, decoder)
        if connection.is_complete or not stream.can_leave:
            return  # the answer ended while the user was thinking
        t0_ns, wire_close = connection.hang_up()
        stream.leave(t0_ns, think_ns=think_ns, wire_close=wire_close)


def _read_refusal(connection: Connection) -> bytes:
    """The body of an error, as far as it comes: its status has already decided the outcome."""
    body = b""
    try:
        while len(body) < _MAX_REFUSAL_BYTES and (chunk := connection.receive()) is not None:
            body += chunk
    except httpx.TransportError:
        return body
    return body
