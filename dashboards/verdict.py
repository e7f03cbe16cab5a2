"""The first word of a report: is it good, and by what?

Where the workload has limits, the verdict is the gate's on them. Without limits it is held to what
a good server shows whatever the load: nobody is forgotten, nothing is missing afterwards, a cancel
waits for the step in progress and little more, nobody's request fails. What the run cannot tell is
not judged, and a run that shows nothing, or did not come to its end, is not called good.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from dashboards.sentence import (
    Metrics,
    amounts,
    ghost_count,
    known_leaks,
    stopped_words,
    who_left,
)
from harness.formatting import figure_of, quantity
from harness.gate.judge import Check, Judgement
from harness.gate.judge import Verdict as GateVerdict
from harness.gate.reports import gravest_first
from harness.records import Metric

MOST_STEPS: Final = (("p50", 2.0), ("p99", 5.0))  # the step in progress, and little more
MOST_TOKENS_AFTER: Final = 2.0  # the step in flight makes one


class Mark(StrEnum):
    """What is said of one thing."""

    GOOD = "good"
    BAD = "not good"
    UNKNOWN = "not judged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`word` names it, `mark` colours it; each of `lines` is a mark and what is so marked."""

    mark: Mark
    word: str
    basis: str
    lines: tuple[tuple[str, str], ...]


Point = tuple[Mark, str]

_MARK_OF: Final = {
    GateVerdict.PASS: Mark.GOOD,
    GateVerdict.FAIL: Mark.BAD,
    GateVerdict.CANNOT_DECIDE: Mark.UNKNOWN,
}


def of_limits(judgement: Judgement) -> Verdict:
    """The gate's verdict: what fails and what cannot be decided one by one, the rest counted."""
    checks = gravest_first(judgement.checks)
    told = [one for one in checks if one.verdict is not GateVerdict.PASS]
    lines = [(str(one.verdict), _check_words(one)) for one in told]
    if kept := len(checks) - len(told):
        lines.append((str(GateVerdict.PASS), f"{kept} of {len(checks)} checks"))
    return Verdict(
        mark=_MARK_OF[judgement.verdict],
        word=str(judgement.verdict),
        basis="by the workload's own limits, one by one below",
        lines=tuple(lines),
    )


def _check_words(one: Check) -> str:
    measured = f"{one.measured}, " if one.measured else ""
    return f"{one.name}: {measured}{one.reason}"


def without_limits(
    outcomes: Mapping[str, int],
    metrics: Metrics,
    *,
    status: str = "complete",
    invalid: Sequence[str] = (),
    unsure: int = 0,
    is_wedged: bool = False,
) -> Verdict:
    """What is good and what is not, where the workload says no limits.

    `unsure`: of how many more who left it is not known whether they are ghosts.
    """
    if why := list(_why_none(outcomes, status, invalid)):
        line = (str(Mark.UNKNOWN), "; ".join(why))
        return Verdict(mark=Mark.UNKNOWN, word="no verdict", basis=_BASIS, lines=(line,))
    points = [*_failures(outcomes), *_points(metrics, unsure, is_wedged=is_wedged)]
    marks = {mark for mark, _ in points}
    if Mark.BAD in marks:
        mark, word = Mark.BAD, "not good"
    elif Mark.GOOD in marks:
        mark, word = Mark.GOOD, "good, as far as it shows" if Mark.UNKNOWN in marks else "good"
    else:
        mark, word = Mark.UNKNOWN, "no verdict"
    return Verdict(mark=mark, word=word, basis=_BASIS, lines=_by_mark(points))


_BASIS: Final = "the workload has no limits; held to what a good server shows under any load"


def _why_none(outcomes: Mapping[str, int], status: str, invalid: Sequence[str]) -> Iterator[str]:
    if invalid:
        yield "the figures of this run mean nothing; why stands above"
    if status != "complete":
        yield f"the run did not come to its end: {status.replace('_', ' ')}"
    if not outcomes.get("abandoned"):
        yield "nobody left early"


def _by_mark(points: Sequence[Point]) -> tuple[tuple[str, str], ...]:
    said = {mark: [text for one, text in points if one is mark] for mark in (Mark.BAD, *Mark)}
    return tuple((str(mark), "; ".join(texts)) for mark, texts in said.items() if texts)


