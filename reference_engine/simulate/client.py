"""One request as its client sees it, in virtual time: what it has read, and the row that is left.

A replica reports the tokens of plain decodes late, together: until then they are known to have been
made one a step. When a token is read follows from when its step ended, and from its own lag.
"""

from array import array
from bisect import bisect_right
from collections import deque
from statistics import median
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from reference_engine.context import CancelReason
from reference_engine.runtime.router import Instance
from reference_engine.simulate.lags import NS, TokenLags
from reference_engine.simulate.plan import PlannedRequest
from reference_engine.simulate.replica import Replica, StepLog
from reference_engine.simulate.rows import RequestRow

WIRE_CLOSES: Final = {  # what the kernel sends, by way of leaving
    "fin": "fin",
    "rst": "rst",
    "half_close": "fin",
    "stop_reading": "nothing",
    "vanish": "silence",
    "killed": "kernel",
    "cancel": "nothing",
}
_OWN: Final = 1000  # tokens of a prompt's own are above the two that are filled in
BUSY: Final = 503
READS_ON: Final = ("half_close", "cancel")
_WINDOW: Final = 101  # latest observations: as many as a live client keeps
_FIRST_STEP_NS: Final = 20_000_000  # assumed until a gap was seen, as live
_RACE_STEPS: Final = (0.5, 2.5)  # around the last step but one, as live


class StepEstimate:
    """The median of the latest gaps between two tokens of a client."""

    def __init__(self) -> None:
        self._gaps: deque[tuple[int, int]] = deque(maxlen=_WINDOW)

    def observe(self, gap_ns: int, streams: int) -> None:
        self._gaps.append((gap_ns, streams))

    def median_ns(self) -> int:
        latest = list[int]()
        for gap_ns, streams in reversed(self._gaps):
            latest += [gap_ns] * min(streams, _WINDOW - len(latest))
        return int(median(latest)) if latest else _FIRST_STEP_NS


class FirstTokens:
    """The median of the latest times to first token."""

    def __init__(self) -> None:
        self._ttfts_ns: deque[int] = deque(maxlen=_WINDOW)

    def observe(self, ttft_ns: int) -> None:
        self._ttfts_ns.append(ttft_ns)

    def median_ns(self) -> int | None:
        return int(median(self._ttfts_ns)) if self._ttfts_ns else None


class Leaving(NamedTuple):
    """Once so many tokens were read, after a pause; 0 tokens: the pause counts from the sending."""

    tokens: int
    way: str
    pause: str
    pause_ns: int | None
    fraction: float

    def length_ns(self, step: StepEstimate, think: str | float) -> int:
        if self.pause == "ns":
            assert self.pause_ns is not None
            return self.pause_ns
        if self.pause == "race":
            shortest, longest = _RACE_STEPS
            return int((shortest + self.fraction * (longest - shortest)) * step.median_ns())
        if isinstance(think, str):
            return int(self.fraction * step.median_ns()) if think == "step" else 0
        return int(self.fraction * int(think * NS))


def leaving_of(planned: PlannedRequest, seen: FirstTokens) -> Leaving | None:
    """None for a user that stays."""
    if not planned.way:
        return None
    if planned.ttft_share is not None:
        ttft_ns = seen.median_ns()
        if ttft_ns is None:
            return None
        pause_ns = int(planned.ttft_share * ttft_ns)
        return Leaving(0, planned.way, "ns", pause_ns, planned.think_fraction)
    assert planned.leave_after_tokens is not None
    return Leaving(
        planned.leave_after_tokens,
        planned.way,
        planned.pause,
        planned.pause_ns,
        planned.think_fraction,
    )


class Sending(NamedTuple):
    """`intended_ns`: by the schedule. `place`: where its lags begin in their table. `attempt`: how
    often it was sent before."""

    request_id: str
    sent_ns: int
    intended_ns: int
    place: int
    attempt: int


