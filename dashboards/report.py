"""From run folders to one HTML file: read, put into words, draw, write."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dashboards import headline
from dashboards.headline import Card
from dashboards.page import document, save
from dashboards.request_sample import Sample, request_rows
from dashboards.sections import arms, cancel, load
from dashboards.sections.section import Cell, Section, Table
from dashboards.sections.stages import stages
from dashboards.sections.tables import (
    SIDE_BY_SIDE,
    account_tables,
    every_figure,
    limits_table,
    metric_rows,
    value_tables,
)
from dashboards.sections.waste import waste
from dashboards.source import ArmsRun, Run, read_run, server_in_words
from dashboards.verdict import Trust, Verdict, trust, trust_of_arms, verdict_of
from harness.analysis.compare import FEWEST_ROUNDS, is_certain
from harness.export.tables import client_facts
from harness.formatting import bounded, number, quantity
from harness.metrics import headline_figures, spoken
from harness.records import ArmsSummary, Difference, Remark
from harness.store.manifest import Manifest

REFERENCE: Final = "the reference"
COUNTED_BY: Final = {
    "usage": "the server's own count in each event",
    "events": "text events, one taken for one token",
    "events_calibrated": "text events, calibrated on the usage of completed streams",
    "mixed": "the server's count in some requests, text events in others",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """The parts of an article that differ between one run and several arms. `listing`: the sample
    of single requests, and their data (`request_rows`).
    """

    sentence: str
    facts: Sequence[tuple[str, str]]
    trust: Sequence[Trust]
    not_measurable: Mapping[str, str]
    cards: Sequence[Card] = ()
    side_by_side: Sequence[Table] = ()
    accounts: Sequence[Table]
    sections: Sequence[Section]
    listing: tuple[Sample, Mapping[str, Any]] | None = None
    rows: Sequence[tuple[str | Cell, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Article:
    """The content for one run, as text.

    `remarks` by level: with an `invalid` one the figures mean nothing, so it stands before them and
    replaces the sentence. The first screen, which needs its room for the figures, only counts each
    `warning`; it stands with each `info` below.
    """

    anchor: str
    run_id: str
    question: str
    status: str
    verdict: Verdict | None
    remarks: Mapping[str, Sequence[Remark]]
    body: Body
    not_measurable: Sequence[tuple[str, Sequence[str]]]
    tables: Sequence[Table]
    every_figure: Table
    command: str
    machine: Sequence[tuple[str, str]]


def write_report(folders: Sequence[Path], output: Path) -> None:
    """Raises `ConfigError` for a run that cannot be read or a page that cannot be written."""
    articles = [describe(read_run(path), f"run{i}") for i, path in enumerate(folders)]
    listings = {one.anchor: one.body.listing for one in articles if one.body.listing is not None}
    html = document(
        "report.html.j2",
        {article.anchor: article.body.sections for article in articles},
        requests={anchor: data for anchor, (_, data) in listings.items()},
        articles=articles,
    )
    save(html, output)


def describe(run: Run | ArmsRun, anchor: str) -> Article:
    body = _body_of_arms(run) if isinstance(run, ArmsRun) else _body_of_run(run)
    summary, manifest, verdict = run.summary, run.manifest, verdict_of(run)
    limits = [] if verdict is None else [limits_table(verdict)]
    return Article(
        anchor=anchor,
        run_id=summary.run_id,
        question=str(manifest.workload.get("question") or summary.workload),
        status=summary.status,
        verdict=verdict,
        remarks={
            level: [one for one in summary.validity if one.level == level]
            for level in ("invalid", "warning", "info")
        },
        body=body,
        not_measurable=_by_reason(body.not_measurable),
        tables=[*limits, *body.accounts],
        every_figure=every_figure(body.rows),
        command=manifest.repeat or shlex.join(manifest.command),
        machine=_machine(manifest),
    )


def _by_reason(not_measurable: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    names: dict[str, list[str]] = {}
    for name, reason in not_measurable.items():
        names.setdefault(reason, []).append(name)
    return list(names.items())


def _machine(manifest: Manifest) -> list[tuple[str, str]]:
    shown: list[tuple[str, str]] = [("written", manifest.created_at)]
    for key, value in manifest.hardware.items():
        if key == "memory_bytes":
            shown.append(("memory", quantity(float(value), "bytes")))
        elif isinstance(value, list):
            shown.append((key, ", ".join(map(str, value)) or "none"))
        else:
            shown.append((key, str(value)))
    return [*shown, *manifest.versions.items()]


def _body_of_run(run: Run) -> Body:
    summary = run.summary
    in_use = summary.breakdown.get("leaks_in_use", {})
    lost = summary.breakdown.get("leaks_lost", ("slots", "blocks"))
    unsure = _unsure(run)
    cards = headline.cards(summary.metrics, summary.flags, in_use, unsure)
    is_sound = summary.status == "complete" and all(
        one.level != "invalid" for one in summary.validity
    )
    return Body(
        sentence=headline.sentence(summary.outcomes, summary.metrics, in_use, lost, unsure),
        cards=cards if is_sound else headline.without_praise(cards),
        facts=_facts(run),
        trust=trust(run),
        not_measurable=summary.not_measurable,
        accounts=account_tables(summary.agreement, summary.audit.counters if summary.audit else []),
        sections=_sections(run),
        listing=None if run.frames.requests.empty else request_rows(run),
        rows=metric_rows(summary.metrics, summary.flags),
    )


def _unsure(run: Run) -> int:
    """How many abandoned requests may be ghosts or not, where the lifecycle log decides others."""
    ghosts = run.metrics.get("ghost_rate")
    if ghosts is None or ghosts.method != "exact":
        return 0
    is_over = run.cancels["phase"] == "ended"
    return int((run.cancels["ghost"].isna() & ~is_over).sum())


def _sections(run: Run) -> list[Section]:
    builders = (
        *(cancel.recovery, stages, cancel.latency, cancel.ways, waste),
        *(load.slots, load.kv, load.hardware, load.survivors, load.lag),
    )
    has_probes = (cancel.probe_requests(run)["role"] == "probe").any()
    return [build(run) for build in builders[0 if has_probes else 1 :]]


def _facts(run: Run) -> list[tuple[str, str]]:
    summary, manifest, target = run.summary, run.manifest, run.manifest.target
    interval = manifest.scrape_interval_s
    facts = [
        ("workload", str(summary.workload)),
        ("server", server_in_words(str(summary.engine), (target and target.config) or {})),
        ("model", summary.model or "not known"),
        ("at", target.url if target else "never reached"),
        ("requests", _outcomes(summary.outcomes)),
        ("load", f"{quantity(run.clock.length_s, 's')}, seed {manifest.seed}"),
        ("settle time", quantity(manifest.settle_s, "s")),
        ("scraped", "never" if interval is None else f"every {quantity(interval, 's')}"),
    ]
    if summary.token_counting:
        counted = COUNTED_BY.get(summary.token_counting, summary.token_counting)
        facts.append(("tokens counted by", counted))
    if (probing := manifest.probing) is not None:
        why = "wedged" if summary.wedged else ", ".join(probing.errors)
        answer = f"no: {why}" if probing.errors else "yes"
        facts.append(("still serving after the run", answer))
    if known := client_facts(summary.audit.client if summary.audit else {}):
        counts = ", ".join(f"{name} {value}" for name, value in known)
        facts.append(("client-side counts", counts))
    return facts


def _outcomes(outcomes: Mapping[str, int]) -> str:
    counts = [f"{n:,} {name.replace('_', ' ')}" for name, n in outcomes.items() if n]
    return f"{sum(outcomes.values()):,}" + (f": {', '.join(counts)}" if counts else "")


def _body_of_arms(run: ArmsRun) -> Body:
    summary = run.summary
    return Body(
        sentence=_arms_sentence(run),
        facts=_arms_facts(run),
        trust=trust_of_arms(run),
        not_measurable=_in_no_arm(summary),
        side_by_side=_side_by_side(summary),
        accounts=[] if summary.value is None else value_tables(summary.value),
        sections=arms.sections(run),
        rows=[
            row
            for name, arm in summary.arms.items()
            for row in metric_rows(arm.metrics, arm.flags, of=name)
        ],
    )


def _arms_sentence(run: ArmsRun) -> str:
    """The question's own figures; without any, the number of figures that surely differ."""
    summary = run.summary
    if not any(sum(arm.outcomes.values()) for arm in summary.arms.values()):
        return "No request was made, so there is nothing to report."
    if arms.is_frontier(run.manifest.workload) and (said := arms.frontier_sentence(run)):
        return said
    rounds, compared = quantity(summary.rounds, "rounds"), arms.compared(summary)
    by_arm: dict[str, list[str]] = {}
    for name, key, one in compared:
        if name in summary.headlines and one.n:
            by_arm.setdefault(one.arm, []).append(f"{spoken(name, key)} {_change(one)}")
    if by_arm:
        answers = "; ".join(f"{arm} has {', '.join(said)}" for arm, said in by_arm.items())
        return f"Against {summary.reference}, in {rounds}: {answers}."
    certain = sum(is_certain(one) for _, _, one in compared)
    return (
        f"{len(summary.arms)} arms in {rounds}: {certain} of their headline figures surely "
        f"differ from those of {summary.reference}."
    )


