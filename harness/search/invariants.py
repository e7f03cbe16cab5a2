"""What must hold after any schedule, whatever it was: looked at as it ends, and at rest.

A server owes each client that stays its answer: whole, of the right length, with the text that it
has alone. It owes each client that has left nothing, and so it must hold nothing for it: after the
settle time its slots are free, its gauges read as before, its counters have counted what happened,
and it serves the next request. After many schedules, as many contexts fit into its memory as at
first, and its process has not grown.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from harness.client.exchange import StreamClient
from harness.conform.bench import Bench
from harness.experiments.held import Count
from harness.experiments.outcome import CannotDecideError, RefusedError
from harness.experiments.patience import SLOWER
from harness.search.accounts import Counters, Gauges
from harness.search.answers import Refusals, Texts, may_refuse, of_bystanders, of_visits
from harness.search.broken import ADDS_UP, WAY, Broken, Violation
from harness.search.play import Played
from harness.search.process import Process
from harness.store.conform_result import Aftermath

_AFTERMATHS: Final = {
    Aftermath.DEAD: "dead",
    Aftermath.RESTARTED: "dead",
    Aftermath.WEDGED: "wedged",
    Aftermath.WRONG_TEXT: "text",
    Aftermath.SLOW: "slow",
}
_OF_ANSWERS: Final = (Broken.CUT, Broken.HUNG, Broken.LENGTH)


class Invariants:
    """`learn` is called once, on the idle server; `begin` after each fresh start; `before` before
    each schedule."""

    def __init__(
        self,
        bench: Bench,
        *,
        log: Path | None = None,
        pid: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._bench = bench
        self._texts, self._refusals = Texts(bench), Refusals(bench)
        self._gauges, self._counters = Gauges(bench), Counters(bench)
        self._process = Process(pid, log)

    def learn(self) -> None:
        """Raises CannotDecideError if the server does not answer."""
        self._texts.learn()
        self._gauges.learn()
        with suppress(CannotDecideError, RefusedError):  # not its memory is its limit
            self._bench.capacity.measure()
        self._bench.forget()
        self.begin()

    def begin(self) -> None:
        self._process.begin()

    def before(self) -> None:
        self._counters.begin()

    def broken_by(self, played: Played) -> list[Violation]:
        """The worst first. Raises CannotDecideError if none is seen before it cannot be looked for
        any more."""
        found = list[Violation]()
        try:
            found.extend(self._found(played))
        except CannotDecideError:
            if not found:
                raise
        self._bench.forget()
        order = list(Broken)
        return sorted(found, key=lambda one: order.index(one.broken))

    def breach_of(self, broken: Broken, played: Played) -> Violation | None:
        """The violation of this invariant alone: nothing is looked at that comes later."""
        found = next((one for one in self._found(played, broken) if one.broken is broken), None)
        self.end()
        return found

    def end(self) -> None:
        """Ends a play after which nothing is looked at."""
        self._all_leave()
        self._bench.forget()

    def added_up(self) -> list[Violation]:
        """What schedules since `begin` have left behind, each too little to be seen."""
        found = [self._of_memory(), self._process.of_growth()]
        self._bench.forget()
        return [one for one in found if one is not None]

    def _found(self, played: Played, only: Broken | None = None) -> Iterator[Violation]:
        can_refuse = may_refuse(self._bench.facts, played.schedule)
        if not can_refuse and only in (None, Broken.CUT):
            self._refusals.check(played, self._come_to_rest)
        yield from of_visits(played, can_refuse=can_refuse)
        yield from of_bystanders(played)
        self._all_leave()
        if only in _OF_ANSWERS:
            return
        self._bench.pause(self._bench.settle_s)
        if (lie := self._counters.broken(played)) is not None:
            yield lie
        yield from self._of_held(only)
        if only is not Broken.HELD:
            yield from self._at_rest(played)
        if only in ADDS_UP:
            yield from self.added_up()

    def _come_to_rest(self) -> None:
        """What is asked next is not counted."""
        self._all_leave()
        self._outlast()
        self._counters.forget()

    def _all_leave(self) -> None:
        """Clients leave that read on, too, and clients that no server can know to have left."""
        bench = self._bench
        bench.end()
        for stream in bench.opened:
            if not stream.has_ended:
                stream.cut()
        if isinstance(bench.session.client, StreamClient):
            bench.session.client.reset_lingering()

    def _of_held(self, only: Broken | None) -> Iterator[Violation]:
        """Twice, if anything is held. A server that declares that answers run on owes only their
        ends."""
        bench = self._bench
        runs_on = bench.session.plan.target.disconnect != "cancel"
        if runs_on:
            self._outlast()
        if self._held_now() is None or (count := self._held_now()) is None:
            return
        if not runs_on:
            said = f"{bench.settle_s:.1f} s after the last leave {count.said}"
            yield _of_count(Broken.HELD, said, count)
            if only is Broken.HELD:
                return
            self._outlast()
        if (count := self._held_now()) is not None:
            said = f"though every answer must have ended, {count.said}"
            yield _of_count(Broken.LOST, said, count)

    def _outlast(self) -> None:
        """Wait until nothing is seen to be held, at most until each answer that was left must have
        ended by itself."""
        bench, facts = self._bench, self._bench.facts
        left = [
            one.spec.n * one.spec.max_tokens - one.row.tokens_read
            for one in bench.opened
            if one.row is not None and one.row.abandoned_ns is not None
        ]
        slots = facts.slots or max(1, facts.ran_at_once)
        longest_s = longest_run_s(left, slots=slots, step_s=bench.step_s, ttft_s=bench.ttft_s)
        until_s = time.monotonic() + longest_s
        while time.monotonic() < until_s and not self._is_free():
            bench.pause(bench.settle_s / 4)

    def _is_free(self) -> bool:
        """Nothing is held, and somebody can say so."""
        with suppress(CannotDecideError, RefusedError):
            return not self._bench.held.at_once().held
        return False

    def _held_now(self) -> Count | None:
        """None: nothing is held, or nobody can say."""
        with suppress(CannotDecideError, RefusedError):
            count = self._bench.held.at_once()
            return count if count.held else None
        return None

    def _at_rest(self, played: Played) -> Iterator[Violation]:
        aftermath, why = self._bench.cleaning.aftermath_of_left()
        may_run = self._bench.ghosts() and not self._bench.facts.can_fill  # else slots were counted
        if aftermath is Aftermath.WRONG_TEXT and may_run:  # the text may depend on what still runs
            self._outlast()
            aftermath, why = self._bench.cleaning.aftermath_of_left()
        if aftermath is Aftermath.REFUSING:  # what is refused is not searched
            raise CannotDecideError(why)
        if (name := _AFTERMATHS.get(aftermath)) is not None:
            yield Violation(broken=Broken(name), said=why)
        looks: list[Violation | None] = []
        if aftermath not in (Aftermath.DEAD, Aftermath.WEDGED, Aftermath.RESTARTED):
            looks = [self._gauges.broken(), self._process.of_handles()]
            yield from self._texts.of_bystanders(played)
            yield from self._texts.of_visits(played)
        looks.append(self._process.of_log())
        yield from (one for one in looks if one is not None)

    def _of_memory(self) -> Violation | None:
        """Whether as many contexts fit as at first, at the latest after the settle time."""
        memory = self._bench.capacity
        with suppress(CannotDecideError, RefusedError):
            if not memory.prompt_tokens or memory.fits():
                return None
            self._bench.pause(self._bench.settle_s)
            if not memory.fits():
                said = f"{memory.tokens} tokens of prompts, which fitted at once, no longer do"
                return Violation(broken=Broken.MEMORY, said=said)
        return None


def _of_count(broken: Broken, said: str, count: Count) -> Violation:
    return Violation(broken=broken, said=said, evidence={"held": count.held, WAY: count.way})


def longest_run_s(left: Sequence[int], *, slots: int, step_s: float, ttft_s: float) -> float:
    """Until answers that nobody stops have ended, at most. `left`: the tokens that each still
    has to come; those that find no slot wait for one."""
    if not left:
        return 0.0
    turns = math.ceil(len(left) / slots)
    return SLOWER * (turns * ttft_s + (sum(left) / slots + max(left)) * step_s)
