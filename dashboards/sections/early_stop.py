"""Savings of early stopping by task, and their dependence on how much text follows an answer."""

from collections.abc import Iterator, Mapping

from dashboards.figures import dots
from dashboards.sections.section import Part, Picture, Section, Table, section
from harness.export.library import Run
from harness.text.tables import SavingsByArm, savings_by_arm, savings_columns, savings_rows


def sections(run: Run) -> list[Section]:
    """Empty for a run without requests of plan `task`."""
    return [_savings(run)] if savings_by_arm(run.summary) else []


@section(
    "early-stopping",
    "Savings of early stopping, task by task",
    "The texts are known, so the tokens that were not generated are counted, not estimated. How "
    "much of a text comes after its answer is an input of the workload, and no finding. On the "
    "dotted line all that came after the answers was left unsaid. Diamonds are the source's "
    "figures, at the left edge because the source does not describe its texts.",
    good="lines on the dotted line: above it answers were cut short, below it the stop came late.",
)
def _savings(run: Run) -> Iterator[Part]:
    by_arm = savings_by_arm(run.summary)
    saved, of_max = (_by_share(by_arm, key) for key in ("saved", "saved_of_max"))
    if any(len(points) > 1 for points in saved.values()):
        source = {one.task: one.source_saved for found in by_arm.values() for one in found}
        yield _curve("saved", saved, {}, "left unsaid of the whole text")
        yield _curve("saved-of-max", of_max, source, "not generated of max_tokens")
    yield Table(
        title="Early stopping compared with its source",
        shows="The source gives average savings against max_tokens. An answer is cut short if it "
        "was stopped before the token that completes it.",
        columns=savings_columns(by_arm),
        rows=tuple(savings_rows(by_arm)),
    )


def _curve(
    name: str, by_task: Mapping[str, Mapping[float, float]], source: Mapping[str, float], what: str
) -> Picture:
    said = "; ".join(
        f"{task}: {', '.join(f'{y:.0%} at {x:.0%}' for x, y in points.items())}"
        for task, points in by_task.items()
    )
    return Picture(
        name=f"early-stopping-{name}",
        figure=dots.saved_by_share(by_task, source, y_title=what),
        note=what,
        alt=f"Tokens {what}, by task and by the share of text after the answer. {said}.",
    )


def _by_share(by_arm: SavingsByArm, key: str) -> dict[str, dict[float, float]]:
    found: dict[str, dict[float, float]] = {}
    for one in (one for savings in by_arm.values() for one in savings):
        if one.stops_early and one.after_answer is not None:
            found.setdefault(one.task, {})[one.after_answer] = getattr(one, key)
    return {task: dict(sorted(points.items())) for task, points in found.items()}
