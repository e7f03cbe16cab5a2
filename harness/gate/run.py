"""Read a run for the gate: its figures and conditions, if its files are whole.

Every value of every file of rows is compared with the checksums written with it: a flipped byte
rarely makes a file unreadable.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from harness.compare.comparable import Conditions, conditions_of
from harness.errors import ConfigError
from harness.gate.judge import GateSide, Measured
from harness.gate.limits import RUN
from harness.records import FIGURES_PER_ROUND, ArmsSummary, ArmSummary, Metric, Outcome, Summary
from harness.store import run_folder
from harness.store.parquet import verified_batches
from harness.store.run_folder import RECORDS, WHOLE_FILES, RunFolder, UnusableRunError, open_run

PerRound = dict[str, dict[str, list[float | None]]]


def read_run(path: Path) -> Measured:
    """Raises UnusableRunError if the run cannot be judged, and any other ConfigError if `path` is
    no run's folder."""
    folder = open_run(path)
    manifest, summary = run_folder.read_results(folder)
    try:
        rounds = [RunFolder(one) for one in folder.runs()]
        parts = summary.arms.values() if isinstance(summary, ArmsSummary) else [summary]
        _check_rows(folder, rounds, [part.outcomes for part in parts])
        return read_measured(summary, manifest, _manifests(folder))
    except (KeyError, TypeError, ValueError, AttributeError, msgspec.MsgspecError) as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise UnusableRunError(
            f"{path}: manifest.json is not as walkaway writes it: {why}", WHOLE_FILES
        ) from error


def _manifests(folder: RunFolder) -> dict[str, dict[str, Any]]:
    try:
        return {arm: one.read_manifest() for arm, one in folder.first_runs().items()}
    except ConfigError as error:
        raise UnusableRunError(str(error), WHOLE_FILES) from error


def read_measured(
    summary: Summary | ArmsSummary,
    manifest: Mapping[str, Any],
    manifests: Mapping[str, Mapping[str, Any]],
) -> Measured:
    if isinstance(summary, ArmsSummary):
        sides = {
            name: _side(arm, arm.per_round, conditions_of(manifests.get(name, manifest), summary))
            for name, arm in summary.arms.items()
        }
    else:
        own = conditions_of(manifest, summary)
        sides = {RUN: _side(summary, _one_round(summary.metrics), own)}
    return Measured(
        run_id=str(summary.run_id),
        created_at=str(manifest["created_at"]),
        status=summary.status,
        is_silent=any(map(_is_silent, [manifest, *manifests.values()])),
        invalid=[said.text for said in summary.validity if said.level == "invalid"],
        conditions=conditions_of(next(iter(manifests.values()), manifest), summary),
        sides=sides,
        simulated=None if summary.simulated is None else str(summary.simulated),
    )


def _is_silent(manifest: Mapping[str, Any]) -> bool:
    return bool((manifest.get("probing") or {}).get("is_silent"))


def _one_round(metrics: Mapping[str, Metric]) -> PerRound:
    return {
        name: {
            key: [value] for key in FIGURES_PER_ROUND if (value := getattr(metric, key)) is not None
        }
        for name, metric in metrics.items()
    }


def _side(part: Summary | ArmSummary, per_round: PerRound, conditions: Conditions) -> GateSide:
    return GateSide(
        conditions=conditions,
        metrics=part.metrics,
        not_measurable=part.not_measurable,
        per_round=per_round,
        abandoned=part.outcomes.get(Outcome.ABANDONED.value, 0),
        token_counting=part.token_counting,
    )


def _check_rows(
    folder: RunFolder, rounds: Iterable[RunFolder], outcomes: Iterable[Mapping[str, int]]
) -> None:
    counted = sum((Counter(one) for one in outcomes), Counter[str]())
    _check_requests(folder, "requests.parquet has", [folder], counted)
    whole = [one for one in rounds if (one.path / "requests.parquet").is_file()]
    if rounds:
        _check_requests(folder, "the files of the rounds have", whole, counted)
    runs = whole if rounds else [folder]
    others = [(one, name) for one in runs for name in RECORDS if name != "requests"]
    if folder.probe_phase.path.is_dir():
        others += [(folder.probe_phase, name) for name in RECORDS]
    for one, name in others:
        sum(batch.num_rows for batch in _batches(one, name))


def _check_requests(
    run: RunFolder, where: str, folders: Iterable[RunFolder], counted: Counter[str]
) -> None:
    found: Counter[str] = Counter()
    for one in folders:
        for batch in _batches(one, "requests"):
            found.update(batch["outcome"].to_pylist())
    if found == counted:
        return
    said = f"{where} {found.total():,} rows, and summary.json is of {counted.total():,}"
    if found.total() == counted.total():
        said = "the requests did not end as summary.json counts them: "
        said += f"{dict(found)} and {dict(counted)}"
    raise UnusableRunError(f"{run.path}: {said}", _made_again(run))


def _batches(folder: RunFolder, name: str) -> Iterator[pa.RecordBatch]:
    try:
        yield from verified_batches(folder.path / f"{name}.parquet")
    except ConfigError as error:
        raise UnusableRunError(str(error), WHOLE_FILES) from error


def _made_again(folder: RunFolder) -> str:
    return f"the summary made again: delete it, then walkaway report {folder.path}"
