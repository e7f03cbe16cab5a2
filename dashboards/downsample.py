"""Fewer points from many without hiding what matters.

Of a long series, the time axis is cut into equal intervals and each keeps its lowest and its
highest sample, where they stood. So a spike of one sample is still drawn, which averaging or taking
every n-th is not. A rising curve is cut by its height instead, so that its steep parts and its long
tail are drawn alike.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

STEPS: Final = 1_000  # of a rising curve: no more than 0.1 % of its height each


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """A series in three numbers. `mean`: by time, each sample holding until the next."""

    highest: float
    mean: float
    last: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points to draw, how many samples they stand for, and the levels of all of these."""

    x: Floats
    y: Floats
    samples: int
    intervals: int | None  # null: every sample is drawn
    levels: Levels | None  # null: there is none

    @property
    def note(self) -> str | None:
        """What a caption must say about it."""
        if self.intervals is None:
            return None
        return (
            f"{self.samples:,} samples, drawn as the lowest and highest "
            f"of each of {self.intervals:,} intervals"
        )


def min_max(x: Floats, y: Floats, *, intervals: int = 600) -> Series:
    """Keep at most two samples (the lowest and the highest) of each interval. `x` must ascend."""
    known = np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) <= 2 * intervals:
        return Series(x=x, y=y, samples=len(x), intervals=None, levels=_levels(x, y))
    edges = np.linspace(x[0], x[-1], intervals + 1)
    starts = np.unique(np.searchsorted(x, edges[:-1]))
    bounds = [*starts.tolist(), len(x)]
    keep: list[int] = []
    for start, end in pairwise(bounds):
        part = y[start:end]
        keep.extend(sorted({start + int(part.argmin()), start + int(part.argmax())}))
    drawn_x, drawn_y, levels = x[keep], y[keep], _levels(x, y)
    return Series(x=drawn_x, y=drawn_y, samples=len(x), intervals=intervals, levels=levels)


def _levels(x: Floats, y: Floats) -> Levels | None:
    if not len(y):
        return None
    held = np.diff(x)
    mean = np.average(y[:-1], weights=held) if held.sum() > 0 else y.mean()
    return Levels(highest=float(y.max()), mean=float(mean), last=float(y[-1]))


def rising_steps(y: Floats, *, steps: int = STEPS) -> Ints:
    """Which points of a rising curve to draw: the first and the last, and between them the first
    that reaches each of `steps` equal parts of its height. Drawn as steps it then lies nowhere
    above the true one, and below by less than such a part."""
    if len(y) <= steps + 2:
        return np.arange(len(y))
    levels = np.linspace(y[0], y[-1], steps + 1)
    reached = np.minimum(np.searchsorted(y, levels), len(y) - 1)
    return np.unique(np.concatenate([[0], reached, [len(y) - 1]]))


def rising_note(points: int, *, steps: int = STEPS) -> str | None:
    """What a caption must say of a curve of so many points."""
    if points <= steps:
        return None
    return f"{points:,} requests, drawn in {steps:,} steps: nowhere above the true curve."
