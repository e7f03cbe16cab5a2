"""What the gate reads of a run: its summary and its manifest, as one shape with or without arms."""

from collections.abc import Mapping
from typing import Any

import msgspec

from harness.analysis.comparable import Conditions, conditions_of
from harness.gate.limits import RUN
from harness.records import Metric, Outcome


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
    summary: Mapping[str, Any],
    manifest: Mapping[str, Any],
    of_arms: Mapping[str, Mapping[str, Any]],
) -> Measured:
    """From `summary.json` and `manifest.json`. `of_arms`: by arm, the manifest of a run of it,
    which knows its server and its own load; none where there are no arms, or the rounds were
    not kept.

    Raises KeyError, TypeError, ValueError or msgspec.ValidationError where they are not what they
    should be.
    """
    workload = manifest["workload"]
    return Measured(
        run_id=str(summary["run_id"]),
        created_at=str(manifest["created_at"]),
        status=str(summary["status"]),
        is_wedged=bool(summary.get("wedged")),
        invalid=[said["text"] for said in summary["validity"] if said["level"] == "invalid"],
        conditions=conditions_of(next(iter(of_arms.values()), manifest), summary),
        sides=_sides_of_arms(summary, manifest, of_arms)
        if workload["arms"]
        else {RUN: _whole(summary, conditions_of(manifest, summary))},
    )


def num_rounds(side: Side) -> int:
    """How many rounds a side was run."""
    return max((len(values) for of in side.per_round.values() for values in of.values()), default=0)


def _sides_of_arms(
    summary: Mapping[str, Any],
    manifest: Mapping[str, Any],
    of_arms: Mapping[str, Mapping[str, Any]],
) -> dict[str, Side]:
    sides = {}
    for name, arm in summary["arms"].items():
        of_run = of_arms.get(name, manifest)
        sides[name] = _side(arm, arm["per_round"], conditions_of(of_run, summary))
    return sides


def _whole(summary: Mapping[str, Any], conditions: Conditions) -> Side:
    values = {
        name: {key: [one[key]] for key in ("mean", "p50", "p99") if one[key] is not None}
        for name, one in summary["metrics"].items()
    }
    return _side(summary, values, conditions)


def _side(
    part: Mapping[str, Any],
    per_round: dict[str, dict[str, list[float | None]]],
    conditions: Conditions,
) -> Side:
    return Side(
        conditions=conditions,
        metrics=msgspec.convert(part["metrics"], dict[str, Metric]),
        not_measurable=dict(part.get("not_measurable") or {}),
        per_round=per_round,
        abandoned=int(part["outcomes"].get(Outcome.ABANDONED.value, 0)),
        token_counting=part.get("token_counting"),
    )
