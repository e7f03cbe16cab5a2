"""One try of a schedule on the live server, and the server made as it was at the beginning."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from harness.client.wire_log import WireLog
from harness.conform.bench import Bench
from harness.experiments.outcome import CannotDecideError
from harness.search.answers import taken_of
from harness.search.broken import ADDS_UP, Added, Broken, Violation
from harness.search.invariants import Invariants
from harness.search.keeper import ServerKeeper
from harness.search.play import Played, play
from harness.search.schedule import Schedule
from harness.search.wire_requests import wire_of
from harness.store.conform_result import Aftermath

BREACH_LOG: Final = "breach.jsonl"  # of the latest try that broke something
_TRY_LOG: Final = "try.jsonl"
_AFRESH: Final = "a command that starts it afresh lets the search go on (--restart COMMAND)"
_REST_S: Final = 90.0


class Trial:
    """`folder`: of the wire logs."""

    def __init__(
        self,
        bench: Bench,
        invariants: Invariants,
        keeper: ServerKeeper,
        wire: WireLog,
        folder: Path,
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bench = bench
        self._invariants = invariants
        self._keeper = keeper
        self._wire = wire
        self._folder = folder
        self._clock_s = clock_s
        self._drawn: Played | None = None

    @property
    def is_fresh(self) -> bool:
        """The server can be started afresh for each try."""
        return self._keeper.can_start

    def broken_by(self, schedule: Schedule) -> list[Violation]:
        """The worst first."""
        self._drawn = played = self._play(schedule)
        found = self._invariants.broken_by(played)
        self._keep_log(has_broken=bool(found))
        return found

    @property
    def taken(self) -> Schedule:
        """The visits that the server took, of the schedule that `broken_by` played last."""
        assert self._drawn is not None
        return taken_of(self._drawn)

    def breach_of(self, broken: Broken, schedule: Schedule) -> Violation | None:
        """The violation of this invariant, on a server as at the beginning. Raises
        CannotDecideError."""
        self.refresh()
        found = self._invariants.breach_of(broken, self._play(schedule))
        self._keep_log(has_broken=found is not None)
        return found

    def added_up(self) -> list[Violation]:
        """What has added up since the server was as at the beginning."""
        return self._invariants.added_up()

    def added_by(
        self,
        broken: Broken,
        schedules: Sequence[Schedule],
        doing: Callable[[str], object],
        until_s: float,
    ) -> Added | None:
        """What adds up when these are played one after the other on a server as at the beginning;
        `doing` gets which one is played. None: it was `until_s`, by the clock, before the last was
        played. Raises CannotDecideError."""
        self.refresh()
        for number, schedule in enumerate(schedules, start=1):
            if self._clock_s() >= until_s:
                return None
            doing(f"schedule {number} of {len(schedules)}")
            played = self._play(schedule)
            if broken in ADDS_UP:
                self._invariants.end()
            elif (found := self._invariants.breach_of(broken, played)) is not None:
                self._keep_log(has_broken=True)
                return Added(found, number)
        self._bench.pause(self._bench.settle_s)
        added = (one for one in self.added_up() if one.broken is broken)
        return Added(next(added, None), len(schedules))

    def _play(self, schedule: Schedule) -> Played:
        self._invariants.before()
        self._wire.begin(self._folder / _TRY_LOG)
        try:
            return play(self._bench, schedule)
        finally:
            self._wire.end()

    def _keep_log(self, *, has_broken: bool) -> None:
        if has_broken:
            (self._folder / _TRY_LOG).replace(self._folder / BREACH_LOG)

    def refresh(self) -> None:
        """The server is as at the beginning. Raises CannotDecideError if that cannot be."""
        bench = self._bench
        if self._keeper.can_start:
            self._keeper.start()
            bench.forget()
            bench.forget_ghosts()
        elif not bench.serves():
            raise CannotDecideError(self._why_unserved())
        else:
            self._wait_for_rest()
        self._invariants.begin()

    def _why_unserved(self) -> str:
        aftermath, why = self._bench.cleaning.aftermath_of_refusals()
        return why if aftermath is Aftermath.REFUSING else f"the server no longer serves: {_AFRESH}"

    def _wait_for_rest(self) -> None:
        bench, until_s = self._bench, self._clock_s() + _REST_S
        if not bench.facts.can_fill:  # nobody sees whether they have ended
            bench.wait_for_ghosts(lambda: False)
        while True:
            may_end = bench.ghosts() > 0
            bench.cleaning.rest()
            running = bench.cleaning.running
            if running is None or not bench.facts.can_fill or running >= bench.slots:
                return
            if self._clock_s() > until_s or not may_end:
                break
            bench.pause(bench.settle_s)
        raise CannotDecideError(f"of {bench.slots} slots only {running} came back: {_AFRESH}")

    def as_requests(self, schedule: Schedule, seen: Violation) -> dict[str, Any]:
        return wire_of(self._bench, schedule, seen)
