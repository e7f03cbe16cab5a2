"""What the page of a comparison is made from: a baseline, and candidates against it, arm by arm.

A candidate that cannot be read, or has no question in common with the baseline, keeps nobody from
being compared: it is told of with the reason.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from harness.analysis.cancel import latency_sample
from harness.analysis.stats import Curve
from harness.errors import ConfigError
from harness.export.comparison import BASELINE, CANDIDATE, Comparison, compare_each, singles
from harness.export.library import Run, load_run
from harness.records import Metric


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A run, in one arm ("" where there are none), under the name that it has on the page."""

    label: str
    run: Run
    arm: str
    metrics: dict[str, Metric]

    def cancel_curve(self) -> Curve | None:
        """When the server let go of those who left; None where no log or no row tells."""
        try:
            parts = [one.cancellations for one in singles(self.run, self.arm)]
        except ConfigError:
            return None
        sample = latency_sample(pd.concat(parts))
        return sample.curve() if len(sample.values) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The baseline in one arm, and each candidate that has it with how it compares."""

    arm: str
    baseline: Contender
    candidates: tuple[tuple[Contender, Comparison], ...]

    @property
    def contenders(self) -> tuple[Contender, ...]:
        return self.baseline, *(candidate for candidate, _ in self.candidates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """All of a page. `refused`: which candidates are not compared, and why."""

    baseline: Run
    matches: tuple[Match, ...]
    refused: tuple[tuple[str, str], ...]


def read_contest(baseline: Path, candidates: Sequence[Path]) -> Contest:
    """Read and compare. Raises ConfigError where the baseline cannot be read, or nothing can be
    compared with it."""
    first, *labels = labels_of([baseline, *candidates])
    run, found, refused = load_run(baseline), [], []
    for label, compared in zip(labels, compare_each(run, candidates), strict=True):
        if isinstance(compared, ConfigError):
            refused.append((label, str(compared)))
            continue
        other, comparisons = compared
        found += [(label, other, one) for one in comparisons]
        refused += [(label, why) for why in _arms_of_one(run, other)]
    if not found:
        raise ConfigError("\n".join(reason for _, reason in refused))
    arms = dict.fromkeys(comparison.arm for _, _, comparison in found)
    matches = [
        _match(run, first, [(label, other, one) for label, other, one in found if one.arm == arm])
        for arm in arms
    ]
    return Contest(baseline=run, matches=tuple(matches), refused=tuple(refused))


def _arms_of_one(baseline: Run, candidate: Run) -> Iterator[str]:
    """The arms that only one of two runs has."""
    for arm in dict.fromkeys([*baseline.arms, *candidate.arms]):
        if arm not in candidate.arms:
            yield f"arm {arm}: only the {BASELINE} has it"
        elif arm not in baseline.arms:
            yield f"arm {arm}: only the {CANDIDATE} has it"


def labels_of(paths: Sequence[Path]) -> list[str]:
    """The folders' names; where two are the same, with the way there; one that is named again is
    numbered."""
    names = [path.resolve().name for path in paths]
    counts = Counter(names)
    labels = []
    for place, (name, path) in enumerate(zip(names, paths, strict=True)):
        label = name if counts[name] == 1 else str(path)
        before = paths[:place].count(path)
        labels.append(f"{label} ({before + 1})" if before else label)
    return labels


def _match(baseline: Run, label: str, those: Sequence[tuple[str, Run, Comparison]]) -> Match:
    first = those[0][2]
    return Match(
        arm=first.arm,
        baseline=Contender(
            label=label, run=baseline, arm=first.arm, metrics=first.metrics[BASELINE]
        ),
        candidates=tuple(
            (Contender(label=name, run=run, arm=one.arm, metrics=one.metrics[CANDIDATE]), one)
            for name, run, one in those
        ),
    )
