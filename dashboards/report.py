"""From run folders to one HTML file: read, put into words, draw, write."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from dashboards import arms, cancel_sections, headline, load_sections, verdict
from dashboards.page import Article, Listing, render, save
from dashboards.request_rows import request_rows
from dashboards.section import Section
from dashboards.sentence import sentence
from dashboards.server import server_in_words
from dashboards.source import ArmsRun, Run, read_run
from dashboards.tables import PlainTable, account_tables, metric_rows
from dashboards.trust import trust, trust_of_arms
from dashboards.value_tables import value_tables
from dashboards.waste_section import waste
from harness.export.tables import client_facts
from harness.formatting import DASH, quantity
from harness.gate.judge import Judgement
from harness.gate.reports import gravest_first
from harness.records import Remark
from harness.store.manifest import Manifest

COUNTED_BY: Final = {
    "usage": "the server's own count in each event",
    "events": "text events, one taken for one token",
    "events_calibrated": "text events, calibrated on the usage of completed streams",
    "mixed": "the server's count in some requests, text events in others",
}


def write_report(folders: Sequence[Path], output: Path) -> None:
    """Write the report of these runs. Raises `ConfigError` for what cannot be read or written."""
    articles = [describe(read_run(folder), f"run{i}") for i, folder in enumerate(folders)]
    save(render(articles), output)


def describe(run: Run | ArmsRun, anchor: str) -> Article:
    """Everything that the page says about a run, or about several arms together."""
    return _describe_arms(run, anchor) if isinstance(run, ArmsRun) else _describe_run(run, anchor)


def _describe_arms(run: ArmsRun, anchor: str) -> Article:
    summary, manifest = run.summary, run.manifest
    cautions = _said(summary.validity, "invalid")
    return Article(
        anchor=anchor,
        run_id=summary.run_id,
        question=str(manifest.workload.get("question") or summary.workload),
        verdict=None if run.judgement is None else verdict.of_limits(run.judgement),
        sentence=None if cautions else arms.sentence(run),
        status=summary.status,
        cards=[],
        facts=arms.facts(run),
        trust=trust_of_arms(run),
        cautions=cautions,
        warnings=_said(summary.validity, "warning"),
        remarks=_said(summary.validity, "info"),
        not_measurable=_by_reason(arms.not_measurable(run)),
        side_by_side=arms.side_by_side(run),
        accounts=[
            *_limit_tables(run.judgement),
            *([] if summary.value is None else value_tables(summary.value)),
        ],
        sections=arms.sections(run),
        rows=arms.metric_rows_of(run),
        command=manifest.repeat or shlex.join(manifest.command),
        machine=_machine(manifest),
    )


def _describe_run(run: Run, anchor: str) -> Article:
    summary, manifest = run.summary, run.manifest
    cautions = _said(summary.validity, "invalid")
    in_use = summary.breakdown.get("leaks_in_use", {})
    lost = summary.breakdown.get("leaks_lost", ("slots", "blocks"))
    counters = summary.audit.counters if summary.audit else []
    chosen, data = request_rows(run)
    unsure = _unsure(run)
    found = sentence(summary.outcomes, summary.metrics, in_use, lost, unsure)
    cards = headline.cards(summary.metrics, summary.flags, in_use, unsure)
    is_sound = summary.status == "complete" and not cautions
    return Article(
        anchor=anchor,
        run_id=summary.run_id,
        question=str(manifest.workload.get("question") or summary.workload),
        verdict=_verdict(run),
        sentence=None if cautions else found,
        status=summary.status,
        cards=cards if is_sound else headline.without_praise(cards),
        facts=_facts(run),
        trust=trust(run),
        cautions=cautions,
        warnings=_said(summary.validity, "warning"),
        remarks=_said(summary.validity, "info"),
        not_measurable=_by_reason(summary.not_measurable),
        accounts=[*_limit_tables(run.judgement), *account_tables(summary.agreement, counters)],
        sections=_sections(run),
        listing=Listing(words=chosen.words, data=data) if chosen.total else None,
        rows=metric_rows(summary.metrics, summary.flags),
        command=manifest.repeat or shlex.join(manifest.command),
        machine=_machine(manifest),
    )


def _verdict(run: Run) -> verdict.Verdict:
    if run.judgement is not None:
        return verdict.of_limits(run.judgement)
    summary = run.summary
    invalid = [remark.text for remark in summary.validity if remark.level == "invalid"]
    return verdict.without_limits(
        summary.outcomes,
        summary.metrics,
        status=summary.status,
        invalid=invalid,
        unsure=_unsure(run),
        is_wedged=bool(summary.wedged),
    )


def _unsure(run: Run) -> int:
    """Of how many abandoned requests it is not known whether they are ghosts, though by the
    lifecycle log it is of others."""
    ghosts = run.metrics.get("ghost_rate")
    if ghosts is None or ghosts.method != "exact":
        return 0
    is_over = run.cancels["phase"] == "ended"
    return int((run.cancels["ghost"].isna() & ~is_over).sum())


def _sections(run: Run) -> list[Section]:
    """In reading order. Recovery is a question only of runs that sent probes."""
    probes = [cancel_sections.recovery] if (run.frames.requests["role"] == "probe").any() else []
    builders = (
        *probes,
        cancel_sections.stages,
        cancel_sections.latency,
        cancel_sections.ways,
        waste,
        load_sections.slots,
        load_sections.kv,
        load_sections.hardware,
        load_sections.survivors,
        load_sections.lag,
    )
    return [build(run) for build in builders]


def _limit_tables(judgement: Judgement | None) -> list[PlainTable]:
    """The gate's checks one by one, where the workload has limits."""
    if judgement is None:
        return []
    return [
        PlainTable(
            title="The limits, one by one",
            shows="What `walkaway gate` says of each limit of the workload. A limit that lies "
            "within what the true value can be is not decided, and that is no pass.",
            columns=("limit", "verdict", "measured", "why"),
            rows=tuple(
                (one.name, str(one.verdict), one.measured or DASH, one.reason)
                for one in gravest_first(judgement.checks)
            ),
        )
    ]


