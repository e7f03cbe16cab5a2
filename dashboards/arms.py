"""What the page says of several arms: the answer first, then all figures, then round by round."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from dashboards import arm_figures, frontier
from dashboards.ladders import CLIENT_TIMES, ladders
from dashboards.section import Picture, Section
from dashboards.server import server_in_words
from dashboards.source import ArmsRun, ArmsSummary
from dashboards.tables import Cell, Row, SideBySide, metric_rows
from harness.analysis.compare import FEWEST_ROUNDS, is_certain
from harness.formatting import bounded, difference_in_words, figure_of, number, quantity
from harness.metrics import headline_figures, spoken
from harness.records import Difference

MOST_PICTURES: Final = 6
REFERENCE: Final = "the reference"


def sentence(run: ArmsRun) -> str:
    """What the question's own figures say; without any, how many figures differ for certain."""
    summary = run.summary
    if not any(sum(arm.outcomes.values()) for arm in summary.arms.values()):
        return "No request was made, so there is nothing to tell."
    if frontier.is_asked(run.manifest.workload) and (said := frontier.sentence(run)):
        return said
    if answers := _asked_words(summary):
        rounds = quantity(summary.rounds, "rounds")
        return f"Against {summary.reference}, in {rounds}: {'; '.join(answers)}."
    certain = sum(is_certain(one) for _, _, one in _compared(summary))
    return (
        f"{len(summary.arms)} arms in {quantity(summary.rounds, 'rounds')}: {certain} of their "
        f"headline figures differ for certain from those of {summary.reference}."
    )


def _asked_words(summary: ArmsSummary) -> list[str]:
    """For each other arm, how the question's own figures differ."""
    found: dict[str, list[str]] = {}
    for name, key, one in _compared(summary):
        if name in summary.headlines and one.n:
            found.setdefault(one.arm, []).append(f"{spoken(name, key)} {_change(one)}")
    return [f"{arm} has {', '.join(words)}" for arm, words in found.items()]


def _change(one: Difference) -> str:
    """ "0.4 times (0.3 to 0.5)": the ratio, or where there is none, the difference."""
    is_ratio = one.ratio is not None
    value, limits = (
        (one.ratio, one.ratio_ci95) if is_ratio else (one.difference, one.difference_ci95)
    )
    assert value is not None
    if limits == ((1.0, 1.0) if is_ratio else (0.0, 0.0)):
        return "the same in every round"
    shown = f"{number(value)} times" if is_ratio else f"{value:+.3g}"
    if limits is None:  # the remarks say once how many rounds it takes
        return shown if one.n < FEWEST_ROUNDS else f"{shown}, {one.note}"
    return f"{shown} ({number(limits[0])} to {number(limits[1])})"


def _pairs(summary: ArmsSummary) -> list[tuple[str, str]]:
    return headline_figures(summary.metrics, summary.headlines)


def _compared(summary: ArmsSummary) -> list[tuple[str, str, Difference]]:
    return [
        (name, key, one)
        for name, key in _pairs(summary)
        for one in summary.differences.get(name, {}).get(key, [])
    ]


def facts(run: ArmsRun) -> list[tuple[str, str]]:
    """What was run on what."""
    summary, interval = run.summary, run.manifest.scrape_interval_s
    seed = run.manifest.seed
    counts = {name: sum(arm.outcomes.values()) for name, arm in summary.arms.items()}
    shown = [f"{count:,} of {name}" for name, count in counts.items()]
    return [
        ("workload", summary.workload),
        ("server", server_in_words(summary.engine or "not known", _common_config(run))),
        ("model", summary.model or "not known"),
        ("arms", "; ".join(_arm_words(arm) for arm in run.manifest.workload["arms"])),
        ("rounds", f"{summary.rounds}, {_seeds(seed + 1, seed + summary.rounds)}"),
        ("requests", f"{sum(counts.values()):,}: {', '.join(shown)}"),
        ("scraped", "never" if interval is None else f"every {number(interval * 1e3)} ms"),
    ]


def _seeds(first: int, last: int) -> str:
    return f"seed {first}" if first == last else f"seeds {first} to {last}"


def _common_config(run: ArmsRun) -> Mapping[str, Any]:
    """What the servers of all rounds tell alike of their configuration."""
    targets = [one.manifest.target for one in run.rounds]
    first, *others = [(target and target.config) or {} for target in targets] or [{}]
    return {
        key: value
        for key, value in first.items()
        if all(config.get(key) == value for config in others)
    }


def _arm_words(arm: Mapping[str, Any]) -> str:
    changes = [
        f"{section}.{key} = {', '.join(map(str, value)) if isinstance(value, list) else value}"
        for section in ("target", "engine", "load", "arrivals", "collect")
        for key, value in (arm.get(section) or {}).items()
        if value not in (None, [])
    ]
    return f"{arm['name']}: {', '.join(changes) or 'as the workload says'}"


def not_measurable(run: ArmsRun) -> dict[str, str]:
    """Figures that no arm has."""
    reasons: dict[str, str] = {}
    for arm in run.summary.arms.values():
        reasons |= arm.not_measurable
    known = {name for arm in run.summary.arms.values() for name in arm.metrics}
    return {name: reason for name, reason in reasons.items() if name not in known}


