"""Read a run's folder for the gate, and find out whether it is whole.

Every value of every file of rows is read, also of each round's, a batch at a time, and held to the
checksums that were written with them: flipped bytes rarely make a file that cannot be read. The
requests must be those that the summary counted.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from harness.errors import ConfigError
from harness.gate.measured import Measured, read_measured
from harness.records import ArmsSummary, Summary
from harness.store.parquet import ROWS_AT_ONCE
from harness.store.run_folder import (
    RECORDS,
    WHOLE_FILES,
    RunFolder,
    UnusableRunError,
    open_run,
    read_judged,
)

Read = TypeVar("Read")


def read_run(path: Path) -> Measured:
    """Raises UnusableRunError where the run cannot be judged, and any other ConfigError where
    `path` is no run's folder."""
    folder = open_run(path)
    manifest, summary = read_judged(folder)
    try:
        rounds = [RunFolder(one) for one in folder.runs()] if folder.has_arms else []
        _check_rows(folder, rounds, summary)
        return read_measured(summary, manifest, _manifests(rounds))
    except (KeyError, TypeError, ValueError, AttributeError, msgspec.MsgspecError) as error:
        raise UnusableRunError(
            f"{path}: manifest.json is not as walkaway writes it: {error!r}",
            _made_again(folder),
        ) from error


def _manifests(rounds: Sequence[RunFolder]) -> dict[str, dict[str, Any]]:
    """By arm, that of its first run."""
    first: dict[str, RunFolder] = {}
    for one in rounds:
        first.setdefault(one.path.name.partition("-")[2], one)
    try:
        return {arm: one.read_manifest() for arm, one in first.items()}
    except ConfigError as error:
        raise UnusableRunError(str(error), WHOLE_FILES) from error


def _check_rows(
    folder: RunFolder, rounds: Sequence[RunFolder], summary: Summary | ArmsSummary
) -> None:
    """Every file of rows can be read, and the requests are those that were summarised."""
    counted: Counter[str] = Counter()
    for side in summary.arms.values() if isinstance(summary, ArmsSummary) else [summary]:
        counted.update(side.outcomes)
    _check_requests(folder, [folder], counted)
    whole = [one for one in rounds if (one.path / "requests.parquet").is_file()]
    if rounds:
        _check_requests(folder, whole, counted)
    for one in whole if rounds else [folder]:
        for name in RECORDS:
            if name != "requests":
                _read(one.path / f"{name}.parquet", _num_rows)


def _check_requests(
    run: RunFolder, folders: Sequence[RunFolder], counted: Mapping[str, int]
) -> None:
    found: Counter[str] = Counter()
    for one in folders:
        found.update(_read(one.path / "requests.parquet", _outcomes))
    if found.total() != sum(counted.values()):
        where = "requests.parquet has" if folders == [run] else "the files of the rounds have"
        raise UnusableRunError(
            f"{run.path}: {where} {found.total():,} rows, and summary.json is of "
            f"{sum(counted.values()):,}",
            _made_again(run),
        )
    if found != Counter(counted):
        raise UnusableRunError(
            f"{run.path}: the requests did not end as summary.json counts them: "
            f"{dict(found)} and {dict(counted)}",
            _made_again(run),
        )


def _outcomes(file: Path) -> Counter[str]:
    """How the requests ended."""
    found: Counter[str] = Counter()
    for batch in _batches(file):
        found.update(batch["outcome"].to_pylist())
    return found


def _num_rows(file: Path) -> int:
    return sum(batch.num_rows for batch in _batches(file))


def _batches(file: Path) -> Iterator[pa.RecordBatch]:
    """All rows, every value of which can be read and is what was written."""
    with pq.ParquetFile(file, page_checksum_verification=True) as opened:
        for batch in opened.iter_batches(ROWS_AT_ONCE):
            batch.validate(full=True)
            yield batch


def _read(file: Path, read: Callable[[Path], Read]) -> Read:
    try:
        return read(file)
    except (OSError, pa.ArrowException, KeyError) as error:
        raise UnusableRunError(f"{file} cannot be read: {error}", WHOLE_FILES) from error


def _made_again(folder: RunFolder) -> str:
    return f"the summary made again: delete it, then walkaway report {folder.path}"
