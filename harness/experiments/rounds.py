"""Rounds of full slots, black box: how many slots are still held after all users left?

The slots are full, as a request shows that has to wait. All streams leave at once, and as many
requests follow at once. Each of these holds its slot, so the number of requests without a token by
the deadline is the number of slots still held. The deadline is the settle time plus the time that
as many requests take to begin on the idle server. A ghost, a request that runs on for nobody, gives
its slot back when its answer has come to its natural end. A lost slot stays away: the number of
requests that still wait then is the number of lost slots.

Only a round with something held waits for this. In a clean round the requests begin at once, and
are the streams that leave in the next.
"""

import math
import random
import time
from itertools import count
from typing import Final

import gevent

from harness.client.live_stream import LiveStream
from harness.client.session import LoadSession
from harness.experiments.capacity import HeldTokens
from harness.experiments.outcome import CannotDecideError
from harness.experiments.patience import QUEUED_STEPS, SLOWER, Patience
from harness.experiments.streams import without_token
from harness.records import Outcome, RequestRow, Role, TrialArm, Way
from harness.workload.abandon import RequestSpec

_LIFE_IN_SETTLES: Final = 3  # of a stream: old enough to leave, and then young enough for a ghost
_LEFT_IN_SETTLES: Final = 2  # settle times that a stream must have to go when it leaves
_SPARE_TOKENS: Final = 32
_WARM_UP_TOKENS: Final = 8
_FEWEST_TOKENS: Final = 12  # of a stream that leaves: it ends before the streams sent after it
_SPARE_STEPS: Final = 4
_MOST_FILLS: Final = 4