def _failures(outcomes: Mapping[str, int]) -> Iterator[Point]:
    if failed := outcomes.get("failed"):
        yield Mark.BAD, f"{failed:,} of {sum(outcomes.values()):,} requests failed"


def _points(metrics: Metrics, unsure: int, *, is_wedged: bool) -> Iterator[Point]:
    if is_wedged:
        yield Mark.BAD, "it calls itself healthy and answers nobody"
    yield _ghosts(metrics.get("ghost_rate"), unsure)
    yield _leaks(metrics)
    yield _latency(metrics)
    yield from _tokens_after(metrics.get("wasted_after_close_tokens"))
    yield from _recovery(metrics)
    yield from _canaries(metrics.get("canary_mismatch_rate"))


def _ghosts(ghosts: Metric | None, unsure: int) -> Point:
    if ghosts is None or ghosts.mean is None or not ghosts.n:
        return Mark.UNKNOWN, "whether all were stopped"
    count = ghost_count(ghosts)
    if count:
        least = "at least " if ghosts.bound == "lower" else ""
        return Mark.BAD, f"{least}{count:,} of {ghosts.n:,} {who_left(ghosts)} went on"
    if ghosts.bound == "lower":
        return Mark.UNKNOWN, "whether all were stopped: who went on and ended is not seen"
    return Mark.UNKNOWN if unsure else Mark.GOOD, stopped_words(ghosts, unsure)


def _leaks(metrics: Metrics) -> Point:
    known = known_leaks(metrics)
    missing = {name: value for name, value in known.items() if value > 0}
    if missing:
        return Mark.BAD, f"missing afterwards: {amounts(missing)}"
    if not known:
        return Mark.UNKNOWN, "whether anything leaked"
    return Mark.GOOD, f"no {' and no '.join(name.removesuffix('s') for name in known)} is missing"


def _latency(metrics: Metrics) -> Point:
    """In steps, so that a slow machine and a fast one are judged alike."""
    steps, seconds = metrics.get("cancel_latency_steps"), metrics.get("cancel_latency_s")
    if steps is None or not steps.n:
        known = seconds is not None and seconds.n
        return (
            Mark.UNKNOWN,
            f"cancel latency{' (how long a step is, is not known)' if known else ''}",
        )
    shown = f"{figure_of(steps, 'p50')} in the median, {figure_of(steps, 'p99', unit='')} at p99"
    values = [(getattr(steps, key), most) for key, most in MOST_STEPS]
    is_good = all(value is not None and value <= most for value, most in values)
    return Mark.GOOD if is_good else Mark.BAD, f"let go after {shown}"


def _tokens_after(after: Metric | None) -> Iterator[Point]:
    if after is None or after.mean is None:
        return
    is_good = after.mean <= MOST_TOKENS_AFTER
    if is_good and after.bound == "lower":
        return
    mean = quantity(after.mean, "tokens")
    yield Mark.GOOD if is_good else Mark.BAD, f"{mean} generated after each leaving"


def _recovery(metrics: Metrics) -> Iterator[Point]:
    """Nearer to an idle server's first token than to that of a queue from which nobody leaves?"""
    names = ("slot_recovery_s", "probe_ttft_unloaded_s", "probe_ttft_control_s")
    medians = [metrics[name].p50 for name in names if name in metrics]
    if len(medians) < len(names):
        return
    recovery, unloaded, control = medians
    if unloaded is None or control is None:
        return
    is_good = recovery is not None and recovery - unloaded < control - recovery
    shown = figure_of(metrics["slot_recovery_s"], "p50")
    yield Mark.GOOD if is_good else Mark.BAD, f"the slot worked for the next after {shown}"


def _canaries(mismatch: Metric | None) -> Iterator[Point]:
    if mismatch is None or mismatch.mean is None or not mismatch.n:
        return
    if mismatch.mean > 0:
        yield Mark.BAD, f"{quantity(mismatch.mean, 'ratio')} of the others' answers changed"
    else:
        yield Mark.GOOD, "no bystander's answer changed"
