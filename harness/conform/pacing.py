"""The order in which the cases run, and how long the rest of them takes."""

from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from statistics import median
from typing import Final, NamedTuple

from harness.conform.case import Case
from harness.formatting import quantity

_PRIOR_S: Final = 10.0  # the weight of the typical times against the times of this run


class SuiteStanding(NamedTuple):
    """Where a run stands. `left_s`: with the case that now runs."""

    number: int
    total: int
    left_s: float

    def __str__(self) -> str:
        return f"{self.number}/{self.total}, about {quantity(round(self.left_s), 's')} left"


def in_order(cases: Iterable[Case]) -> list[Case]:
    """Cases that find a server which never stops come first, and then the other quick ones."""
    return sorted(cases, key=_rank)


def _rank(case: Case) -> int:
    return 0 if case.quick and "P" in case.methods else 1 if case.quick else 2


def typical_times(*, quick: bool = False) -> dict[str, float]:
    """Seconds by case, on the bundled engine with 8 slots and a step of 20 ms. `quick`: with as few
    tries as under --quick, where that is shorter."""
    lines = (files("harness.conform") / "durations.txt").read_text(encoding="utf-8").splitlines()
    rows = (line.split() for line in lines if line and not line.startswith("#"))
    return {name: float(seconds[-1 if quick else 0]) for name, *seconds in rows}


def time_left(
    rest: Sequence[str], done: Mapping[str, float], typical: Mapping[str, float]
) -> float:
    """Seconds for the cases of `rest`: their typical times, longer or shorter by the same factor as
    the cases of `done` were. A case without a typical time takes the median one."""
    middle = median(typical.values()) if typical else 1.0
    took = _PRIOR_S + sum(done.values())
    expected = _PRIOR_S + sum(typical.get(name, middle) for name in done)
    return took / expected * sum(typical.get(name, middle) for name in rest)
