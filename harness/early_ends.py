"""Answers that were over before their user left: pure, from rows."""

from collections.abc import Iterable

from harness.records import Outcome, RequestRow

_RACES = "last_token"  # there it is no surprise


def early_ends_note(rows: Iterable[RequestRow]) -> str | None:
    """What share of those who were to leave could not; None where all could."""
    ends = [
        row.outcome
        for row in rows
        if row.planned_abandon is not None
        and row.plan != _RACES
        and row.outcome in (Outcome.ABANDONED, Outcome.COMPLETED)
    ]
    early = ends.count(Outcome.COMPLETED)
    if not early:
        return None
    return (
        f"{early} of {len(ends)} answers that were to be left ({early / len(ends):.1%}) were "
        "complete before their user left: they ended by themselves (does the server honour "
        "`ignore_eos` and `max_tokens`?), or the plan's moment came too late"
    )