def _change(one: Difference) -> str:
    is_ratio = one.ratio is not None
    value, limits = (
        (one.ratio, one.ratio_ci95) if is_ratio else (one.difference, one.difference_ci95)
    )
    assert value is not None
    if limits == ((1.0, 1.0) if is_ratio else (0.0, 0.0)):
        return "unchanged in every round"
    shown = f"{number(value)} times" if is_ratio else f"{value:+.3g}"
    if limits is None:  # the remarks say once how many rounds it takes
        return shown if one.n < FEWEST_ROUNDS else f"{shown}, {one.note}"
    return f"{shown} ({number(limits[0])} to {number(limits[1])})"


def _arms_facts(run: ArmsRun) -> list[tuple[str, str]]:
    summary, interval, seed = run.summary, run.manifest.scrape_interval_s, run.manifest.seed
    counts = {name: sum(arm.outcomes.values()) for name, arm in summary.arms.items()}
    shown = [f"{count:,} of {name}" for name, count in counts.items()]
    last = seed + summary.rounds
    seeds = f"seed {last}" if summary.rounds == 1 else f"seeds {seed + 1} to {last}"
    return [
        ("workload", str(summary.workload)),
        ("server", server_in_words(summary.engine or "not known", _common_config(run))),
        ("model", summary.model or "not known"),
        ("arms", "; ".join(_arm_settings(arm) for arm in run.manifest.workload["arms"])),
        ("rounds", f"{summary.rounds}, {seeds}"),
        ("requests", f"{sum(counts.values()):,}: {', '.join(shown)}"),
        ("scraped", "never" if interval is None else f"every {number(interval * 1e3)} ms"),
    ]


