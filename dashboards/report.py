"""From run folders to one HTML file: read, put into words, draw, write."""

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dashboards import headline
from dashboards.page import document, save
from dashboards.request_sample import request_rows
from dashboards.sections import arms, cancel, early_stop, load
from dashboards.sections.section import Section, Table, TableCell
from dashboards.sections.stages import stages
from dashboards.sections.tables import (
    SIDE_BY_SIDE,
    account_tables,
    every_figure,
    limits_table,
    replicas_table,
    value_tables,
)
from dashboards.sections.waste import waste
from dashboards.verdict import trust, trust_of_arms, verdict_of
from harness.analysis.tokens import COUNTED_BY
from harness.compare.pairs import headline_differences, is_certain
from harness.export.library import Run, load_remains
from harness.formatting import bounded, quantity, spoken_outcome
from harness.metrics import headline_figures, spoken
from harness.records import ArmsSummary, is_disaggregated
from harness.store.conform_result import conformance_beside
from harness.store.manifest import Manifest
from harness.store.remains import NOT_KNOWN
from harness.text.headlines import report_sentence
from harness.text.tables import client_facts

CONFIG_SHOWN: Final = (
    ("runner", "{} runner"),
    ("device", "on {}"),
    ("frontends", "{}"),
    ("max_num_seqs", "{:,} slots"),
    ("num_blocks", "{:,} KV blocks"),
    ("block_size", "{:,} tokens a block"),
    ("workers", "on each of {}"),
)
OF_THE_MANIFEST: Final = ("scraped", "at", "load", "settle time", "rounds")
_PROCESSES: Final = ("frontends", "workers")  # by name, the latter with their pids


def write_report(folders: Sequence[Path], output: Path) -> None:
    articles = [_article(path, f"run{number}") for number, path in enumerate(folders)]
    listings = {one["anchor"]: one["listing"] for one in articles if one["listing"] is not None}
    html = document(
        "report.html.j2",
        {one["anchor"]: one["sections"] for one in articles},
        requests={anchor: data for anchor, (_, data) in listings.items()},
        articles=articles,
    )
    save(html, output)


def _article(path: Path, anchor: str) -> dict[str, Any]:
    run, folder = load_remains(path)
    article = describe(run, anchor)
    article["remarks"]["warning"] = [*folder.remarks, *article["remarks"]["warning"]]
    if run.manifest.created_at == NOT_KNOWN:
        article["facts"] = [one for one in article["facts"] if one[0] not in OF_THE_MANIFEST]
    return article


def describe(run: Run, anchor: str) -> dict[str, Any]:
    """The content for one run, for `article.html.j2`; `remarks` by level: with an `invalid` one the
    figures mean nothing, so it stands before them and replaces the sentence.
    """
    summary, manifest, verdict = run.summary, run.manifest, verdict_of(run)
    body = _of_arms(run) if isinstance(summary, ArmsSummary) else _of_run(run)
    limits = [] if verdict is None else [limits_table(verdict)]
    return {
        **body,
        "anchor": anchor,
        "run_id": summary.run_id,
        "question": str(manifest.workload.get("question") or summary.workload),
        "status": summary.status,
        "simulated": None if summary.simulated is None else str(summary.simulated),
        "verdict": verdict,
        "remarks": {
            level: [one for one in summary.validity if one.level == level]
            for level in ("invalid", "warning", "info")
        },
        "facts": [*_common_facts(run), *body["facts"]],
        "not_measurable": _by_reason(body["not_measurable"]),
        "tables": [*limits, *body["tables"]],
        "command": manifest.repeat or shlex.join(manifest.command),
        "machine": [("written", manifest.created_at), *_machine(manifest)],
    }


def _common_facts(run: Run) -> list[tuple[str, str]]:
    summary, interval = run.summary, run.manifest.scrape_interval_s
    runs = list(run.rounds.values()) if isinstance(summary, ArmsSummary) else [run]
    config = _common_config([one.manifest for one in runs])
    conformance = conformance_beside(run.path, summary.engine)
    return [
        ("workload", str(summary.workload)),
        ("server", ", ".join([summary.engine or "not known", *_settings_in_words(config)])),
        ("model", summary.model or "not known"),
        ("scraped", "never" if interval is None else f"every {quantity(interval, 's')}"),
        *([] if conformance is None else [("conformance", conformance)]),
    ]


