"""Read a run's folder for the gate, and find out whether it is whole.

Of the rows only the ends of the files are read: that they can be read at all, and that they are as
many as the summary counted. So a large run is judged as fast as a small one.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from harness.errors import ConfigError
from harness.gate.measured import Measured, read_measured
from harness.records import SCHEMA_VERSION
from harness.store import RECORDS, RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """Why a run cannot be judged, and what would help."""

    reason: str
    to_decide: str


def read_run(path: Path) -> Measured | Unreadable:
    """The run, or why it cannot be judged. Raises ConfigError where `path` is no run's folder."""
    folder = RunFolder(path)
    if not (path / "manifest.json").is_file():
        raise ConfigError(f"{path}: is not a run's folder (it has no manifest.json)")
    if not (path / "summary.json").is_file():
        return Unreadable(
            reason="it was cut short before it was judged: there is no summary.json",
            to_decide=f"a whole run; what was saved of this one: walkaway report {path}",
        )
    try:
        summary, manifest = folder.read_summary(), folder.read_manifest()
        if wrong := _other_version(summary, manifest) or _damage(folder, summary):
            return wrong
        runs = folder.runs() if folder.has_arms else []
        of_run = RunFolder(runs[0]).read_manifest() if runs else manifest
        return read_measured(summary, manifest, of_run)
    except ConfigError as error:
        return Unreadable(reason=str(error), to_decide="a run whose files are whole")
    except (KeyError, TypeError, ValueError, AttributeError, msgspec.MsgspecError) as error:
        return Unreadable(
            reason=f"summary.json or manifest.json is not as walkaway writes it: {error!r}",
            to_decide=f"the summary made again: delete it, then walkaway report {path}",
        )


def _other_version(*contents: dict[str, Any]) -> Unreadable | None:
    for content in contents:
        version = content.get("schema_version")
        if version != SCHEMA_VERSION:
            return Unreadable(
                reason=f"it is of schema version {version}, and this walkaway reads "
                f"{SCHEMA_VERSION}",
                to_decide="the walkaway that made the run, or a new run",
            )
    return None


def _damage(folder: RunFolder, summary: dict[str, Any]) -> Unreadable | None:
    """A file of rows that cannot be read, or that is not the one that was summarised."""
    names = ["requests"] if folder.has_arms else list(RECORDS)
    rows = {}
    for name in names:
        path = folder.path / f"{name}.parquet"
        try:
            rows[name] = pq.read_metadata(path).num_rows
        except (OSError, pa.ArrowInvalid) as error:
            return Unreadable(
                reason=f"{path} cannot be read: {error}", to_decide="a run whose files are whole"
            )
    sides = summary["arms"].values() if "arms" in summary else [summary]
    counted = sum(sum(side["outcomes"].values()) for side in sides)
    if rows["requests"] != counted:
        return Unreadable(
            reason=f"requests.parquet has {rows['requests']:,} rows, and summary.json is of "
            f"{counted:,}",
            to_decide=f"the summary made again: delete it, then walkaway report {folder.path}",
        )
    return None