def _common_config(run: ArmsRun) -> Mapping[str, Any]:
    targets = [one.manifest.target for one in run.rounds.values()]
    first, *others = [(target and target.config) or {} for target in targets] or [{}]
    return {
        key: value
        for key, value in first.items()
        if all(config.get(key) == value for config in others)
    }


def _arm_settings(arm: Mapping[str, Any]) -> str:
    changes = [
        f"{section}.{key} = {', '.join(map(str, value)) if isinstance(value, list) else value}"
        for section in ("target", "engine", "load", "arrivals", "collect")
        for key, value in (arm.get(section) or {}).items()
        if value not in (None, [])
    ]
    return f"{arm['name']}: {', '.join(changes) or 'as the workload says'}"


def _in_no_arm(summary: ArmsSummary) -> dict[str, str]:
    reasons: dict[str, str] = {}
    for arm in summary.arms.values():
        reasons |= arm.not_measurable
    known = {name for arm in summary.arms.values() for name in arm.metrics}
    return {name: reason for name, reason in reasons.items() if name not in known}


def _side_by_side(summary: ArmsSummary) -> list[Table]:
    """The headline figures of each arm, and under them the difference from the reference; the
    figures that answer the question come first.
    """
    pairs = headline_figures(summary.metrics, summary.headlines)
    asked = [pair for pair in pairs if pair[0] in summary.headlines]
    others = [pair for pair in pairs if pair not in asked]
    tables = (("The arms side by side", asked), ("More figures side by side", others))
    return [
        Table(
            title=title,
            shows=SIDE_BY_SIDE,
            columns=("figure", *summary.arms),
            rows=tuple(_arms_row(summary, name, key) for name, key in those),
        )
        for title, those in tables
        if those
    ]


def _arms_row(summary: ArmsSummary, name: str, key: str) -> tuple[str | Cell, ...]:
    found = [metrics[name].of for metrics in summary.metrics.values() if name in metrics]
    of = f" ({found[0]})" if found and found[0] is not None else ""
    return (f"{spoken(name, key)}{of}", *(_cell(summary, name, key, arm) for arm in summary.arms))


def _cell(summary: ArmsSummary, name: str, key: str, arm: str) -> Cell:
    metric = summary.arms[arm].metrics.get(name)
    if metric is None:
        return Cell(text="not measurable")
    text = bounded(metric, key)
    if arm == summary.reference:
        return Cell(text=text, under=(REFERENCE,))
    one = summary.difference(name, key, arm)
    if one is None:
        return Cell(text=text)
    under = _change(one) if one.difference is not None else None if one.n else one.note
    return Cell(text=text, under=() if under is None else (under,))
