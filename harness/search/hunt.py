"""The hunt: schedules are drawn and played one by one; what breaks an invariant is followed.

A schedule that broke one is played again on a server that was started afresh, to know how often it
does that; then with the same requests and nobody leaving, which must break nothing; then it is made
small (harness/search/shrink.py). The smallest is played six times, and six times with nobody
leaving: it is a finding if chance alone explains the difference with a probability of 5 % at most
(Fisher's exact test). Without a command that starts the
server afresh, each try begins when the server is at rest, and the hunt ends where it never is.

What no schedule breaks alone may add up: after many schedules, and at the end, the hunt looks at
what they have left behind. Such a thing, and what one schedule broke and does not break alone on a
fresh server, is followed by playing all of them again.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Protocol

import msgspec

from harness.experiments.outcome import CannotDecideError
from harness.formatting import quantity
from harness.search.broken import ADDS_UP, Added, Broken, Violation
from harness.search.grammar import Offered, draw
from harness.search.rows import Rows, Tried
from harness.search.schedule import Schedule, seen_in
from harness.search.shrink import shrink
from harness.search.tries import is_no_chance, last_try_s
from harness.search.words import sentence_of, sentence_of_many
from harness.store.search_result import Rate, SearchFinding

_REPEATS: Final = 3  # of a schedule that broke an invariant, and of the same without leaves
_LAST_REPEATS: Final = 6  # of the smallest, likewise
_TRIES: Final = 24  # of one schedule that there is time for: these, and six to make it small
_PLAYS: Final = 5  # of a schedule that is given, until it breaks something
_MANY: Final = 24  # schedules after which the hunt looks at what adds up
_MOST: Final = 96  # that are played again to see it
_LASTS: Final = (  # and so may add up
    *(Broken.DEAD, Broken.WEDGED, Broken.LOST, Broken.HELD, Broken.GAUGES, Broken.HANDLES),
)
_FOR_GOOD: Final = (Broken.DEAD, Broken.WEDGED, Broken.LOST)  # without a fresh start
_FOLLOW_S: Final = 480.0  # for the first tries and making it small, at most,
_LEAST_FOLLOW_S: Final = 120.0  # and at least, when the search's own time is up
_SEEN_ONCE: Final = " It was seen once, and cannot be tried again without --restart."
_TIME_UP: Final = " The time was up before it could be tried often enough."
_USUAL: Final = 2  # schedules that break an invariant whoever leaves: it says nothing then


class Tries(Protocol):
    """See harness/search/trial.py."""

    @property
    def is_fresh(self) -> bool: ...
    @property
    def taken(self) -> Schedule: ...
    def broken_by(self, schedule: Schedule) -> list[Violation]: ...
    def breach_of(self, broken: Broken, schedule: Schedule) -> Violation | None: ...
    def added_up(self) -> list[Violation]: ...
    def added_by(
        self,
        broken: Broken,
        schedules: Sequence[Schedule],
        doing: Callable[[str], object],
        until_s: float,
    ) -> Added | None: ...
    def refresh(self) -> None: ...
    def as_requests(self, schedule: Schedule, seen: Violation) -> dict[str, Any]: ...


class Hunt:
    """`found` is called with each finding, and again when it was seen again; `played` with what the
    server took of each schedule that was drawn and played; `doing` with what happens now, in words.
    """

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
        self._since = deque[Schedule](maxlen=_MOST)  # played since a fresh start
        self._followed_many = set[Broken]()

    def run(self, offered: Offered, *, seed: int, seconds: float, themes: Iterable[str]) -> str:
        """Why it ended. Raises CannotDecideError if the server is of no more use."""
        self._until_s = self._began_s + seconds
        names, number = list(themes), 0
        while self._clock_s() < self._until_s:
            self._hunt(draw(seed, number, offered, names))
            number += 1
            if number % _MANY == 0:
                self._look_back()
        self._look_back()
        return "the time was up"

    def run_one(self, schedule: Schedule, *, seconds: float) -> str:
        """The same for a schedule that is given: it is played until it breaks something."""
        self._until_s = self._began_s + seconds
        tries = 0
        while tries < _PLAYS and self._clock_s() < self._until_s:
            tries += 1
            if self._hunt(schedule):
                return f"the schedule broke something in play {tries}"
        self._look_back()
        what = "something, but not at once," if self._findings else "nothing"
        return f"the schedule broke {what} in {quantity(tries, 'plays')}"

    def _hunt(self, schedule: Schedule) -> bool:
        """Whether it broke something."""
        self._doing(f"{len(schedule.visits)} visits")
        violations = self._trial.broken_by(schedule)
        self._played(self._trial.taken)
        telling = [one for one in violations if self._same_without[one.broken] < _USUAL]
        new = [one for one in telling if not self._is_known(one, schedule)]
        if new:
            self._follow(schedule, new[0])
        if telling or any(one.broken in _LASTS for one in violations):
            self._trial.refresh()
            self._since.clear()
        else:
            self._since.append(schedule)
        return bool(telling)

    def _look_back(self) -> None:
        """Checks what the schedules since the latest refresh have left behind together."""
        if not self._since:
            return
        self._doing(f"what {quantity(len(self._since), 'schedules')} have left behind")
        violations = self._trial.added_up()
        for violation in violations:
            self._played_many(list(self._since), violation)
        if violations:
            self._trial.refresh()
            self._since.clear()

    def _played_many(self, since: Sequence[Schedule], violation: Violation) -> None:
        if known := next((one for one in self._findings if one.broken == violation.broken), None):
            known.seen_again += known.is_sure
            self._found(known)
            return
        finding = self._begin(since, violation)
        if violation.broken is Broken.MEMORY and not self._trial.is_fresh:
            finding.rate = Rate(1, 1)
            finding.sentence += _SEEN_ONCE
            finding.took_s = self._clock_s() - self._began_s - finding.after_s
            self._found(finding)
            return
        with self._reporting(finding):
            self._follow_many(finding, since, violation.broken)

    def _is_known(self, violation: Violation, schedule: Schedule) -> bool:
        """An earlier finding broke the same, and each leave in it is in this schedule, too."""
        within = set(seen_in(schedule))
        for one in self._findings:
            leaves = _leaves_of(one)
            is_same = one.is_sure and one.broken == violation.broken
            if is_same and leaves and contains(within, leaves):
                one.seen_again += 1
                self._found(one)
                return True
        return False

    def _follow(self, drawn: Schedule, violation: Violation) -> None:
        """What is known is reported at each step: the server may be of no more use at the next."""
        finding = self._begin([drawn], violation)
        with self._reporting(finding):
            self._make_sure(finding, drawn, violation.broken)
            is_first = violation.broken not in self._followed_many
            if not finding.rate.hits and self._since and violation.broken in _LASTS and is_first:
                self._follow_many(finding, [*self._since, drawn], violation.broken)

    @contextmanager
    def _reporting(self, finding: SearchFinding) -> Iterator[None]:
        try:
            yield
        except CannotDecideError:
            is_for_good = finding.broken in _FOR_GOOD and not self._trial.is_fresh
            if is_for_good and not finding.rate.tries:
                finding.rate, finding.is_sure = Rate(1, 1), True
            raise
        finally:
            finding.took_s = self._clock_s() - self._began_s - finding.after_s
            self._found(finding)

    def _follow_many(
        self, finding: SearchFinding, schedules: Sequence[Schedule], broken: Broken
    ) -> None:
        """Played again one after the other; the same with nobody leaving; then fewer of them. What
        is seen as soon as it is there gets twice as many: it may have been near before."""
        self._followed_many.add(broken)
        play = partial(self._added_by, broken)
        rows = Rows(play, ends_s=self._until_s, clock_s=self._clock_s)
        row = schedules if broken in ADDS_UP else [*schedules, *schedules]
        tried = rows.tried(row)
        self._note_tries(finding, row, tried)
        last = tried.last
        if not finding.is_sure or last is None or last.seen is None:
            return
        fewer, seen = rows.fewer(row[: last.after], last.seen)
        self._describe_many(finding, fewer, seen, among=len(row))
        if len(fewer) > 1:
            return
        finding.is_sure = False
        try:
            self._make_sure(finding, fewer[0], broken)
        finally:
            if not finding.is_sure and not finding.is_repeat:  # one alone breaks it too seldom
                self._note_tries(finding, row, tried)

    def _note_tries(self, finding: SearchFinding, row: Sequence[Schedule], tried: Tried) -> None:
        last = tried.last
        if last is not None and last.seen is not None:
            finding.rate, finding.control = tried.rate, tried.control
            finding.is_sure = tried.is_sure
            self._describe_many(finding, row, last.seen)
        elif not finding.rate.tries:
            finding.rate = tried.rate
        if tried.is_cut:
            _say_time_is_up(finding)

    def _added_by(
        self, broken: Broken, schedules: Sequence[Schedule], until_s: float
    ) -> Added | None:
        def doing(what: str) -> None:
            self._doing(f"{broken}: {what}, once more")

        return self._trial.added_by(broken, schedules, doing, until_s)

    def _describe_many(
        self,
        finding: SearchFinding,
        schedules: Sequence[Schedule],
        violation: Violation,
        *,
        among: int = 0,
    ) -> None:
        """`among`: the schedules in the row whose rate it has, if that row is longer."""
        if len(schedules) == 1:
            self._describe(finding, schedules[0], violation)
            return
        finding.said, finding.evidence = violation.said, violation.evidence
        finding.sentence = sentence_of_many(schedules, violation, among=among)
        finding.schedule, finding.wire, finding.in_a_row = {}, {}, len(schedules)

    def _begin(self, schedules: Sequence[Schedule], violation: Violation) -> SearchFinding:
        drawn = schedules[-1]
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
        self._describe_many(finding, schedules, violation)
        self._findings.append(finding)
        self._found(finding)
        return finding

    def _describe(self, finding: SearchFinding, schedule: Schedule, violation: Violation) -> None:
        finding.said, finding.evidence = violation.said, violation.evidence
        finding.sentence = sentence_of(schedule, violation)
        finding.schedule, finding.in_a_row = msgspec.to_builtins(schedule), 1
        finding.wire = self._trial.as_requests(schedule, violation)

    def _make_sure(self, finding: SearchFinding, drawn: Schedule, broken: Broken) -> None:
        """Until the time is up: making it small leaves enough of it for the last tries."""
        began_s = self._clock_s()
        until_s = last_try_s(began_s, ends_s=self._until_s)
        if not self._comes_by_leaves(finding, drawn, broken, until_s):
            return
        one_s = (self._clock_s() - began_s) / (2 * _REPEATS)
        until_s = last_try_s(began_s, ends_s=self._until_s, tries=_TRIES, one_s=one_s)
        small_s = max(self._until_s, began_s + _LEAST_FOLLOW_S)
        small_s = min(began_s + _FOLLOW_S, small_s, until_s - 2 * _LAST_REPEATS * one_s)
        small = self._made_small(drawn, broken, rate=finding.rate, until_s=small_s)
        for one in (small, drawn) if small != drawn else (drawn,):  # it may be too small by chance
            self._try_often(finding, one, broken, until_s)
            if finding.is_sure:
                break
        if not finding.is_sure and self._clock_s() >= until_s:
            _say_time_is_up(finding)
        if finding.is_sure and self._is_old(finding):
            finding.is_sure, finding.is_repeat = False, True

    def _comes_by_leaves(
        self, finding: SearchFinding, drawn: Schedule, broken: Broken, until_s: float
    ) -> bool:
        """It breaks the invariant again, and does not where nobody leaves."""
        finding.rate, _ = self._rate(drawn, broken, _REPEATS, until_s)
        if finding.rate.hits:
            finding.control, _ = self._rate(drawn.staying(), broken, _REPEATS, until_s)
        rates = (finding.rate, finding.control) if finding.rate.hits else (finding.rate,)
        if any(one.tries < _REPEATS for one in rates):
            _say_time_is_up(finding)
            return False
        enough = 1 if broken is Broken.TEXT else _REPEATS
        self._same_without[broken] += finding.control.hits >= enough
        return finding.rate.hits > 0 and not finding.control.hits

    def _made_small(
        self, drawn: Schedule, broken: Broken, *, rate: Rate, until_s: float
    ) -> Schedule:
        return shrink(
            drawn,
            lambda one: self._breach_of(broken, one) is not None,
            rate=rate.hits / rate.tries,
            go_on=lambda: self._clock_s() < until_s,
        )

    def _try_often(
        self, finding: SearchFinding, schedule: Schedule, broken: Broken, until_s: float
    ) -> None:
        rate, seen = self._rate(schedule, broken, _LAST_REPEATS, until_s)
        if not rate.tries:  # what is known of the one that was drawn stays
            return
        finding.rate = rate
        if seen is None:
            return
        self._describe(finding, schedule, seen)
        finding.control, _ = self._rate(schedule.staying(), broken, _LAST_REPEATS, until_s)
        finding.is_sure = is_no_chance(finding.rate, finding.control)

    def _is_old(self, finding: SearchFinding) -> bool:
        """An earlier finding has the same leaves."""
        leaves = _leaves_of(finding)
        return any(
            one.is_sure and one.broken == finding.broken and _leaves_of(one) == leaves
            for one in self._findings
            if one is not finding
        )

    def _rate(
        self, schedule: Schedule, broken: Broken, tries: int, until_s: float
    ) -> tuple[Rate, Violation | None]:
        """The last violation, too. No try begins after `until_s`."""
        seen = list[Violation | None]()
        while len(seen) < tries and self._clock_s() < until_s:
            seen.append(self._breach_of(broken, schedule))
        hits = [one for one in seen if one is not None]
        return Rate(len(hits), len(seen)), hits[-1] if hits else None

    def _breach_of(self, broken: Broken, schedule: Schedule) -> Violation | None:
        self._doing(f"{broken}: {len(schedule.visits)} visits, once more")
        return self._trial.breach_of(broken, schedule)


def _say_time_is_up(finding: SearchFinding) -> None:
    finding.sentence = finding.sentence.removesuffix(_TIME_UP) + _TIME_UP


def _leaves_of(finding: SearchFinding) -> set[tuple[str, str, str]]:
    """The leaves in its smallest schedule, if there is one."""
    if not finding.schedule:
        return set()
    return set(seen_in(msgspec.convert(finding.schedule, Schedule)))


def contains(drawn: set[tuple[str, str, str]], smallest: set[tuple[str, str, str]]) -> bool:
    """Each leave of the smallest schedule has one like it in the drawn one, whatever its way: a
    plain one at this phase, or one of a request with the same feature."""
    kinds = {(phase, name) for phase, _, name in drawn}
    phases = {phase for phase, _, _ in drawn}
    return all(
        (phase, name) in kinds or (name == "plain" and phase in phases)
        for phase, _, name in smallest
    )
