"""From run folders to one HTML file: read, put into words, draw, write."""

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dashboards import headline
from dashboards.arms_article import of_arms
from dashboards.page import document, save
from dashboards.request_sample import request_rows
from dashboards.sections import cancel, early_stop, load
from dashboards.sections.section import Section, first_picture
from dashboards.sections.stages import stages
from dashboards.sections.tables import (
    account_tables,
    every_figure,
    limits_table,
    replicas_table,
)
from dashboards.sections.waste import waste
from dashboards.verdict import ReportVerdict, trust, verdict_of
from harness.analysis.tokens import COUNTED_BY
from harness.export.library import Run, load_remains
from harness.formatting import quantity, spoken_outcome
from harness.records import ArmsSummary, is_disaggregated
from harness.store.conform_result import conformance_beside
from harness.store.manifest import Manifest
from harness.store.remains import NOT_KNOWN
from harness.text.headlines import HEADLINES, report_sentence, stop_verdict
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
        {one["anchor"]: [*one["first"], *one["sections"]] for one in articles},
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
    figures mean nothing, so it stands before them and replaces the sentence. `first`: the section
    of the first screen, if there is any picture.
    """
    summary, manifest, verdict = run.summary, run.manifest, verdict_of(run)
    body = of_arms(run) if isinstance(summary, ArmsSummary) else _of_run(run, verdict)
    limits = [] if verdict is None else [limits_table(verdict)]
    first, sections = first_picture(body["sections"])
    return {
        **body,
        "first": first,
        "sections": sections,
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


def _of_run(run: Run, verdict: ReportVerdict | None) -> dict[str, Any]:
    frames = run.frames  # all rows, before any figure asks for the outline alone
    summary, metrics = run.whole, run.metrics
    in_use = summary.breakdown.get("leaks_in_use", {})
    lost = summary.breakdown.get("leaks_lost", ("slots", "blocks"))
    unsure = _unsure(run)
    cards = headline.cards(metrics, summary.flags, in_use, unsure)
    is_invalid = any(one.level == "invalid" for one in summary.validity)
    if is_invalid or summary.status != "complete":
        cards = headline.without_praise(cards)
    on_cards = {} if verdict is None else verdict.on_cards
    return {
        "sentence": report_sentence(summary.outcomes, metrics, in_use, lost, unsure),
        "is_sentence_first": not summary.outcomes.get("abandoned"),
        "stops": _whether_it_stops(run),
        "cards": headline.first_cards(cards, summary.not_measurable, on_cards),
        "more_cards": [card for name, card in cards.items() if name not in HEADLINES],
        "facts": list(_facts(run)),
        "trust": trust(run),
        "not_measurable": summary.not_measurable,
        "side_by_side": [],
        "sections": _sections(run),
        "tables": [*replicas_table(summary), *account_tables(summary.agreement, summary.audit)],
        "listing": None if frames.requests.empty else request_rows(run),
        "every_figure": every_figure({"": summary}),
    }


def _whether_it_stops(run: Run) -> str | None:
    """The last sentence of `walkaway run`; None if that is not known. A run that ended early clears
    no server.
    """
    probing = run.manifest.probing
    found = stop_verdict(run.metrics, is_silent=probing is not None and probing.is_silent)
    is_known = found.stops is False or (found.stops and run.whole.status == "complete")
    return f"{found.text[0].upper()}{found.text[1:]}." if is_known else None


def _unsure(run: Run) -> int:
    ghosts = run.metrics.get("ghost_rate")
    if ghosts is None or ghosts.method != "exact" or run.lifecycle.empty:  # the log is lost
        return 0
    is_over = run.cancellations["phase"] == "ended"
    return int((run.cancellations["ghost"].isna() & ~is_over).sum())


def _sections(run: Run) -> list[Section]:
    """The sections in the order of the page: what became of the cancels, of the slots and of the
    users who stayed; then the details of a cancel, and what the measuring cost.
    """
    each, has_probes = cancel.cancels(run), cancel.has_probes(run)
    return [
        *([each] if each.pictures else []),
        *early_stop.sections(run),
        waste(run),
        *([cancel.recovery(run)] if has_probes else []),
        *(build(run) for build in (load.slots, load.kv, load.survivors)),
        *(build(run) for build in (cancel.latency, stages, cancel.ways)),
        *(build(run) for build in (load.hardware, load.lag)),
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
