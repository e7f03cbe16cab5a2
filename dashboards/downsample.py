"""Fewer points from a long series without hiding a peak.

The time axis is cut into equal intervals and each keeps its lowest and its highest sample, where
they stood. So a spike of one sample is still drawn, which averaging or taking every n-th is not.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Points to draw, and how many samples they stand for."""

    x: Floats
    y: Floats
    samples: int
    intervals: int | None  # null: every sample is drawn

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
        return Series(x=x, y=y, samples=len(x), intervals=None)
    edges = np.linspace(x[0], x[-1], intervals + 1)
    starts = np.unique(np.searchsorted(x, edges[:-1]))
    bounds = [*starts.tolist(), len(x)]
    keep: list[int] = []
    for start, end in pairwise(bounds):
        part = y[start:end]
        keep.extend(sorted({start + int(part.argmin()), start + int(part.argmax())}))
    return Series(x=x[keep], y=y[keep], samples=len(x), intervals=intervals)