def _settings_in_words(config: Mapping[str, Any]) -> list[str]:
    shown = {**config, **{key: _several(key, config.get(key) or ()) for key in _PROCESSES}}
    return [form.format(shown[key]) for key, form in CONFIG_SHOWN if shown.get(key) is not None]


def _several(kind: str, names: Collection[str]) -> str | None:
    """None for a single process: it is not worth a word."""
    if is_disaggregated(names):
        return f"{len(names)} prefill and {len(names)} decode workers"
    return f"{len(names)} {kind}" if len(names) > 1 else None


def _without_pids(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**config, **{key: sorted(config.get(key) or ()) for key in _PROCESSES}}


def _common_config(manifests: Sequence[Manifest]) -> Mapping[str, Any]:
    targets = [one.target for one in manifests]
    first, *others = [_without_pids((one and one.config) or {}) for one in targets] or [{}]
    return {
        key: value
        for key, value in first.items()
        if all(config.get(key) == value for config in others)
    }


def _by_reason(not_measurable: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    names: dict[str, list[str]] = {}
    for name, reason in not_measurable.items():
        names.setdefault(reason, []).append(name)
    return list(names.items())


def _machine(manifest: Manifest) -> Iterator[tuple[str, str]]:
    for key, value in manifest.hardware.items():
        if key == "memory_bytes":
            yield "memory", quantity(float(value), "bytes")
        elif isinstance(value, list):
            yield key, ", ".join(map(str, value)) or "none"
        else:
            yield key, str(value)
    yield from manifest.versions.items()


def _of_run(run: Run) -> dict[str, Any]:
    frames = run.frames  # all rows, before any figure asks for the outline alone
    summary, metrics = run.whole, run.metrics
    in_use = summary.breakdown.get("leaks_in_use", {})
    lost = summary.breakdown.get("leaks_lost", ("slots", "blocks"))
    unsure = _unsure(run)
    cards = headline.cards(metrics, summary.flags, in_use, unsure)
    is_invalid = any(one.level == "invalid" for one in summary.validity)
    if is_invalid or summary.status != "complete":
        cards = headline.without_praise(cards)
    return {
        "sentence": report_sentence(summary.outcomes, metrics, in_use, lost, unsure),
        "cards": cards,
        "facts": list(_facts(run)),
        "trust": trust(run),
        "not_measurable": summary.not_measurable,
        "side_by_side": [],
        "sections": _sections(run),
        "tables": [*replicas_table(summary), *account_tables(summary.agreement, summary.audit)],
        "listing": None if frames.requests.empty else request_rows(run),
        "every_figure": every_figure({"": summary}),
    }


def _unsure(run: Run) -> int:
    ghosts = run.metrics.get("ghost_rate")
    if ghosts is None or ghosts.method != "exact" or run.lifecycle.empty:  # the log is lost
        return 0
    is_over = run.cancellations["phase"] == "ended"
    return int((run.cancellations["ghost"].isna() & ~is_over).sum())


def _sections(run: Run) -> list[Section]:
    builders = (
        *(cancel.recovery, stages, cancel.latency, cancel.ways, waste),
        *(load.slots, load.kv, load.hardware, load.survivors, load.lag),
    )
    has_probes = (cancel.probe_requests(run)["role"] == "probe").any()
    return [
        *early_stop.sections(run),
        *(build(run) for build in builders[0 if has_probes else 1 :]),
    ]


def _facts(run: Run) -> Iterator[tuple[str, str]]:
    summary, manifest, outcomes = run.whole, run.manifest, run.outcomes
    yield "at", manifest.target.url if manifest.target else "never reached"
    counts = [f"{n:,} {spoken_outcome(name)}" for name, n in outcomes.items() if n]
    yield "requests", f"{sum(outcomes.values()):,}" + (f": {', '.join(counts)}" if counts else "")
    yield "load", f"{quantity(run.clock.length_s, 's')}, seed {manifest.seed}"
    yield "settle time", quantity(manifest.settle_s, "s")
    if summary.token_counting:
        yield "tokens counted by", COUNTED_BY.get(summary.token_counting, summary.token_counting)
    if (probing := manifest.probing) is not None:
        why = "wedged" if summary.wedged else ", ".join(probing.errors)
        yield "still serving after the run", f"no: {why}" if probing.errors else "yes"
    if known := client_facts(summary.audit.client if summary.audit else {}):
        yield "client-side counts", ", ".join(f"{name} {value}" for name, value in known)


def _of_arms(run: Run) -> dict[str, Any]:
    summary = run.of_arms
    known = {name for metrics in summary.metrics.values() for name in metrics}
    reasons = [one for arm in summary.arms.values() for one in arm.not_measurable.items()]
    return {
        "sentence": _arms_sentence(run),
        "cards": [],
        "facts": list(_arms_facts(run)),
        "trust": trust_of_arms(run),
        "not_measurable": {name: reason for name, reason in reasons if name not in known},
        "side_by_side": list(_side_by_side(summary)),
        "sections": [*early_stop.sections(run), *arms.sections(run)],
        "tables": [] if summary.value is None else value_tables(summary.value),
        "listing": None,
        "every_figure": every_figure(summary.arms),
    }


def _arms_sentence(run: Run) -> str:
    summary = run.of_arms
    if not any(sum(arm.outcomes.values()) for arm in summary.arms.values()):
        return "No request was made, so there is nothing to report."
    if arms.is_frontier(run.manifest.workload) and (said := arms.frontier_sentence(run)):
        return said
    rounds, compared = quantity(summary.rounds, "rounds"), headline_differences(summary)
    by_arm: dict[str, list[str]] = {}
    for name, key, one in compared:
        if name in summary.headlines and one.n:
            change = arms.change(name, one)
            by_arm.setdefault(one.arm, []).append(f"{spoken(name, key)} {change}")
    if by_arm:
        answers = "; ".join(f"{arm} has {', '.join(said)}" for arm, said in by_arm.items())
        return f"Against {summary.reference}, in {rounds}: {answers}."
    certain = sum(is_certain(one) for _, _, one in compared)
    return (
        f"{len(summary.arms)} arms in {rounds}: {certain} of their headline figures surely "
        f"differ from those of {summary.reference}."
    )


def _arms_facts(run: Run) -> Iterator[tuple[str, str]]:
    summary, seed = run.of_arms, run.manifest.seed
    counts = {name: sum(arm.outcomes.values()) for name, arm in summary.arms.items()}
    shown = [f"{count:,} of {name}" for name, count in counts.items()]
    last = seed + summary.rounds
    seeds = f"seed {last}" if summary.rounds == 1 else f"seeds {seed + 1} to {last}"
    yield "arms", "; ".join(_arm_settings(arm) for arm in run.manifest.workload["arms"])
    yield "rounds", f"{summary.rounds}, {seeds}"
    yield "requests", f"{sum(counts.values()):,}: {', '.join(shown)}"


def _arm_settings(arm: Mapping[str, Any]) -> str:
    changes = [
        f"{section}.{key} = {', '.join(map(str, value)) if isinstance(value, list) else value}"
        for section in ("target", "engine", "load", "arrivals", "collect")
        for key, value in (arm.get(section) or {}).items()
        if value not in (None, [])
    ]
    return f"{arm['name']}: {', '.join(changes) or 'as the workload says'}"


def _side_by_side(summary: ArmsSummary) -> Iterator[Table]:
    pairs = headline_figures(summary.metrics, summary.headlines)
    asked = [pair for pair in pairs if pair[0] in summary.headlines]
    others = [pair for pair in pairs if pair not in asked]
    tables = (("The arms side by side", asked), ("More figures side by side", others))
    for title, those in tables:
        if those:
            rows = tuple(_arms_row(summary, name, key) for name, key in those)
            columns = ("figure", *summary.arms)
            yield Table(title=title, shows=SIDE_BY_SIDE, columns=columns, rows=rows)


def _arms_row(summary: ArmsSummary, name: str, key: str) -> tuple[str | TableCell, ...]:
    found = [metrics[name].of for metrics in summary.metrics.values() if name in metrics]
    of = f" ({found[0]})" if found and found[0] is not None else ""
    return (f"{spoken(name, key)}{of}", *(_cell(summary, name, key, arm) for arm in summary.arms))


def _cell(summary: ArmsSummary, name: str, key: str, arm: str) -> TableCell:
    metric = summary.arms[arm].metrics.get(name)
    if metric is None:
        return TableCell(text="not measurable")
    under = "the reference" if arm == summary.reference else None
    if (one := summary.difference(name, key, arm)) is not None and under is None:
        is_known = one.difference is not None
        under = arms.change(name, one) if is_known else None if one.n else one.note
    return TableCell(text=bounded(metric, key), under=() if under is None else (under,))