class Rounds:
    """`slots`: the slots that come back; a lost slot is not counted again. The figures are in the
    rows: the rows of a round's requests have its number and, as `reference_ns`, its deadline."""

    def __init__(
        self,
        session: LoadSession,
        slots: int,
        rng: random.Random,
        *,
        prompt_tokens: tuple[int, int] = (16, 64),
        most_tokens: int = 4000,
    ) -> None:
        self.slots = slots
        self._session = session
        self._rng = rng
        self._prompt_tokens, self._most_tokens = prompt_tokens, most_tokens
        self._settle_s = self._begin_s = 0.0
        self.tokens = HeldTokens(session, rng)
        self._running: list[LiveStream] = []
        self._asked: list[LiveStream] = []
        self._rounds = count()

    @property
    def step_s(self) -> float:
        return self._session.client.step.median_ns() / 1e9

    def warm_up(self) -> None:
        """Learns, on the idle server, the step and how long a request per slot takes to begin."""
        for number in (1, self.slots):
            sent_ns = time.perf_counter_ns()
            streams = [self._start(max_tokens=_WARM_UP_TOKENS) for _ in range(number)]
            for stream in streams:
                stream.join()
            if self._waiting(streams, until_ns=0):
                raise CannotDecideError("a request to the idle server got no token")
            self._begin_s = (max(one.first_token_ns or 0 for one in streams) - sent_ns) / 1e9
        target = self._session.plan.target
        patience = Patience.of(
            target.settle_s,
            target.settle_steps,
            step_s=self.step_s,
            begin_s=self._begin_s,
            most_tokens=self._most_tokens,
        )
        self._settle_s = patience.filler_s

    def round(self) -> None:
        """All streams leave, at random moments of a step, and as many requests follow."""
        self._fill()
        number = next(self._rounds)
        if not number:
            self._find_more()
        leavers, self._running = self._running, []
        for stream in leavers:
            gevent.spawn_later(self._rng.random() * self.step_s, stream.leave, Way.FIN)
        gevent.sleep(2 * self.step_s)
        longest = max((one.spec.max_tokens - one.tokens for one in leavers), default=0)
        deadline_ns = time.perf_counter_ns() + int(self._settle_s * 1e9)
        lasting = longest + 2 * _SPARE_STEPS  # the steps seen may have become longer since
        checks = [self._start(number, deadline_ns, at_least=lasting) for _ in range(self.slots)]
        waiting = self._waiting(checks, until_ns=deadline_ns)
        if waiting:
            self._wait_for_steps(checks, longest + _SPARE_STEPS)
            waiting = self._waiting(waiting, until_ns=0)
        self._give_up(waiting)
        self._running = [one for one in checks if one.tokens]

    def end(self) -> None:
        """Let the streams end by themselves: that leaves no ghost."""
        for stream in self._asked:
            stream.join()

    def stop(self) -> None:
        for stream in self._asked:
            stream.cut()

    def _wait_for_steps(self, checks: list[LiveStream], steps: int) -> None:
        """Counts steps by a request that has begun; it lasts longer than any leaver would have."""
        clock = next((one for one in checks if one.tokens), None)
        longest_s = SLOWER * steps * self.step_s + self._settle_s
        if clock is not None:
            clock.wait_tokens(min(steps, clock.spec.max_tokens - 1), longest_s)
        else:
            checks[-1].wait_tokens(1, longest_s)

    def _give_up(self, waiting: list[LiveStream]) -> None:
        self.slots -= len(waiting)
        for stream in waiting:
            stream.leave()

    def _waiting(self, streams: list[LiveStream], *, until_ns: int) -> list[LiveStream]:
        waiting = without_token(streams, (until_ns - time.perf_counter_ns()) / 1e9)
        for row in (stream.row for stream in streams):
            if row is not None and row.outcome in (Outcome.FAILED, Outcome.REJECTED):
                raise CannotDecideError(f"a request that was to hold a slot failed: {row.error}")
        return waiting

    def _fill(self) -> None:
        """Fill the slots with streams that have long enough to go. While a ghost of the capacity
        phase holds a slot, other streams end before the last one begins, and are sent anew."""
        fills = 0
        while fills < _MOST_FILLS:
            fills += time.perf_counter_ns() > self.tokens.ghosts_end_ns
            self._drop_short()
            if len(self._running) >= self.slots:
                return
            new = [self._start() for _ in range(self.slots - len(self._running))]
            settled_ns = time.perf_counter_ns() + int(self._settle_s * 1e9)
            self._give_up(self._waiting(new, until_ns=max(settled_ns, self.tokens.ghosts_end_ns)))
            self._running += [one for one in new if one.tokens]
        raise CannotDecideError("the steps vary too much: no answer has a known length in time")

    def _find_more(self) -> None:
        """The server may have more slots than it declares: a short request behind full slots waits.
        It ends by itself, before the others begin."""
        patience_s = self._begin_s + QUEUED_STEPS * self.step_s
        while self._start(max_tokens=1).wait_tokens(1, patience_s):
            if any(stream.has_ended for stream in self._running):
                return
            one = self._start()
            if self._waiting([one], until_ns=time.perf_counter_ns() + int(self._settle_s * 1e9)):
                raise CannotDecideError("a slot was free, and then it was not: other traffic?")
            self.slots += 1
            self._running.append(one)

    def _drop_short(self) -> None:
        """Let streams that have too little to go, by the steps seen so far, end by themselves."""
        for stream in self._running:
            stream.wait_tokens(_FEWEST_TOKENS, self._settle_s)
        needed = math.ceil(_LEFT_IN_SETTLES * self._settle_s / self.step_s)
        if needed > self._most_tokens:
            raise CannotDecideError(
                f"answers of {self._most_tokens} tokens end within twice the settle time of "
                f"{self._settle_s:g} s: a ghost would look like a natural end"
            )
        for stream in self._running:
            if stream.spec.max_tokens - stream.tokens < needed:
                stream.join()
        self._running = [one for one in self._running if not one.has_ended]

    def _start(
        self,
        trial: int | None = None,
        reference_ns: int | None = None,
        max_tokens: int | None = None,
        at_least: int = 0,
    ) -> LiveStream:
        tokens = math.ceil(_LIFE_IN_SETTLES * self._settle_s / self.step_s) + _SPARE_TOKENS
        spec = RequestSpec(
            user=0,
            role=Role.FILLER,
            arm=TrialArm.OCCUPANCY,
            trial=trial,
            max_tokens=max_tokens or min(max(tokens, at_least), self._most_tokens),
            prompt_tokens=self._rng.randint(*self._prompt_tokens),
        )

        def edit(row: RequestRow) -> None:
            row.reference_ns = reference_ns

        self._asked = [one for one in self._asked if not one.has_ended]
        self._asked.append(LiveStream(self._session, spec, edit=edit))
        return self._asked[-1]
