"""What the gate reads of a run: its summary and its manifest, as one shape with or without arms."""

from collections.abc import Mapping
from typing import Any

import msgspec

from harness.analysis.comparable import Conditions, conditions_of
from harness.gate.limits import RUN
from harness.records import FIGURES_PER_ROUND, ArmsSummary, ArmSummary, Metric, Outcome, Summary


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of the run, or of one of its arms. `per_round`: {metric: {figure: a value a
    round}}; of a run without arms that is one value. `conditions`: those of this arm.
    `token_counting`: what figures of tokens rest on; None where that was not told.
    """

    conditions: Conditions
    metrics: dict[str, Metric]
    not_measurable: dict[str, str]
    per_round: dict[str, dict[str, list[float | None]]]
    abandoned: int
    token_counting: str | None = None


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A run as it is judged. `invalid`: why its figures mean nothing, if they do not. `conditions`:
    those of the workload, and of the server that was run first; each side has its own."""

    run_id: str
    created_at: str
    status: str
    is_wedged: bool
    invalid: list[str]
    conditions: Conditions
    sides: dict[str, Side]


def read_measured(
    summary: Summary | ArmsSummary,
    manifest: Mapping[str, Any],
    of_arms: Mapping[str, Mapping[str, Any]],
) -> Measured:
    """From `summary.json` and `manifest.json`. `of_arms`: by arm, the manifest of a run of it,
    which knows its server and its own load; none where there are no arms, or the rounds were
    not kept.

    Raises KeyError, TypeError or ValueError where the manifest is not what it should be.
    """
    return Measured(
        run_id=str(summary.run_id),
        created_at=str(manifest["created_at"]),
        status=summary.status,
        is_wedged=isinstance(summary, Summary) and bool(summary.wedged),
        invalid=[said.text for said in summary.validity if said.level == "invalid"],
        conditions=conditions_of(next(iter(of_arms.values()), manifest), summary),
        sides=_sides(summary, manifest, of_arms),
    )


def num_rounds(side: Side) -> int:
    """How many rounds a side was run."""
    return max((len(values) for of in side.per_round.values() for values in of.values()), default=0)


def _sides(
    summary: Summary | ArmsSummary,
    manifest: Mapping[str, Any],
    of_arms: Mapping[str, Mapping[str, Any]],
) -> dict[str, Side]:
    if isinstance(summary, Summary):
        return {RUN: _side(summary, _one_round(summary), conditions_of(manifest, summary))}
    sides = {}
    for name, arm in summary.arms.items():
        of_run = of_arms.get(name, manifest)
        sides[name] = _side(arm, arm.per_round, conditions_of(of_run, summary))
    return sides


def _one_round(summary: Summary) -> dict[str, dict[str, list[float | None]]]:
    """The figures of a run without arms, as those of its only round."""
    figures = {name: _known_figures(one) for name, one in summary.metrics.items()}
    return {name: {key: [value] for key, value in of.items()} for name, of in figures.items()}


def _known_figures(metric: Metric) -> dict[str, float]:
    found = {key: getattr(metric, key) for key in FIGURES_PER_ROUND}
    return {key: value for key, value in found.items() if value is not None}


def _side(
    part: Summary | ArmSummary,
    per_round: dict[str, dict[str, list[float | None]]],
    conditions: Conditions,
) -> Side:
    return Side(
        conditions=conditions,
        metrics=part.metrics,
        not_measurable=part.not_measurable,
        per_round=per_round,
        abandoned=part.outcomes.get(Outcome.ABANDONED.value, 0),
        token_counting=part.token_counting,
    )
