"""Occupancy, black box: how many slots, or KV tokens, are still held after some users left?

Slots are full; some streams leave at once, and as many requests as should fit now are sent at once.
Each of them holds its slot, so the number that gets no token within the settle time is the number
of slots still held. A ghost, a request that goes on for nobody, gives its slot back when its answer
has come to its natural end; a lost slot stays away: those that still wait then say how many.

Only a round with something held waits for this. In a clean round the requests begin at once, and
are the streams that leave in the next.

Where KV blocks run out before slots do, the capacity is counted in tokens: long prompts are sent
until one has to wait, and then their answers grow until a stream stands still.
"""

import math
import random
import time
from typing import Final, NamedTuple

import gevent

from harness.load.live import LiveStream
from harness.load.session import LoadSession
from harness.records import Outcome, RequestRow, Role, TrialArm, Way
from harness.workload.abandon import RequestSpec

_LIFE_IN_SETTLES: Final = 3  # of a stream: old enough to leave, and then young enough for a ghost
_LEFT_IN_SETTLES: Final = 2  # so much it must have to go when it leaves
_SPARE_TOKENS: Final = 32
_WARM_UP_TOKENS: Final = 8
_FEWEST_TOKENS: Final = 12  # of a stream that leaves: it ends earlier than those sent after it
_SPARE_STEPS: Final = 4
_MOST_FILLS: Final = 4
_SLOWER: Final = 1.5  # than typical: the steps of a ghost that is waited for
_STANDS_STILL_STEPS: Final = 6
_HOLD_TOKENS: Final = 1000
_PATIENCE_STEPS: Final = 6  # beside the time that a prompt as long took to begin


class NotCountedError(Exception):
    """The server refused or failed a request that was to hold a slot."""


class Round(NamedTuple):
    """`held`: slots after the settle time, of `left` streams that left; `held_later`: after the
    natural end of what they had asked for, which are lost."""

    left: int
    held: int
    held_later: int
    took_s: float


class Occupancy:
    """`slots`: those that come back; a lost one is not counted again."""

    def __init__(
        self,
        session: LoadSession,
        slots: int,
        rng: random.Random,
        *,
        settle_s: float,
        prompt_tokens: tuple[int, int] = (16, 64),
        most_tokens: int = 4000,
    ) -> None:
        self.slots = slots
        self.rounds: list[Round] = []
        self._session = session
        self._rng = rng
        self._settle_s = settle_s
        self._prompt_tokens, self._most_tokens = prompt_tokens, most_tokens
        self._running: list[LiveStream] = []

    @property
    def step_s(self) -> float:
        return self._session.client.step.median_ns() / 1e9

    def round(self, leave: int | None = None, way: Way = Way.FIN) -> Round:
        """So many streams leave, at random moments of a step; all, if not told."""
        self._fill()
        wanted = len(self._running) if leave is None else leave
        leavers, self._running = self._running[:wanted], self._running[wanted:]
        for stream in leavers:
            gevent.spawn_later(self._rng.random() * self.step_s, stream.leave, way)
        gevent.sleep(2 * self.step_s)
        longest = max((one.spec.max_tokens - one.tokens for one in leavers), default=0)
        return self.count(len(leavers), steps_to_go=longest)

    def count(self, left: int, *, steps_to_go: int) -> Round:
        """Send as many requests as slots should be free. `left` requests left just now; they would
        have gone on for at most so many steps."""
        began_ns = time.perf_counter_ns()
        number, free = len(self.rounds), self.slots - len(self._running)
        checks = [self._start(number, began_ns) for _ in range(free)]
        waiting = self._waiting(checks, until_ns=began_ns + int(self._settle_s * 1e9))
        held = len(waiting)
        if waiting:
            self._wait_for_steps(checks, steps_to_go + _SPARE_STEPS)
            waiting = self._waiting(waiting, until_ns=0)
            self.slots -= len(waiting)
        for stream in waiting:
            stream.leave()
        self._running += [one for one in checks if one.tokens]
        took_s = (time.perf_counter_ns() - began_ns) / 1e9
        found = Round(left, held, len(waiting), took_s)
        self.rounds.append(found)
        return found

    def _wait_for_steps(self, checks: list[LiveStream], steps: int) -> None:
        """By the tokens of one that has begun; it lasts longer than any of those that left."""
        clock = next((one for one in checks if one.tokens), None)
        longest_s = _SLOWER * steps * self.step_s + self._settle_s
        if clock is not None:
            clock.wait_tokens(min(steps, clock.spec.max_tokens - 1), longest_s)
        else:
            checks[-1].wait_tokens(1, longest_s)

    def stop(self) -> None:
        for stream in self._running:
            stream.cut()
        self._running.clear()

    def _waiting(self, streams: list[LiveStream], *, until_ns: int) -> list[LiveStream]:
        for stream in streams:
            left_s = (until_ns - time.perf_counter_ns()) / 1e9
            stream.wait_tokens(1, max(0.0, left_s))
        for row in (stream.row for stream in streams):
            if row is not None and row.outcome in (Outcome.FAILED, Outcome.REJECTED):
                raise NotCountedError(f"a request that was to hold a slot failed: {row.error}")
        return [stream for stream in streams if not stream.tokens]

    def _fill(self) -> None:
        """Full slots, of streams that have long enough to go."""
        if not self._running:
            warm_up = self._start(None, None, max_tokens=_WARM_UP_TOKENS)
            warm_up.join()
        for _ in range(_MOST_FILLS):
            self._drop_short()
            if len(self._running) >= self.slots:
                return
            new = [self._start(None, None) for _ in range(self.slots - len(self._running))]
            until_ns = time.perf_counter_ns() + int(self._settle_s * 1e9)
            for stream in self._waiting(new, until_ns=until_ns):
                stream.leave()
                self.slots -= 1
            self._running += [one for one in new if one.tokens]
        raise NotCountedError("the steps change so much that no answer has a known length in time")

    def _drop_short(self) -> None:
        """Let those end by themselves that have too little to go, by the steps seen until now."""
        for stream in self._running:
            stream.wait_tokens(_FEWEST_TOKENS, self._settle_s)
        needed = math.ceil(_LEFT_IN_SETTLES * self._settle_s / self.step_s)
        if needed > self._most_tokens:
            raise NotCountedError(
                f"answers of {self._most_tokens} tokens end within twice the settle time of "
                f"{self._settle_s:g} s: a ghost could not be told from a natural end"
            )
        for stream in self._running:
            if stream.spec.max_tokens - stream.tokens < needed:
                stream.join()
        self._running = [one for one in self._running if not one.has_ended]

    def _start(
        self, trial: int | None, reference_ns: int | None, max_tokens: int | None = None
    ) -> LiveStream:
        tokens = math.ceil(_LIFE_IN_SETTLES * self._settle_s / self.step_s) + _SPARE_TOKENS
        spec = RequestSpec(
            user=0,
            role=Role.FILLER,
            arm=TrialArm.OCCUPANCY,
            trial=trial,
            max_tokens=max_tokens or min(tokens, self._most_tokens),
            prompt_tokens=self._rng.randint(*self._prompt_tokens),
        )

        def edit(row: RequestRow) -> None:
            row.reference_ns = reference_ns

        return LiveStream(self._session, spec, edit=edit)


