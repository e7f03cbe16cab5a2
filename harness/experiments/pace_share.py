"""What share of the streams that left is still computed, from the pace of another stream."""

import random
from collections.abc import Callable, Sequence
from statistics import median, quantiles
from typing import Final

from harness.experiments.outcome import CannotDecideError
from harness.intervals import Interval

LEAST_SHARE: Final = 0.1  # of the streams that left: less is not seen
_LEAST_SLOWER: Final = 1.05  # than alone: by that share of the streams that slow it by half
_REST: Final = 0.25  # of the slowness is left when most of the computed answers have ended
_DRAWS: Final = 1000


def middle_95(values: Sequence[float]) -> Interval:
    """The interval from the 2.5th to the 97.5th percentile."""
    cuts = quantiles(values, n=40, method="inclusive")
    return Interval(cuts[0], cuts[-1])


def share_left(
    full_s: Sequence[float],
    after_s: Sequence[float],
    alone_s: Sequence[float],
    rng: random.Random,
) -> tuple[float, Interval]:
    """What share of the streams that left is still computed, with its 95 % interval. The paces:
    `full_s` while as many streams ran that ended by themselves, `after_s` after the streams left,
    `alone_s` alone."""

    def medians(paces: Sequence[float]) -> list[float]:
        return [median(rng.choices(paces, k=len(paces))) for _ in range(_DRAWS)]

    drawn = zip(*map(medians, (full_s, after_s, alone_s)), strict=True)
    shares = [(after - alone) / (full - alone) for full, after, alone in drawn if full > alone]
    share = (median(after_s) - median(alone_s)) / max(median(full_s) - median(alone_s), 1e-9)
    return share, middle_95(shares) if len(shares) > 1 else Interval(0.0, 1.0)


def follow_slowness(
    alone_s: Sequence[float],
    after_s: Sequence[float],
    measure: Callable[[], Sequence[float]],
    clock: Callable[[], float],
    *,
    near_s: float,
    end_s: float,
) -> tuple[Sequence[float], Sequence[float]]:
    """Measure until the paces are nearly as alone, or until `end_s`. Returns the first paces since
    `near_s`, and the last paces; both are `after_s` if these are nearly as alone already."""
    usual_s = median(alone_s)
    slow_s = max(_LEAST_SLOWER * usual_s, usual_s + _REST * (median(after_s) - usual_s))
    late_s, ended_s = list[float](), after_s
    while median(ended_s) > slow_s and clock() < end_s:
        is_near = clock() >= near_s
        ended_s = measure()
        if is_near and not late_s:
            late_s = [*ended_s]
    if ended_s is not after_s:
        ended_s = measure()  # the paces before may be half from before the ends
    return late_s or ended_s, ended_s


def still_computed(
    left: int,
    full_s: Sequence[float],
    alone_s: Sequence[float],
    after_s: Sequence[float],
    late_s: Sequence[float],
    ended_s: Sequence[float],
    rng: random.Random,
) -> int:
    """How many of the `left` streams are still computed, by the paces when the settle time was over
    (`after_s`), near the natural ends of their answers (`late_s`), and after these (`ended_s`).
    Raises CannotDecideError if the slowness does not begin and end with the answers."""
    share, interval = share_left(full_s, after_s, alone_s, rng)
    if interval.low <= LEAST_SHARE:
        return 0
    if share_left(full_s, late_s, alone_s, rng)[1].low <= LEAST_SHARE:
        raise CannotDecideError(
            "a stream was slower for a while after the settle time, and no longer near the ends of "
            "the answers that were left: another load, or answers that were stopped late"
        )
    if share_left(full_s, after_s, ended_s, rng)[1].low <= LEAST_SHARE:
        raise CannotDecideError(
            "a stream is slower after the others have left than before they came, and still "
            "is when their answers must have ended: another load, or a machine that slowed down"
        )
    return min(left, max(1, round(share * left)))
