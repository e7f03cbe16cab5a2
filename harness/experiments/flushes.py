"""Tokens come one by one, a few in an event, or many events at once: what comes at once is a flush.

A step is time over tokens: never the gap between two events of one flush.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import median
from typing import Final, NamedTuple

_TOGETHER: Final = 0.2  # of the mean gap between events: closer ones came together
_GAP_TOKENS: Final = 4  # over which a step is measured: a busy client may read a few at once


class Flush(NamedTuple):
    """`tokens` that came together, the first of them at `at_ns`."""

    at_ns: int
    tokens: float


def flushes_of(times_ns: Sequence[int], tokens: Sequence[float] = ()) -> list[Flush]:
    """`times_ns`, `tokens`: of each event; without `tokens` each has one."""
    if not times_ns:
        return []
    counts = tokens or [1.0] * len(times_ns)
    closest_ns = _TOGETHER * (times_ns[-1] - times_ns[0]) / max(1, len(times_ns) - 1)
    flushes = [Flush(times_ns[0], counts[0])]
    for number, (early_ns, late_ns) in enumerate(pairwise(times_ns), start=1):
        if late_ns - early_ns <= closest_ns:
            flushes[-1] = flushes[-1]._replace(tokens=flushes[-1].tokens + counts[number])
        else:
            flushes.append(Flush(late_ns, counts[number]))
    return flushes


def step_of(flushes: Sequence[Flush]) -> float | None:
    """The time a token takes, in seconds; None: all came at once."""
    later = sum(one.tokens for one in flushes[1:])
    return (flushes[-1].at_ns - flushes[0].at_ns) / 1e9 / later if later else None


def typical_tokens(flushes: Sequence[Flush]) -> float:
    """The typical number of tokens of a flush; the last flush may have fewer."""
    return median(one.tokens for one in flushes[:-1] or flushes)


def latest_gaps(
    times_ns: Sequence[int], tokens: Sequence[float] = (), *, latest: int
) -> list[float]:
    """The steps by the `latest` tokens, in seconds, each over some tokens."""
    flushes = flushes_of(times_ns[-latest:], tokens[-latest:])
    so_far = list(accumulate(one.tokens for one in flushes))
    gaps = []
    for first, one in enumerate(flushes):
        for last in range(first + 1, len(flushes)):
            came = so_far[last] - so_far[first]
            if came >= _GAP_TOKENS:
                gaps.append((flushes[last].at_ns - one.at_ns) / 1e9 / came)
                break
    return gaps
