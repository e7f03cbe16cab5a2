"""A row: schedules that are played one after the other, to see what they leave behind together."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from harness.search.broken import Added, Violation
from harness.search.schedule import Schedule
from harness.search.tries import is_no_chance, last_try_s
from harness.store.search_result import Rate

_REPEATS: Final = 3  # of a row, and of the same without leaves: fewer could not rule chance out
_ROW_TRIES: Final = 2 * _REPEATS + 1  # that there is time for: all of them, and one of a half

# Plays these schedules on a server as at the beginning: what was seen then. It gets the time at
# which it must end, by the clock; None: the time was up before the last was played.
Play = Callable[[Sequence[Schedule], float], Added | None]


class Tried(NamedTuple):
    """`seen`: of each try of a row; `without`: of each try of the same with nobody leaving.
    `is_cut`: the time was up before there were enough."""

    seen: list[Added]
    without: list[Added]
    is_cut: bool

    @property
    def rate(self) -> Rate:
        return _rate_in(self.seen)

    @property
    def control(self) -> Rate:
        return _rate_in(self.without)

    @property
    def is_sure(self) -> bool:
        return is_no_chance(self.rate, self.control)

    @property
    def last(self) -> Added | None:
        """The hit that took longest."""
        return max((one for one in self.seen if one.seen is not None), key=_after, default=None)


class Rows:
    """The tries of rows that are to show one thing. `ends_s`: the end of the search's own time."""

    def __init__(self, play: Play, *, ends_s: float, clock_s: Callable[[], float]) -> None:
        self._play, self._ends_s, self._clock_s = play, ends_s, clock_s
        self._began_s = clock_s()
        self._until_s = last_try_s(self._began_s, ends_s=ends_s)

    def tried(self, row: Sequence[Schedule]) -> Tried:
        """Tries alternate with the same and nobody leaving. The first try that says otherwise ends
        that, since the others could no longer rule chance out. One that was not played to its end
        is no try."""
        control = [one.staying() for one in row]
        seen, without = list[Added](), list[Added]()
        for schedules, tries in _REPEATS * ((row, seen), (control, without)):
            one = self._added_by(schedules)
            if one is None:
                return Tried(seen, without, is_cut=True)
            tries.append(one)
            self._allow_as_many(len(seen) + len(without))
            is_wanted = (one.seen is not None) == (tries is seen)
            if not is_wanted:
                break
        return Tried(seen, without, is_cut=False)

    def _allow_as_many(self, done: int) -> None:
        """A row has the time that all of its tries need, if they last as long as those `done`."""
        one_s = (self._clock_s() - self._began_s) / done
        self._until_s = last_try_s(
            self._began_s, ends_s=self._ends_s, tries=_ROW_TRIES, one_s=one_s
        )

    def fewer(
        self, row: Sequence[Schedule], violation: Violation
    ) -> tuple[Sequence[Schedule], Violation]:
        """One of the halves, as long as it breaks the invariant, too."""
        while len(row) > 1 and self._clock_s() < self._until_s:
            middle = len(row) // 2
            for half in (row[:middle], row[middle:]):
                found = self._added_by(half)
                if found is not None and found.seen is not None:
                    row, violation = half, found.seen
                    break
            else:
                break
        return row, violation

    def _added_by(self, schedules: Sequence[Schedule]) -> Added | None:
        if self._clock_s() >= self._until_s:
            return None
        return self._play(schedules, self._until_s)


def _after(added: Added) -> int:
    return added.after


def _rate_in(tries: Sequence[Added]) -> Rate:
    return Rate(sum(one.seen is not None for one in tries), len(tries))
