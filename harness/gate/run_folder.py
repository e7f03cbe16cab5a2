"""Read a run's folder for the gate, and find out whether it is whole.

Of the rows no more is read than it takes: the ends of the files, also of each round's, and of the
requests all but the times of tokens. They must be those that the summary counted.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from harness.errors import ConfigError
from harness.gate.measured import Measured, read_measured
from harness.judged import WHOLE_FILES, UnusableRunError, open_run, read_judged
from harness.store import RECORDS, TOKEN_LISTS, RunFolder

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
            f"{path}: summary.json or manifest.json is not as walkaway writes it: {error!r}",
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


def _check_rows(folder: RunFolder, rounds: Sequence[RunFolder], summary: Mapping[str, Any]) -> None:
    """Every file of rows can be read, and the requests are those that were summarised."""
    sides = summary["arms"].values() if "arms" in summary else [summary]
    counted: Counter[str] = Counter()
    for side in sides:
        counted.update(side["outcomes"])
    _check_requests(folder, [folder], counted)
    whole = [one for one in rounds if (one.path / "requests.parquet").is_file()]
    if rounds:
        _check_requests(folder, whole, counted)
    for one in whole if rounds else [folder]:
        for name in RECORDS:
            _read(one.path / f"{name}.parquet", pq.read_metadata)


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
    """How the requests ended; on the way every value is read but the times of tokens."""
    names = [name for name in pq.read_schema(file).names if name not in TOKEN_LISTS]
    table = pq.read_table(file, columns=names)
    table.validate(full=True)
    return Counter(table["outcome"].to_pylist())


def _read(file: Path, read: Callable[[Path], Read]) -> Read:
    try:
        return read(file)
    except (OSError, pa.ArrowException, KeyError) as error:
        raise UnusableRunError(f"{file} cannot be read: {error}", WHOLE_FILES) from error


def _made_again(folder: RunFolder) -> str:
    return f"the summary made again: delete it, then walkaway report {folder.path}"
