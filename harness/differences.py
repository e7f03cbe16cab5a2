"""What a comparison found, as it stands in `summary.json`: told by many, computed by few.

How they are computed: `harness.analysis.paired` and `harness.analysis.two_samples`. Whoever only
tells of them, as a load process does on its page, needs no statistics, which take a second to load.
"""

import msgspec


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """An arm against the reference, in one figure of one metric, over `n` rounds that have both.

    The intervals hold 95 %. What is null is not known; `note` says why then, and how many rounds
    are left out.
    """

    arm: str
    reference: str
    n: int
    difference: float | None = None
    difference_ci95: tuple[float, float] | None = None
    ratio: float | None = None
    ratio_ci95: tuple[float, float] | None = None
    note: str | None = None


class Shift(msgspec.Struct, frozen=True, kw_only=True):
    """The first sample against the second, each with its number of censored values. What is null is
    not known; `note` says why then."""

    n: int
    n_reference: int
    n_censored: int = 0
    n_reference_censored: int = 0
    shift: float | None = None
    shift_ci95: tuple[float, float] | None = None
    superiority: float | None = None
    note: str | None = None
