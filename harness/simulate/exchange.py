"""One request as its client sees it, in virtual time: what it has read, and the row that is left.

A replica reports the tokens of plain decodes late, together: until then they are known to have been
made one a step. When a token is read follows from when its step ended, and from its own lag.
"""

from array import array
from bisect import bisect_right
from typing import Final, NamedTuple

import httpx
import numpy as np
from numpy.typing import NDArray

from harness.records import Delivery, Outcome, RequestRow, TokenCounting, Way, WireClose
from harness.simulate.asking import SimulatedRequest
from harness.simulate.lags import TokenLags
from harness.simulate.replica import Replica, StepLog
from harness.workload.abandon import RequestSpec
from reference_engine.context import CancelReason
from reference_engine.dynamo.router import RoutedInstance

WIRE_CLOSES: Final = {  # what the kernel sends, by way of leaving
    Way.FIN: WireClose.FIN,
    Way.RST: WireClose.RST,
    Way.HALF_CLOSE: WireClose.FIN,
    Way.STOP_READING: WireClose.NOTHING,
    Way.VANISH: WireClose.SILENCE,
    Way.KILLED: WireClose.KERNEL,
    Way.CANCEL: WireClose.NOTHING,
}


class Sending(NamedTuple):
    """`place`: where its lags begin in their table. `attempt`: how often it was sent before."""

    sent_ns: int
    place: int
    attempt: int


class SimulatedExchange:
    """One request from the sending to its row.

    `made_ns`: when each token was made that is known so far, by the steps up to `last_step` of its
    replica; `step_tokens`: how many that step sampled. `outcome` is set once; `has_ended` when the
    frontend has heard of the engine's end. `prompted`: the request whose prompt it has.
    """

    def __init__(
        self,
        asked: SimulatedRequest,
        spec: RequestSpec,
        sending: Sending,
        repeats: "SimulatedExchange | None" = None,
    ) -> None:
        """`spec`: of the request as it is issued."""
        self.asked, self.spec, self.sending = asked, spec, sending
        self.request_id = spec.request_id
        self.engine_id = ""
        self.made_ns, self.step_tokens = array("q"), array("i")
        self.last_step = 0
        self.outcome: Outcome | None = None
        self.has_arrived = self.has_ended = self.has_left = False
        self.cancel_reason: CancelReason | None = None
        self.replica: Replica | None = None
        self.instance: RoutedInstance[str] | None = None
        self.arrives_ns = sending.sent_ns
        self.prompted: SimulatedRequest = asked if repeats is None else repeats.prompted
        self._num_moves = 0
        self._closed_ns = 0
        self._think_ns: int | None = None
        self._error: str | None = None
        self._finish_reason: str | None = None
        self._server_ended_ns: int | None = None

    @property
    def is_stream(self) -> bool:
        return self.spec.delivery is Delivery.STREAM

    @property
    def leaves_after(self) -> int | None:
        """Tokens, after which its user leaves, and a pause; None: it stays."""
        return self.spec.planned_abandon

    @property
    def ended_ns(self) -> int:
        return self._closed_ns

    def grow(self, num_generated: int, step: int, log: StepLog) -> None:
        """After `step` it had `num_generated` tokens. The newest is of this step; the missing ones
        before it came one a step, after the last known one."""
        missing = num_generated - len(self.made_ns)
        if missing <= 0:
            return
        at = self.last_step
        self._add(log, at, at + missing - 1)
        self._add(log, step - 1, step)

    def catch_up(self, num_generated: int, log: StepLog) -> None:
        """It has `num_generated` tokens. The missing ones came one a step after the last known."""
        missing = num_generated - len(self.made_ns)
        if missing > 0:
            self._add(log, self.last_step, self.last_step + missing)

    def _add(self, log: StepLog, first: int, end: int) -> None:
        self.made_ns.extend(log.ended_ns[first:end])
        self.step_tokens.extend(log.tokens[first:end])
        self.last_step = end

    def move(self, most: int) -> bool:
        """Whether it may be computed anew elsewhere, once more."""
        self._num_moves += 1
        self.made_ns, self.step_tokens = array("q"), array("i")
        self.last_step = 0
        return self._num_moves <= most

    def read_ns(self, lags: TokenLags) -> NDArray[np.int64]:
        return lags.read_ns(self.sending.place, self.made_ns, self.step_tokens)

    def first_read_ns(self, lags: TokenLags, *, before: int) -> int | None:
        if not self.made_ns:
            return None
        first_ns = int(lags.read_ns(self.sending.place, self.made_ns[:1], self.step_tokens[:1])[0])
        return first_ns if first_ns <= before else None

    def made_by(self, t_ns: int) -> int:
        return bisect_right(self.made_ns, t_ns)

    def close(
        self,
        outcome: Outcome,
        t_ns: int,
        *,
        error: str | None = None,
        think_ns: int | None = None,
        finish_reason: str | None = None,
    ) -> None:
        assert self.outcome is None
        self.outcome, self._closed_ns, self._error = outcome, t_ns, error
        self._think_ns, self._finish_reason = think_ns, finish_reason

    def server_ended(self, t_ns: int, finish_reason: str) -> None:
        """The server ended an answer that its client has left and reads on."""
        self._server_ended_ns, self._finish_reason = t_ns, finish_reason

    def cut_reading(self, t_ns: int) -> None:
        """The run ends a client that has left and still reads."""
        self.outcome, self._closed_ns = Outcome.CUT_OFF, t_ns

    def _status_code(self, *, has_answer: bool) -> int | None:
        if self.outcome is Outcome.REJECTED:
            return httpx.codes.SERVICE_UNAVAILABLE
        return httpx.codes.OK if has_answer or self.has_arrived else None

    def row(self, lags: TokenLags) -> RequestRow:
        assert self.outcome is not None
        spec, ended_ns = self.spec, self._closed_ns
        is_complete, is_left = self.outcome is Outcome.COMPLETED, self.outcome is Outcome.ABANDONED
        times = list[int]()
        if self.is_stream and self.made_ns:
            read = self.read_ns(lags)
            times = read[: np.searchsorted(read, ended_ns, side="right")].tolist()
        has_server_end = self._server_ended_ns is not None
        has_answer = bool(times) or (is_complete and not self.is_stream)
        return RequestRow(
            **spec.columns(),
            think_ns=self._think_ns,
            sent_ns=self.sending.sent_ns,
            first_token_ns=times[0] if times else None,
            last_token_ns=times[-1] if times else None,
            abandoned_ns=ended_ns if is_left else None,
            ended_ns=ended_ns,
            wire_close=WIRE_CLOSES[spec.way] if is_left and spec.way is not None else None,
            tokens_read=len(self.made_ns) if is_complete else len(times),
            token_times_ns=times,
            event_tokens=[1] * len(times),
            token_counting=TokenCounting.USAGE,
            outcome=self.outcome,
            status_code=self._status_code(has_answer=has_answer),
            error=self._error,
            finish_reason=self._finish_reason,
            prompt_tokens=spec.prompt_tokens if has_answer else None,
            completion_tokens=len(self.made_ns) if is_complete else None,
            tokens_after_leaving=len(self.made_ns) - len(times) if has_server_end else None,
            server_ended_ns=self._server_ended_ns,
        )
