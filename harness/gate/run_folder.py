"""Read a run's folder for the gate, and find out whether it is whole.

Of the rows only the ends of the files are read: that they can be read at all, and that they are as
many as the summary counted. So a large run is judged as fast as a small one.
"""

from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from harness.errors import ConfigError
from harness.gate.measured import Measured, read_measured
from harness.judged import WHOLE_FILES, UnusableRunError, open_run, read_judged
from harness.store import RECORDS, RunFolder


def read_run(path: Path) -> Measured:
    """Raises UnusableRunError where the run cannot be judged, and any other ConfigError where
    `path` is no run's folder."""
    folder = open_run(path)
    manifest, summary = read_judged(folder)
    try:
        _check_rows(folder, summary)
        return read_measured(summary, manifest, _manifest_of_server(folder, manifest))
    except (KeyError, TypeError, ValueError, AttributeError, msgspec.MsgspecError) as error:
        raise UnusableRunError(
            f"{path}: summary.json or manifest.json is not as walkaway writes it: {error!r}",
            _made_again(folder),
        ) from error


def _manifest_of_server(folder: RunFolder, manifest: dict[str, Any]) -> dict[str, Any]:
    """With arms, that of a run of them: it knows the server."""
    runs = folder.runs() if folder.has_arms else []
    try:
        return RunFolder(runs[0]).read_manifest() if runs else manifest
    except ConfigError as error:
        raise UnusableRunError(str(error), WHOLE_FILES) from error


def _check_rows(folder: RunFolder, summary: dict[str, Any]) -> None:
    """Every file of rows can be read, and is the one that was summarised."""
    names = ["requests"] if folder.has_arms else list(RECORDS)
    rows = {name: _num_rows(folder.path / f"{name}.parquet") for name in names}
    sides = summary["arms"].values() if "arms" in summary else [summary]
    counted = sum(sum(side["outcomes"].values()) for side in sides)
    if rows["requests"] != counted:
        raise UnusableRunError(
            f"{folder.path}: requests.parquet has {rows['requests']:,} rows, and summary.json is "
            f"of {counted:,}",
            _made_again(folder),
        )


def _num_rows(file: Path) -> int:
    try:
        return int(pq.read_metadata(file).num_rows)
    except (OSError, pa.ArrowInvalid) as error:
        raise UnusableRunError(f"{file} cannot be read: {error}", WHOLE_FILES) from error


def _made_again(folder: RunFolder) -> str:
    return f"the summary made again: delete it, then walkaway report {folder.path}"
