"""A user of a load with `[load.session]`: which turn comes next, and when. Live and simulated users
ask the same object; it is pure.

A turn that was stopped is corrected at once. What was read of its answer stays in the context, as
agents keep it. A turn that failed ends its session, and the user begins another.
"""

import random
from dataclasses import replace
from typing import Final

from harness.records import Outcome, RequestRow
from harness.workload.abandon import RequestSpec
from harness.workload.load import AbandonLoad
from harness.workload.observed_latency import ObservedLatency
from harness.workload.session import Said, Turn

_KEPT_SHARE: Final = (
    0.5  # of the longest prompt, after a cut: the next turns fit, and find the cache
)


class SessionUser:
    """`_tokens`: of the context, by the server's count where it has one; `_said`: its parts."""

    def __init__(self, load: AbandonLoad, *, seed: int, user: int) -> None:
        assert load.session is not None
        self._load, self._session = load, load.session
        self._seed, self._user = seed, user
        self._n = 0
        self._turns_left = 0
        self._said: list[Said] = []
        self._tokens = 0
        self._follows: Outcome | None = None
        self._asked: RequestSpec | None = None

    def next_turn(self, seen: ObservedLatency) -> RequestSpec:
        n, self._n = self._n, self._n + 1
        rng = random.Random(f"{self._seed}/{self._user}/{n}/turn")
        if self._turns_left <= 0:
            self._turns_left = rng.choice(self._session.turns)
            self._said, self._tokens, self._follows = [], 0, None
        own = self._draw_own(rng)
        answer_tokens = rng.choice(self._session.answer_tokens)
        cut_tokens = self._cut(own)
        prompt_tokens = self._tokens + own
        as_turn = {"prompt_tokens": [prompt_tokens] * 2, "stay_tokens": answer_tokens}
        spec = self._load.model_copy(update=as_turn).draw_request(
            seed=self._seed, user=self._user, n=n, seen=seen
        )
        turn = Turn(n, own, tuple(self._said), self._tokens, self._follows, cut_tokens)
        self._asked = replace(spec, turn=turn)
        return self._asked

    def over(self, row: RequestRow) -> float:
        """The turn has ended so. Returns the seconds until the next."""
        assert self._asked is not None
        assert self._asked.turn is not None
        if row.outcome not in (Outcome.COMPLETED, Outcome.ABANDONED):
            self._turns_left = 0
            return self._load.pause_after(row.outcome)
        turn, self._follows = self._asked.turn, row.outcome
        self._turns_left -= row.outcome is Outcome.COMPLETED  # a correction is always made
        self._said += [
            Said(turn.n, "user", turn.own_tokens),
            Said(turn.n, "assistant", row.tokens_read),
        ]
        self._tokens = (row.prompt_tokens or self._asked.prompt_tokens) + row.tokens_read
        if row.outcome is Outcome.ABANDONED:
            return 0.0
        rng = random.Random(f"{self._seed}/{self._user}/{turn.n}/think")
        return rng.uniform(*self._session.think_s)

    def _draw_own(self, rng: random.Random) -> int:
        if self._follows is None:
            return rng.choice(self._session.first_tokens)
        is_correction = self._follows is Outcome.ABANDONED
        lengths = self._session.correction_tokens if is_correction else self._session.turn_tokens
        return rng.choice(lengths)

    def _cut(self, own: int) -> int:
        """Leave out the oldest turns, up to half of the longest prompt, if the context is full. The
        first prompt stays. Returns the tokens that were left out."""
        longest, before = self._load.prompt_tokens[1], self._tokens
        if self._session.when_full == "send" or before + own <= longest:
            return 0
        first, *later = self._said
        while later and self._tokens > longest * _KEPT_SHARE:
            self._tokens -= later.pop(0).tokens
            while later and later[0].by == "assistant":
                self._tokens -= later.pop(0).tokens
        self._said = [first, *later]
        return before - self._tokens