def capacity_tokens(
    session: LoadSession, slots: int, rng: random.Random, *, prompt_tokens: int, trial: int
) -> int | None:
    """The most tokens, of prompts and of answers so far, that the server was seen to hold at once;
    None: the slots ran out first. `trial` numbers the measurement in its rows."""

    def hold(tokens: int, max_tokens: int) -> LiveStream:
        spec = RequestSpec(
            user=rng.getrandbits(32),  # so that no prefix is shared
            role=Role.LONG_PROMPT,
            arm=TrialArm.CAPACITY,
            trial=trial,
            max_tokens=max_tokens,
            prompt_tokens=tokens,
        )
        return LiveStream(session, spec)

    patience_s = session.plan.run.timeout_s
    holders: list[LiveStream] = []
    try:
        while len(holders) < slots:
            one = hold(prompt_tokens, _HOLD_TOKENS)
            if not one.wait_tokens(1, patience_s):
                one.leave()
                break
            if not holders:
                ttft_s = ((one.first_token_ns or 0) - one.spec.intended_start_ns) / 1e9
                patience_s = 2 * ttft_s + _PATIENCE_STEPS * session.client.step.median_ns() / 1e9
            holders.append(one)
        else:
            return None
        return _grow(holders, prompt_tokens, session.client.step.median_ns())
    finally:
        for one in holders:
            one.leave()
        for one in holders:
            one.join(session.plan.run.timeout_s)


def _grow(holders: list[LiveStream], prompt_tokens: int, step_ns: int) -> int:
    """Let the answers grow until a stream stands still, as when its blocks are taken; at the latest
    when one more such prompt would have fitted."""
    most = 0
    enough = holders[-1].tokens + prompt_tokens // len(holders)
    while holders[-1].tokens < enough:
        gevent.sleep(step_ns / 1e9)
        latest = max(one.last_token_ns or 0 for one in holders)
        if any(
            latest - (one.last_token_ns or 0) > _STANDS_STILL_STEPS * step_ns for one in holders
        ):
            break
        most = sum(one.spec.prompt_tokens + one.tokens for one in holders)
    return most