def _said(validity: Sequence[Remark], level: str) -> list[tuple[str, str]]:
    """The remarks of one level, each with its name."""
    return [(one.level, one.text) for one in validity if one.level == level]


def _by_reason(not_measurable: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """Each reason once, with the figures that it keeps away."""
    names: dict[str, list[str]] = {}
    for name, reason in not_measurable.items():
        names.setdefault(reason, []).append(name)
    return list(names.items())


def _facts(run: Run) -> list[tuple[str, str]]:
    summary, target = run.summary, run.manifest.target
    interval = run.manifest.scrape_interval_s
    facts = [
        ("workload", summary.workload),
        ("server", server_in_words(summary.engine, (target and target.config) or {})),
        ("model", summary.model or "not known"),
        ("at", target.url if target else "never reached"),
        ("requests", _outcomes(run)),
        ("load", f"{quantity(run.clock.length_s, 's')}, seed {run.manifest.seed}"),
        ("settle time", quantity(run.manifest.settle_s, "s")),
        ("scraped", "never" if interval is None else f"every {quantity(interval, 's')}"),
    ]
    if summary.token_counting:
        counted = COUNTED_BY.get(summary.token_counting, summary.token_counting)
        facts.append(("tokens by", counted))
    if (probing := run.manifest.probing) is not None:
        what = "no: wedged" if summary.wedged else f"no: {', '.join(probing.errors)}"
        facts.append(("serves in the end", what if probing.errors else "yes"))
    known = client_facts(summary.audit.client if summary.audit else {})
    if known:
        facts.append(("clients know", ", ".join(f"{name} {value}" for name, value in known)))
    return facts


def _outcomes(run: Run) -> str:
    outcomes = run.summary.outcomes
    counts = [f"{n:,} {name.replace('_', ' ')}" for name, n in outcomes.items() if n]
    return f"{sum(outcomes.values()):,}" + (f": {', '.join(counts)}" if counts else "")


def _machine(manifest: Manifest) -> list[tuple[str, str]]:
    hardware = manifest.hardware
    shown: list[tuple[str, str]] = [("written", manifest.created_at)]
    for key, value in hardware.items():
        if key == "memory_bytes":
            shown.append(("memory", quantity(float(value), "bytes")))
        elif isinstance(value, list):
            shown.append((key, ", ".join(map(str, value)) or "none"))
        else:
            shown.append((key, str(value)))
    return [*shown, *manifest.versions.items()]
