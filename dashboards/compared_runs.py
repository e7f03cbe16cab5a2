"""The runs of a comparison: a baseline, and candidates against it, arm by arm.

A candidate that cannot be read, or that has another question than the baseline, is left out with
the reason; the others are still compared.
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
class ComparedRun:
    """A run, or one arm of it ("" without arms), under its name on the page."""

    label: str
    run: Run
    arm: str
    metrics: dict[str, Metric]

    def cancel_curve(self) -> Curve | None:
        """None if neither the lifecycle log nor the rows have cancel latencies."""
        try:
            parts = [one.cancellations for one in singles(self.run, self.arm)]
        except ConfigError:
            return None
        sample = latency_sample(pd.concat(parts))
        return sample.curve() if len(sample.values) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedArm:
    arm: str
    baseline: ComparedRun
    candidates: tuple[tuple[ComparedRun, Comparison], ...]

    @property
    def runs(self) -> tuple[ComparedRun, ...]:
        return self.baseline, *(candidate for candidate, _ in self.candidates)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRuns:
    """The contents of a page. `refused`: the candidates that are not compared, and why."""

    baseline: Run
    arms: tuple[ComparedArm, ...]
    refused: tuple[tuple[str, str], ...]


def read_compared(baseline: Path, candidates: Sequence[Path]) -> ComparedRuns:
    """Raises ConfigError for an unreadable baseline, or if no candidate can be compared."""
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
    compared_arms = [
        _in_arm(run, first, [(label, other, one) for label, other, one in found if one.arm == arm])
        for arm in arms
    ]
    return ComparedRuns(baseline=run, arms=tuple(compared_arms), refused=tuple(refused))


def _arms_of_one(baseline: Run, candidate: Run) -> Iterator[str]:
    for arm in dict.fromkeys([*baseline.arms, *candidate.arms]):
        if arm not in candidate.arms:
            yield f"arm {arm}: only the {BASELINE} has it"
        elif arm not in baseline.arms:
            yield f"arm {arm}: only the {CANDIDATE} has it"


def labels_of(paths: Sequence[Path]) -> list[str]:
    """The folders' names; their paths if a name repeats; a repeated path is numbered."""
    names = [path.resolve().name for path in paths]
    counts = Counter(names)
    labels = []
    for place, (name, path) in enumerate(zip(names, paths, strict=True)):
        label = name if counts[name] == 1 else str(path)
        before = paths[:place].count(path)
        labels.append(f"{label} ({before + 1})" if before else label)
    return labels


def _in_arm(baseline: Run, label: str, those: Sequence[tuple[str, Run, Comparison]]) -> ComparedArm:
    first = those[0][2]
    return ComparedArm(
        arm=first.arm,
        baseline=ComparedRun(
            label=label, run=baseline, arm=first.arm, metrics=first.metrics[BASELINE]
        ),
        candidates=tuple(
            (ComparedRun(label=name, run=run, arm=one.arm, metrics=one.metrics[CANDIDATE]), one)
            for name, run, one in those
        ),
    )