def side_by_side(run: ArmsRun) -> list[SideBySide]:
    """The headline figures of each arm, and under them how it differs from the reference: first
    those that the question asks for."""
    summary, pairs = run.summary, _pairs(run.summary)
    asked = [pair for pair in pairs if pair[0] in summary.headlines]
    others = [pair for pair in pairs if pair not in asked]
    tables = (("The arms side by side", asked), ("More figures side by side", others))
    return [_table(summary, title, those) for title, those in tables if those]


def _table(summary: ArmsSummary, title: str, pairs: Sequence[tuple[str, str]]) -> SideBySide:
    rows = [
        (
            f"{spoken(name, key)}{_whose(summary, name)}",
            tuple(_cell(summary, name, key, arm) for arm in summary.arms),
        )
        for name, key in pairs
    ]
    return SideBySide(title=title, arms=tuple(summary.arms), rows=tuple(rows))


def _whose(summary: ArmsSummary, name: str) -> str:
    """Whose the figure is, where the users of a run are of several kinds."""
    found = [metrics[name].of for metrics in summary.metrics.values() if name in metrics]
    return f" ({found[0]})" if found and found[0] is not None else ""


def _cell(summary: ArmsSummary, name: str, key: str, arm: str) -> Cell:
    metric = summary.arms[arm].metrics.get(name)
    if metric is None:
        return Cell(text="not measurable")
    text = bounded(metric, key)
    if arm == summary.reference:
        return Cell(text=text, under=REFERENCE)
    one = summary.difference(name, key, arm)
    if one is None or one.difference is None:
        return Cell(text=text, under=None if one is None or one.n else one.note)
    return Cell(text=text, under=_change(one))


def sections(run: ArmsRun) -> list[Section]:
    """The frontier where that is the question; then the figures that differ, round by round."""
    asked = frontier.sections(run) if frontier.is_asked(run.manifest.workload) else []
    return [*asked, _rounds(run), _survivors(run), _requests(run)]


def _survivors(run: ArmsRun) -> Section:
    section = Section(
        name="survivors",
        title="What the others felt, arm by arm",
        shows="Times of users who were to stay to the end, of all rounds together: median (dot), "
        "p90 (diamond), p99 (bar).",
        good="arms alike: what cancellation costs those who stay is the difference.",
    )
    metrics = run.summary.metrics
    pictures = [
        Picture(
            name=f"survivors-{name}",
            figure=ladders([(arm, of[name]) for arm, of in metrics.items() if name in of]),
            note=label,
            alt=f"{label}, a ladder of quantiles for each arm. Medians: "
            + "; ".join(
                f"{arm}: {figure_of(of[name], 'p50')}" for arm, of in metrics.items() if name in of
            ),
        )
        for name, label in CLIENT_TIMES
        if any(name in of and of[name].n for of in metrics.values())
    ]
    if not pictures:
        return section.without("Nobody stayed to the end in any arm.")
    return section.drawn(*pictures)


def _requests(run: ArmsRun) -> Section:
    section = Section(name="requests", title="Single requests", shows="", good="")
    first = next(iter(run.summary.arms))
    return section.without(
        "Each round of each arm is a run of its own, with a report that goes down to single "
        f"requests: walkaway report RUN/rounds/1-{first}, where RUN is this run's folder."
    )


def _rounds(run: ArmsRun) -> Section:
    summary = run.summary
    section = Section(
        name="rounds",
        title="Round by round",
        shows="A dot for each round; the bar is the mean of the rounds with its 95 % interval "
        "(Student's t, from three rounds on).",
        good="dots of an arm that lie close together, and arms that do not overlap.",
    )
    chosen = _worth_drawing(summary)
    if not chosen:
        return section.without("No headline figure has a value in any round.")
    pictures = [
        Picture(
            name=f"rounds-{name}-{key}",
            figure=arm_figures.per_round(
                {
                    arm: one.per_round.get(name, {}).get(key, [])
                    for arm, one in summary.arms.items()
                },
                unit=_unit(summary, name),
            ),
            note=f"{name}, {key}",
            alt=f"{name} {key} of each arm, one dot a round. "
            + "; ".join(
                difference_in_words(one) for one in summary.differences.get(name, {}).get(key, [])
            ),
        )
        for name, key in chosen
    ]
    return section.drawn(*pictures)


def _worth_drawing(summary: ArmsSummary) -> list[tuple[str, str]]:
    """The question's own figures, then those that differ for certain."""
    certain = {(name, key) for name, key, one in _compared(summary) if is_certain(one)}
    drawable = [(name, key) for name, key in _pairs(summary) if _has_rounds(summary, name, key)]
    asked = [pair for pair in drawable if pair[0] in summary.headlines]
    others = [pair for pair in drawable if pair in certain and pair not in asked]
    return [*asked, *others][:MOST_PICTURES] or drawable[:1]


def _has_rounds(summary: ArmsSummary, name: str, key: str) -> bool:
    return any(key in arm.per_round.get(name, {}) for arm in summary.arms.values())


def _unit(summary: ArmsSummary, name: str) -> str:
    return next(arm.metrics[name].unit for arm in summary.arms.values() if name in arm.metrics)


def metric_rows_of(run: ArmsRun) -> Sequence[Row]:
    """Every figure of every arm, arm after arm."""
    return [
        row
        for name, arm in run.summary.arms.items()
        for row in metric_rows(arm.metrics, arm.flags, of=name)
    ]
