"""The hunt: schedules are drawn and played one by one; what breaks an invariant is followed.

A schedule that broke one is played again on a server that was started afresh, to know how often it
does that; then with the same requests and nobody leaving, which must break nothing; then it is made
small (harness/search/shrink.py), and its rate is taken again. Without a command that starts the
server afresh, each try begins when the server is at rest, and the hunt ends where it never is.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

import msgspec

from harness.experiments.outcome import CannotDecideError
from harness.formatting import quantity
from harness.search.grammar import Offered, draw
from harness.search.invariants import Broken, Violation
from harness.search.schedule import Schedule, seen_in
from harness.search.shrink import shrink
from harness.search.words import sentence_of
from harness.store.search_result import Rate, SearchFinding

_REPEATS: Final = 3  # of a schedule that broke an invariant
_CONTROLS: Final = 2
_LAST_REPEATS: Final = 5  # of the smallest
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
    def as_requests(self, schedule: Schedule) -> dict[str, Any]: ...


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
            while tries < _LAST_REPEATS and self._clock_s() < self._until_s:
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
        """An earlier finding broke the same, and what is in it is in this schedule, too."""
        within = set(seen_in(schedule))
        for one in self._findings:
            smallest = msgspec.convert(one.schedule, Schedule)
            if one.broken == violation.broken and contains(within, set(seen_in(smallest))):
                one.seen_again += 1
                self._found(one)
                return True
        return False

    def _follow(self, drawn: Schedule, violation: Violation) -> None:
        began_s, broken = self._clock_s(), violation.broken
        self._doing(f"{broken}: {violation.said}; does it come back?")
        control, smallest = Rate(0, 0), drawn
        try:
            rate, again = self._rate(drawn, broken, _REPEATS)
        except CannotDecideError:  # it is broken for good
            self._add(drawn, drawn, violation, Rate(1, 1), control, began_s)
            raise
        if rate.hits:
            control, _ = self._rate(drawn.staying(), broken, _CONTROLS)
        self._same_without[broken] += bool(control.hits)
        if rate.hits and not control.hits:
            self._doing(f"{broken}: it comes back in {rate} tries; making the schedule small")
            until_s = min(began_s + _FOLLOW_S, max(self._until_s, began_s + _LEAST_FOLLOW_S))
            small = shrink(
                drawn,
                lambda one: self._trial.breach_of(broken, one) is not None,
                rate=rate.hits / rate.tries,
                go_on=lambda: self._clock_s() < until_s,
            )
            last, seen = self._rate(small, broken, _LAST_REPEATS)
            if last.hits:  # else it comes so rarely that it was made too small by chance
                rate, again, smallest = last, seen, small
        if not self._is_known(violation, smallest):
            self._add(drawn, smallest, again or violation, rate, control, began_s)

    def _rate(
        self, schedule: Schedule, broken: Broken, tries: int
    ) -> tuple[Rate, Violation | None]:
        """The last violation, too."""
        seen = [self._trial.breach_of(broken, schedule) for _ in range(tries)]
        hits = [one for one in seen if one is not None]
        return Rate(len(hits), tries), hits[-1] if hits else None

    def _add(
        self,
        drawn: Schedule,
        smallest: Schedule,
        seen: Violation,
        rate: Rate,
        control: Rate,
        began_s: float,
    ) -> None:
        finding = SearchFinding(
            number=len(self._findings) + 1,
            broken=str(seen.broken),
            said=seen.said,
            sentence=sentence_of(smallest, seen),
            evidence=seen.evidence,
            seed=drawn.seed,
            drawn_visits=len(drawn.visits),
            schedule=msgspec.to_builtins(smallest),
            wire=self._trial.as_requests(smallest),
            rate=rate,
            control=control,
            is_fresh=self._trial.is_fresh,
            after_s=began_s - self._began_s,
            took_s=self._clock_s() - began_s,
        )
        self._findings.append(finding)
        self._found(finding)


def contains(drawn: set[tuple[str, str, str]], smallest: set[tuple[str, str, str]]) -> bool:
    """Each leave of the smallest schedule has one like it in the drawn one, whatever its way: a
    plain one at this phase, or one of a request with the same feature."""
    kinds = {(phase, name) for phase, _, name in drawn}
    phases = {phase for phase, _, _ in drawn}
    return all(
        (phase, name) in kinds or (name == "plain" and phase in phases)
        for phase, _, name in smallest
    )
