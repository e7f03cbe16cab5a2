"""The hunt: schedules are drawn and played one by one; what breaks an invariant is followed.

A schedule that broke one is played again on a server that was started afresh, to know how often it
does that; then with the same requests and nobody leaving, which must break nothing; then it is made
small (harness/search/shrink.py). The smallest is played six times, and six times with nobody
leaving: it is a finding if chance alone explains the difference with a probability of 5 % at most
(Fisher's exact test). Without a command that starts the
server afresh, each try begins when the server is at rest, and the hunt ends where it never is.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

import msgspec

from harness.conform.bystanders import chance_of
from harness.experiments.outcome import CannotDecideError
from harness.formatting import quantity
from harness.search.grammar import Offered, draw
from harness.search.invariants import Broken, Violation
from harness.search.schedule import Schedule, seen_in
from harness.search.shrink import shrink
from harness.search.words import sentence_of
from harness.store.search_result import Rate, SearchFinding

_REPEATS: Final = 3  # of a schedule that broke an invariant, and of the same without leaves
_LAST_REPEATS: Final = 6  # of the smallest, likewise
_PLAYS: Final = 5  # of a schedule that is given, until it breaks something
_CHANCE: Final = 0.05  # above it, that it comes more often with leaves may be chance
_FOR_GOOD: Final = (Broken.DEAD, Broken.WEDGED, Broken.LOST)  # without a fresh start
_FOLLOW_S: Final = 480.0  # for making one schedule small, at most,
_LEAST_FOLLOW_S: Final = 120.0  # and at least, when the search's own time is up
_SEEDS: Final = 1_000_003  # between the schedules of one seed and the next
_UNSTABLE: Final = 2  # schedules that change texts without leaves, too: texts say nothing then


class Tries(Protocol):
    """See harness/search/trial.py."""

    @property
    def is_fresh(self) -> bool: ...
    def broken_by(self, schedule: Schedule) -> list[Violation]: ...
    def breach_of(self, broken: Broken, schedule: Schedule) -> Violation | None: ...
    def refresh(self) -> None: ...
    def as_requests(self, schedule: Schedule, broken: Broken) -> dict[str, Any]: ...


class Hunt:
    """`found` is called with each finding, and again when it was seen again; `played` with each
    schedule that was drawn and played; `doing` with what happens now, in words."""

    def __init__(
        self,
        trial: Tries,
        *,
        found: Callable[[SearchFinding], object],
        played: Callable[[Schedule], object],
        doing: Callable[[str], object],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._trial = trial
        self._found, self._played, self._doing = found, played, doing
        self._clock_s = clock_s
        self._began_s = self._until_s = clock_s()
        self._findings: list[SearchFinding] = []
        self._same_without = Counter[Broken]()

    def run(self, offered: Offered, *, seed: int, seconds: float, themes: Iterable[str]) -> str:
        """Why it ended."""
        self._until_s = self._began_s + seconds
        names, number = list(themes), 0
        try:
            while self._clock_s() < self._until_s:
                self._hunt(draw(seed * _SEEDS + number, offered, names))
                number += 1
        except CannotDecideError as error:
            return str(error)
        return "the time was up"

    def run_one(self, schedule: Schedule, *, seconds: float) -> str:
        """The same for a schedule that is given: it is played until it breaks something."""
        self._until_s = self._began_s + seconds
        tries = 0
        try:
            while tries < _PLAYS and self._clock_s() < self._until_s:
                tries += 1
                if self._hunt(schedule):
                    return f"the schedule broke something in play {tries}"
        except CannotDecideError as error:
            return str(error)
        return f"the schedule broke nothing in {quantity(tries, 'plays')}"

    def _hunt(self, schedule: Schedule) -> bool:
        """Whether it broke something. Raises CannotDecideError if the server is of no more use."""
        self._doing(f"{len(schedule.visits)} visits")
        violations = self._trial.broken_by(schedule)
        if self._same_without[Broken.TEXT] >= _UNSTABLE:
            violations = [one for one in violations if one.broken is not Broken.TEXT]
        self._played(schedule)
        new = [one for one in violations if not self._is_known(one, schedule)]
        if new:
            self._follow(schedule, new[0])
        if violations:
            self._trial.refresh()
        return bool(violations)

    def _is_known(self, violation: Violation, schedule: Schedule) -> bool:
        """An earlier finding broke the same, and each leave in it is in this schedule, too."""
        within = set(seen_in(schedule))
        for one in self._findings:
            leaves = set(seen_in(msgspec.convert(one.schedule, Schedule)))
            is_same = one.is_sure and one.broken == violation.broken
            if is_same and leaves and contains(within, leaves):
                one.seen_again += 1
                self._found(one)
                return True
        return False

    def _follow(self, drawn: Schedule, violation: Violation) -> None:
        """What is known is reported at each step: the server may be of no more use at the next."""
        finding = self._begin(drawn, violation)
        try:
            self._make_sure(finding, drawn, violation.broken)
        except CannotDecideError:
            is_for_good = violation.broken in _FOR_GOOD and not self._trial.is_fresh
            if is_for_good and not finding.rate.tries:
                finding.rate, finding.is_sure = Rate(1, 1), True
            raise
        finally:
            finding.took_s = self._clock_s() - self._began_s - finding.after_s
            self._found(finding)

    def _begin(self, drawn: Schedule, violation: Violation) -> SearchFinding:
        finding = SearchFinding(
            number=len(self._findings) + 1,
            broken=str(violation.broken),
            said="",
            sentence="",
            seed=drawn.seed,
            drawn_visits=len(drawn.visits),
            schedule={},
            rate=Rate(0, 0),
            control=Rate(0, 0),
            is_fresh=self._trial.is_fresh,
            after_s=self._clock_s() - self._began_s,
        )
        self._describe(finding, drawn, violation)
        self._findings.append(finding)
        self._found(finding)
        return finding

    def _describe(self, finding: SearchFinding, schedule: Schedule, seen: Violation) -> None:
        finding.said, finding.evidence = seen.said, seen.evidence
        finding.sentence = sentence_of(schedule, seen)
        finding.schedule = msgspec.to_builtins(schedule)
        finding.wire = self._trial.as_requests(schedule, seen.broken)

    def _make_sure(self, finding: SearchFinding, drawn: Schedule, broken: Broken) -> None:
        began_s = self._clock_s()
        finding.rate, _ = self._rate(drawn, broken, _REPEATS)
        if not finding.rate.hits:
            return
        finding.control, _ = self._rate(drawn.staying(), broken, _REPEATS)
        self._same_without[broken] += bool(finding.control.hits)
        if finding.control.hits:
            return
        until_s = min(began_s + _FOLLOW_S, max(self._until_s, began_s + _LEAST_FOLLOW_S))
        small = shrink(
            drawn,
            lambda one: self._breach_of(broken, one) is not None,
            rate=finding.rate.hits / finding.rate.tries,
            go_on=lambda: self._clock_s() < until_s,
        )
        rate, seen = self._rate(small, broken, _LAST_REPEATS)
        finding.rate = rate
        if seen is None:  # it comes so rarely that it was made too small by chance
            return
        self._describe(finding, small, seen)
        finding.control, _ = self._rate(small.staying(), broken, _LAST_REPEATS)
        hits = rate.hits + finding.control.hits
        chance = chance_of(rate.hits, rate.tries, of_all=hits, among=2 * rate.tries)
        finding.is_sure = chance <= _CHANCE
        if finding.is_sure and self._is_old(finding):
            finding.is_sure, finding.is_repeat = False, True

    def _is_old(self, finding: SearchFinding) -> bool:
        """An earlier finding has the same leaves."""
        leaves = set(seen_in(msgspec.convert(finding.schedule, Schedule)))
        return any(
            one.is_sure
            and one.broken == finding.broken
            and set(seen_in(msgspec.convert(one.schedule, Schedule))) == leaves
            for one in self._findings
            if one is not finding
        )

    def _rate(
        self, schedule: Schedule, broken: Broken, tries: int
    ) -> tuple[Rate, Violation | None]:
        """The last violation, too."""
        seen = [self._breach_of(broken, schedule) for _ in range(tries)]
        hits = [one for one in seen if one is not None]
        return Rate(len(hits), tries), hits[-1] if hits else None

    def _breach_of(self, broken: Broken, schedule: Schedule) -> Violation | None:
        self._doing(f"{broken}: {len(schedule.visits)} visits, once more")
        return self._trial.breach_of(broken, schedule)


def contains(drawn: set[tuple[str, str, str]], smallest: set[tuple[str, str, str]]) -> bool:
    """Each leave of the smallest schedule has one like it in the drawn one, whatever its way: a
    plain one at this phase, or one of a request with the same feature."""
    kinds = {(phase, name) for phase, _, name in drawn}
    phases = {phase for phase, _, _ in drawn}
    return all(
        (phase, name) in kinds or (name == "plain" and phase in phases)
        for phase, _, name in smallest
    )
