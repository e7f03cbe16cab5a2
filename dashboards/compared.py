"""What the page of a comparison says in words and tables: who is better at what, and how surely."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dashboards.contenders import Contender, Contest, Match
from dashboards.tables import PlainTable
from harness.analysis.compare import Pair, Standing, standing
from harness.export.comparison import Comparison, cells, not_compared, steps_differ, times
from harness.formatting import DASH, between, bounded, quantity, shift_in_words
from harness.metrics import METRICS, headline_figures, spoken
from harness.records import Metric, Remark

MOST_NAMED: Final = 4  # figures in a sentence; the others are counted
BOTH_WAYS: Final = (
    "Their steps differ, so a time is called better or worse only where it is so both as measured "
    "and in steps."
)
DETAILS: Final = (
    *("figure", "difference", "95 %", "times", "95 % of times"),
    *("in steps", "95 % in steps", "judged"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One candidate against the baseline, for the first screen.

    `not_compared` has by reason the figures of which nothing is said.
    """

    label: str
    sentence: str
    cautions: Sequence[Remark]
    remarks: Sequence[Remark]
    not_compared: Mapping[str, Sequence[str]]
    shifts: Sequence[str]


def answers(match: Match) -> list[Answer]:
    """One for each candidate."""
    return [_answer(match, candidate, comparison) for candidate, comparison in match.candidates]


def _answer(match: Match, candidate: Contender, comparison: Comparison) -> Answer:
    label, baseline = candidate.label, match.baseline.label
    said = (
        shift_in_words(metric, label, baseline, shift, "s")
        for metric, shift in comparison.shifts.items()
    )
    return Answer(
        label=label if not match.arm else f"{label}, arm {match.arm}",
        sentence=sentence(comparison, baseline),
        cautions=[one for one in comparison.remarks if one.level != "info"],
        remarks=[one for one in comparison.remarks if one.level == "info"],
        not_compared=not_compared(comparison.pairs),
        shifts=[words for words in said if words is not None],
    )


def sentence(comparison: Comparison, baseline: str) -> str:
    """Who is better at what; nothing of the kind where a run is invalid."""
    if any(one.level == "invalid" for one in comparison.remarks):
        return "One of the runs is invalid, so its figures say nothing about the server."
    by_standing: dict[Standing, list[Pair]] = {}
    for pair in comparison.pairs:
        if METRICS[pair.metric].part_of is None:
            by_standing.setdefault(standing(pair), []).append(pair)
    sure = [
        f"surely {which} at {_named(by_standing[which])}"
        for which in (Standing.WORSE, Standing.BETTER)
        if which in by_standing
    ]
    counts = {which: len(by_standing.get(which, ())) for which in Standing}
    num_judged = sum(counts[of] for of in (Standing.WORSE, Standing.BETTER, Standing.UNSURE))
    if not num_judged:
        return f"No figure can be compared with {baseline}."
    judged = f" {BOTH_WAYS}" if steps_differ(comparison) else ""
    if not sure:
        return f"Against {baseline}: no sure difference in any of {num_judged} figures.{judged}"
    rest = f"no sure difference in {counts[Standing.UNSURE]} of {num_judged} figures"
    return f"Against {baseline}: {'; '.join([*sure, rest])}.{judged}"


def _named(pairs: Sequence[Pair]) -> str:
    """The first figure of each of a few metrics, with how far apart."""
    first = list({pair.metric: pair for pair in reversed(pairs)}.values())[::-1]
    shown = [f"{spoken(pair.metric, pair.figure)} ({_apart(pair)})" for pair in first[:MOST_NAMED]]
    more = len(first) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _apart(pair: Pair) -> str:
    if pair.ratio is None:
        return f"{quantity(pair.baseline, pair.unit)} to {quantity(pair.candidate, pair.unit)}"
    in_steps = "" if pair.ratio_in_steps is None else f", in steps {times(pair.ratio_in_steps)}"
    return f"{times(pair.ratio)}{in_steps}"


def side_by_side(match: Match) -> PlainTable:
    """Each headline figure of every run; a time also in steps of the engine."""
    metrics = {one.label: one.metrics for one in match.contenders}
    return PlainTable(
        title="Side by side",
        shows="Each figure of each run; a time with, behind it, how many steps of its engine that "
        "is.",
        columns=("figure", *metrics),
        rows=tuple(
            (
                name if key == "mean" else f"{name} {key}",
                *(_value(of, name, key) for of in metrics.values()),
            )
            for name, key in headline_figures(metrics)
        ),
    )


def _value(metrics: Mapping[str, Metric], name: str, key: str) -> str:
    if name not in metrics:
        return DASH
    metric, step = metrics[name], metrics.get("step_s")
    text, value = bounded(metric, key), getattr(metric, key)
    if metric.unit != "s" or value is None or step is None or not step.p50:
        return text
    return f"{text} = {quantity(value / step.p50, 'steps')}"


def details(candidate: Contender, comparison: Comparison) -> PlainTable:
    """Every difference and every ratio with its interval, and how it is judged."""
    return PlainTable(
        title=f"{candidate.label} against the baseline, figure by figure",
        shows="Difference is candidate less baseline, times is candidate by baseline, in steps the "
        "same of what each is in steps of its own engine. A time is surely better or worse where "
        "it is so by both. One in twenty of true equals is called a sure difference all the same.",
        columns=DETAILS,
        rows=tuple(_detail(comparison, pair) for pair in comparison.pairs),
    )


def _detail(comparison: Comparison, pair: Pair) -> tuple[str, ...]:
    of = cells(comparison, pair)
    stands = standing(pair)
    return (
        *(of[name] for name in ("figure", "difference", "95 %", "times")),
        between(pair.ratio_ci95, "") or DASH,
        of["in steps"],
        between(pair.ratio_in_steps_ci95, "") or DASH,
        f"{stands}: {pair.note}" if stands is Standing.NOT_COMPARED else str(stands),
    )


def runs_table(contest: Contest) -> PlainTable:
    """What was run on what: a row a fact, a column a run."""
    runs = {match.baseline.label: match.baseline for match in contest.matches[:1]}
    for match in contest.matches:
        runs |= {candidate.label: candidate for candidate, _ in match.candidates}
    facts = {label: dict(_facts(one)) for label, one in runs.items()}
    names = dict.fromkeys(name for of in facts.values() for name in of)
    return PlainTable(
        title="What was run on what",
        shows="As each run's manifest says; the baseline first.",
        columns=("", *runs),
        rows=tuple((name, *(of.get(name, DASH) for of in facts.values())) for name in names),
    )


def _facts(one: Contender) -> Iterator[tuple[str, str]]:
    manifest, summary = one.run.manifest, one.run.summary
    hardware = manifest.hardware
    step = one.metrics.get("step_s")
    yield "run", str(summary.get("run_id"))
    yield "written", manifest.created_at
    yield "status", str(summary.get("status")).replace("_", " ")
    yield "server", str(summary.get("engine"))
    yield "model", str(summary.get("model"))
    if manifest.target is not None:
        yield "server's version", manifest.target.version or DASH
        config = manifest.target.config or {}
        yield "slots", str(config.get("max_num_seqs") or manifest.target.slots_found or DASH)
    yield "a step", DASH if step is None else quantity(step.p50, "s")
    yield "machine", f"{hardware.get('cpu')}, {hardware.get('cores')} cores"
    yield "tokens by", str(summary.get("token_counting") or DASH)
    yield "walkaway", manifest.versions.get("walkaway", DASH)
    yield "seed", str(manifest.seed)