class Exchange:
    """One request from the sending to its row.

    `made_ns`: when each token was made that is known so far, by the steps up to `last_step` of its
    replica; `step_tokens`: how many that step sampled. `outcome` is set once; `has_ended` when the
    frontend has heard of the engine's end. `prompt`: the planned request whose prompt it has.
    """

    def __init__(
        self,
        planned: PlannedRequest,
        sending: Sending,
        leaving: Leaving | None,
        repeats: "Exchange | None" = None,
    ) -> None:
        self.planned = planned
        self.sending = sending
        self.request_id = sending.request_id
        self.engine_id = ""
        self.leaving = leaving
        self.repeats = None if repeats is None else repeats.request_id
        self.made_ns, self.step_tokens = array("q"), array("i")
        self.last_step = 0
        self.outcome: str | None = None
        self.has_arrived = self.has_ended = self.has_left = False
        self.cancel_reason: CancelReason | None = None
        self.replica: Replica | None = None
        self.instance: Instance[str] | None = None
        self.arrives_ns = sending.sent_ns
        self.prompt: PlannedRequest = planned if repeats is None else repeats.prompt
        self._num_moves = 0
        self._closed_ns = 0
        self._think_ns: int | None = None
        self._error: str | None = None
        self._finish_reason: str | None = None
        self._server_ended_ns: int | None = None

    @property
    def max_tokens(self) -> int:
        stays = self.leaving is None and self.planned.stay_tokens is not None
        return self.planned.stay_tokens or 0 if stays else self.planned.max_tokens

    @property
    def ended_ns(self) -> int:
        return self._closed_ns

    def grow(self, num_generated: int, step: int, log: StepLog) -> None:
        """It had so many tokens after a step: the newest is of this step; those before it followed
        one another, a step each."""
        missing = num_generated - len(self.made_ns)
        if missing <= 0:
            return
        at = self.last_step
        self._add(log, at, at + missing - 1)
        self._add(log, step - 1, step)

    def catch_up(self, num_generated: int, log: StepLog) -> None:
        """It has so many tokens: those that are not known yet followed the last that is."""
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
        outcome: str,
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
        self.outcome, self._closed_ns = "cut_off", t_ns

    def _status_code(self, *, has_answer: bool) -> int | None:
        if self.outcome == "rejected":
            return BUSY
        return 200 if has_answer or self.has_arrived else None

    def row(self, lags: TokenLags) -> RequestRow:
        assert self.outcome is not None
        planned, leaving, ended_ns = self.planned, self.leaving, self._closed_ns
        is_complete, is_left = self.outcome == "completed", self.outcome == "abandoned"
        times = list[int]()
        if planned.stream and self.made_ns:
            read = self.read_ns(lags)
            times = read[: np.searchsorted(read, ended_ns, side="right")].tolist()
        has_server_end = self._server_ended_ns is not None
        has_answer = bool(times) or (is_complete and not planned.stream)
        tokens_read = len(self.made_ns) if is_complete else len(times)
        return RequestRow(
            request_id=self.request_id,
            arm=planned.arm,
            role=planned.role,
            trial=None,
            user=planned.user,
            stream=planned.stream,
            planned_abandon=None if leaving is None else leaving.tokens,
            think_ns=self._think_ns,
            max_tokens=self.max_tokens,
            intended_start_ns=self.sending.intended_ns,
            sent_ns=self.sending.sent_ns,
            first_token_ns=times[0] if times else None,
            last_token_ns=times[-1] if times else None,
            abandoned_ns=ended_ns if is_left else None,
            reference_ns=None,
            ended_ns=ended_ns,
            wire_close=WIRE_CLOSES[leaving.way] if is_left and leaving else None,
            tokens_read=tokens_read,
            token_times_ns=times,
            event_tokens=[1] * len(times),
            token_counting="usage",
            outcome=self.outcome,
            status_code=self._status_code(has_answer=has_answer),
            error=self._error,
            finish_reason=self._finish_reason,
            prompt_tokens=planned.prompt_tokens if has_answer else None,
            completion_tokens=len(self.made_ns) if is_complete else None,
            plan="never" if leaving is None and planned.text is None else planned.plan,
            way="" if leaving is None else leaving.way,
            delivery="stream" if planned.stream else "unary",
            n=planned.n,
            tokens_after_leaving=len(self.made_ns) - len(times) if has_server_end else None,
            server_ended_ns=self._server_ended_ns,
            repeats=self.repeats,
        )


def prompt_of(planned: PlannedRequest) -> list[int]:
    """Tokens that are equal to those of another prompt as far as the plan says so."""
    shared, tokens = planned.shared_prefix_tokens, planned.prompt_tokens
    if not planned.pages:
        prompt = [1] * shared + [planned.number + _OWN] + [2] * (tokens - shared - 1)
        return prompt[:tokens]
    assert planned.page_tokens is not None
    prompt = []
    for place, page in enumerate(planned.pages, start=1):
        is_last = place == len(planned.pages)
        end = tokens if is_last else min(round(place * planned.page_tokens), tokens)
        prompt += [page + _OWN] * (end - len(prompt))
    return prompt
