"""What the cells of a simulation leave, and the run's tables that are made of it."""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from harness.errors import TargetError, in_words
from harness.simulate.rows import FACTS, ROWS_AT_ONCE, TABLES, CellFacts
from harness.store.parquet import schema_of
from harness.store.run_folder import RunFolder, RunRows


def cell_folders(folder: Path) -> list[Path]:
    found = folder.glob("cell-*")
    return sorted(found, key=lambda path: int(path.name.partition("-")[2]))


def read_facts(cells: Iterable[Path]) -> list[CellFacts]:
    """Raises TargetError."""
    return [_read(cell / FACTS) for cell in cells]


def _read(path: Path) -> CellFacts:
    try:
        return msgspec.json.decode(path.read_bytes(), type=CellFacts)
    except (OSError, msgspec.MsgspecError) as error:
        raise TargetError(
            f"{path}: the simulation did not leave it whole: {in_words(error)}"
        ) from error


def join_cells(folder: RunFolder) -> None:
    """Join the cells' tables into the run's, a row group at a time."""
    folder.write_rows(RunRows())
    cells = cell_folders(folder.path)
    for name, record in TABLES.items():
        _join([cell / f"{name}.parquet" for cell in cells], folder.path / f"{name}.parquet", record)
    for cell in cells:
        shutil.rmtree(cell)


def _join(parts: Sequence[Path], whole: Path, record: type[msgspec.Struct]) -> None:
    if len(parts) == 1:
        parts[0].replace(whole)
        return
    part = whole.with_suffix(".part")
    with pq.ParquetWriter(part, schema_of(record), write_page_checksum=True) as writer:
        for table in _row_groups(parts):
            writer.write_table(table)
    part.replace(whole)


def _row_groups(parts: Iterable[Path]) -> Iterator[pa.Table]:
    for path in parts:
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                yield file.read_row_group(group)


def load_window(requests: Path) -> tuple[int, int] | None:
    """The times at which the first request was sent and the last one ended."""
    table = pq.read_table(requests, columns=["sent_ns", "ended_ns"])
    if not table.num_rows:
        return None
    return pc.min(table["sent_ns"]).as_py(), pc.max(table["ended_ns"]).as_py()


def seen_by(steps: Path) -> dict[str, tuple[float, float]]:
    """The least and the most of what the steps were made of, as a machine's `range` names it."""
    limits: dict[str, tuple[float, float]] = {}
    with pq.ParquetFile(steps) as file:
        for batch in file.iter_batches(ROWS_AT_ONCE, columns=["num_running", "scheduled_tokens"]):
            tokens = batch["scheduled_tokens"]
            ends = np.append(0, np.cumsum(pc.list_value_length(tokens).to_numpy()))
            sums = np.append(0, np.cumsum(tokens.flatten().to_numpy()))[ends]
            batched = np.diff(sums)
            is_busy = batched > 0
            running = batch["num_running"].to_numpy()
            for name, values in (
                ("running", running[is_busy]),
                ("batched_tokens", batched[is_busy]),
            ):
                if len(values):
                    least, most = limits.get(name, (np.inf, 0.0))
                    limits[name] = (
                        min(least, float(values.min())),
                        max(most, float(values.max())),
                    )
    return limits
