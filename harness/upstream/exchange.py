"""One request, from its arrival until nothing more happens to it; and what the log says of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from harness.upstream.answers import DialectAnswer, error_body
from harness.upstream.connection import MOST_UNSENT_BYTES, UpstreamConnection
from harness.upstream.scheduler import NS_PER_MS, Work
from harness.upstream.truth import Record, Truth

JSON: Final = (("content-type", "application/json"),)
_STREAM: Final = (
    ("content-type", "text/event-stream; charset=utf-8"),
    ("cache-control", "no-cache"),
)
_HALTS: Final = ("break-reset", "break-end", "silent")


class Timer(Protocol):
    def cancel(self) -> None: ...


class Host(Protocol):
    """What an exchange needs of the server."""

    truth: Truth

    def submit(self, exchange: "UpstreamExchange") -> None: ...
    def leave(self, exchange: "UpstreamExchange") -> None: ...
    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTerms:
    """`has_early_head`: the head of a stream is sent at its arrival, else with its first token.
    `end_ms`: from the last token to the end of the answer, with its usage. `keeps_half_closed`: a
    FIN is no leave."""

    has_early_head: bool
    prefill_ms: float
    end_ms: float
    keeps_half_closed: bool


class UpstreamExchange:
    def __init__(
        self,
        host: Host,
        connection: UpstreamConnection,
        record: Record,
        answer: DialectAnswer,
        terms: AnswerTerms,
    ) -> None:
        self.record, self.asked = record, answer.asked
        order = self.asked.order
        self.act = order.act if not order.times or record.asked_before < order.times else "go-on"
        self.work = Work(
            prefill_ns=round(terms.prefill_ms * NS_PER_MS),
            tokens=self.asked.tokens,
            halts_at=order.after if self.act in _HALTS else None,
        )
        self._host, self._truth, self._connection = host, host.truth, connection
        self._answer, self._terms = answer, terms
        self._ending: Timer | None = None
        self._is_ending = False  # all of its bytes were sent, and the kernel has some to take

    def begin(self) -> None:
        self._connection.watcher = self
        if self.act.isdecimal():
            self._refuse(int(self.act))
            return
        if self.asked.is_stream and self._terms.has_early_head:
            self._send_head()
        self._host.submit(self)

    # From the scheduler

    def admitted(self) -> None:
        self._truth.note(self.record, "slot")

    def token(self) -> None:
        record, work = self.record, self.work
        record.token(self._truth.clock_ns())
        if self.asked.is_stream:
            self._send_token(work.made)
        if work.made == 1:
            self._truth.note(record, "first_token")
        if not work.is_made or record.over_ns is not None:
            return
        self._host.leave(self)
        self._truth.note(record, "stopped", why="length" if self.asked.is_cut else "stop")
        if self._terms.end_ms:
            self._ending = self._host.call_later(self._terms.end_ms / 1000, self._end)
        else:
            self._end()

    def halted(self) -> None:
        """The order's act takes the place of the next token."""
        if self.act != "silent":
            self._break()
        elif self.record.silent_ns is None:
            self._truth.note(self.record, "silent")

    # From the connection

    def closed(self, how: str) -> None:
        record = self.record
        if (record.fin_ns if how == "fin" else record.rst_ns) is not None:
            return
        facts = {}
        if record.closed_ns is None:
            unsent = self._connection.unsent_bytes
            facts = {"tokens_at_close": record.tokens, "unsent_bytes": unsent}
        self._truth.note(record, how, **facts)
        if how == "rst" or not self._terms.keeps_half_closed:
            self.stop("left")

    def stalled(self) -> None:
        if self.record.stalled_ns is None and self.record.over_ns is None:
            self._truth.note(self.record, "stalled")

    def lost(self) -> None:
        """The connection is gone: after `closed`, or because this side ended it."""
        self.stop("lost")

    # From the server

    def stop(self, why: str) -> None:
        """Make and send nothing more."""
        record = self.record
        if record.over_ns is not None:
            return
        self._host.leave(self)
        if self._ending is not None:
            self._ending.cancel()
        if record.stopped_ns is None:
            self._truth.note(record, "stopped", why=why)
        self._truth.note(record, "over")

    # What is sent

    def _send_head(self, status: int = 200) -> None:
        self._connection.start(status, _STREAM)
        self._truth.note(self.record, "headers", status=status)

    def _send_token(self, n: int) -> None:
        is_first, is_last = n == 1, self.work.is_made
        if self.record.headers_ns is None:
            self._send_head()
        parts = [self._answer.opening()] if is_first else []
        parts.append(self._answer.token(n))
        if is_last:
            parts.append(self._answer.closing(n)[0])
        self._connection.send(b"".join(parts))
        if self._connection.unsent_bytes > MOST_UNSENT_BYTES:
            self.stop("unread")
            self._connection.reset()

    def _end(self) -> None:
        """If the reader has stalled, the answer ends when the kernel has taken all of it."""
        if self.record.over_ns is not None:
            return
        connection, made = self._connection, self.work.made
        if self.asked.is_stream:
            connection.send(self._answer.closing(made)[1], is_last=True)
        else:
            body = self._answer.whole(made)
            connection.start(200, JSON, length=len(body))
            connection.send(body)
            self._truth.note(self.record, "headers", status=200)
        self._is_ending = True
        if not connection.unsent_bytes:
            self.drained()

    def drained(self) -> None:
        if not self._is_ending or self._connection.is_lost or self.record.over_ns is not None:
            return
        self._connection.finish()
        if self.asked.usage != "none":
            self._truth.note(self.record, "usage")
        self._truth.note(self.record, "ended")
        self._truth.note(self.record, "over")

    def _refuse(self, status: int) -> None:
        body = error_body(
            self.record.route, status, f"the order of this request asks for a {status}"
        )
        again = (("retry-after", "1"),) if status == 429 else ()
        self._connection.whole(status, (*JSON, *again), body)
        self._truth.note(self.record, "headers", status=status)
        self._truth.note(self.record, "stopped", why="told")
        self._truth.note(self.record, "ended")
        self._truth.note(self.record, "over")

    def _break(self) -> None:
        """A unary answer that has made tokens breaks in the middle of its body."""
        if not self.asked.is_stream and self.work.made:
            body = self._answer.whole(self.work.made)
            self._connection.start(200, JSON, length=len(body))
            self._connection.send(body[: len(body) // 2])
            self._truth.note(self.record, "headers", status=200)
        self.stop("told")
        if self.act == "break-reset":
            self._connection.reset()
        else:
            self._connection.cut()
