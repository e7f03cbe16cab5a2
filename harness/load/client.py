"""One streamed request from start to row: moves bytes from the transport through the decoder into
the stream machine, and asks the user whether to leave now: once it is sent, and after each receive.

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
from harness.load.stream import State, StreamMachine, Ticket
from harness.load.transport import Connection, SocketTransport
from harness.records import RequestRow

# Asked with the number of tokens read: None to read on, or how long to think before leaving.
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
        self._transport = SocketTransport(timeout_s=plan.timeout_s)
        self._url = httpx.URL(plan.url.rstrip("/") + plan.path)
        self._headers = httpx.Headers(
            {
                "accept": "text/event-stream",
                "accept-encoding": "identity",
                "connection": "close",
                "content-type": "application/json",
            }
        )
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._headers.update(plan.headers)

    def ask(
        self,
        ticket: Ticket,
        prompt: str,
        leave_rule: LeaveRule,
        keep: Callable[[RequestRow], None],
    ) -> None:
        """Send one request and see it through. `keep` gets its row, also if this call is killed."""
        request = httpx.Request(
            "POST",
            self._url,
            content=request_body(self._plan, prompt, ticket.max_tokens),
            headers=self._headers,
        )
        request.headers["x-request-id"] = ticket.request_id
        stream = StreamMachine(
            ticket,
            sent_ns=time.perf_counter_ns(),
            continuous_usage=self._plan.continuous_usage,
        )
        self.open_streams += 1
        try:
            with self._transport.opened(request) as connection:
                self._see_through(connection, stream, leave_rule)
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
        self, connection: Connection, stream: StreamMachine, leave_rule: LeaveRule
    ) -> None:
        decoder = SSEDecoder()
        while stream.outcome is None:
            is_open = stream.can_leave and not connection.is_complete
            think_ns = leave_rule(stream.tokens_read) if is_open else None
            if think_ns is not None:
                self._leave(connection, stream, decoder, think_ns)
            elif (chunk := connection.receive()) is not None:
                self._read(chunk, connection, stream, decoder)
            else:
                stream.body_ended(time.perf_counter_ns())

    def _read(
        self, chunk: bytes, connection: Connection, stream: StreamMachine, decoder: SSEDecoder
    ) -> None:
        if stream.state is State.SENT and connection.has_head:
            stream.headers(connection.status_code)
            if connection.status_code != 200:
                body = chunk + _rest_of_refusal(connection)
                stream.refusal(body, time.perf_counter_ns())
                return
        for event in decoder.feed(chunk, time.perf_counter_ns()):
            if stream.outcome is not None:
                return
            before = stream.tokens_read
            stream.event(event.data, event.t_ns)
            if stream.tokens_read != before and (gap_ns := stream.last_gap_ns) is not None:
                self.step.observe(gap_ns)

    def _leave(
        self, connection: Connection, stream: StreamMachine, decoder: SSEDecoder, think_ns: int
    ) -> None:
        leaves_at_ns = time.perf_counter_ns() + think_ns
        while stream.can_leave:
            wait_s = (leaves_at_ns - time.perf_counter_ns()) / 1e9
            chunk = connection.receive_within(wait_s)
            if chunk is None:
                break
            self._read(chunk, connection, stream, decoder)
        if connection.is_complete or not stream.can_leave:
            return  # the answer ended while the user was thinking
        t0_ns, wire_close = connection.hang_up()
        stream.leave(t0_ns, think_ns=think_ns, wire_close=wire_close)


def _rest_of_refusal(connection: Connection) -> bytes:
    """More of an error's body, as far as it comes: its status has already decided the outcome."""
    body = b""
    try:
        while len(body) < _MAX_REFUSAL_BYTES and (chunk := connection.receive()) is not None:
            body += chunk
    except httpx.TransportError:
        return body
    return body
