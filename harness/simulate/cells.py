"""The files between the harness and the cells of a simulation: planned requests in, rows out."""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from harness.errors import TargetError, in_words
from harness.records import LifecycleEvent, RequestRow, StepRow
from harness.simulate.planner import Row
from harness.store.parquet import schema_of
from harness.store.run_folder import RunFolder, RunRows

T = TypeVar("T")
SIMULATION: Final = "simulation.json"
PLANNED: Final = "planned.parquet"
ROWS_AT_ONCE: Final = 4096
# The columns of `reference_engine.simulate.plan`; a test holds them together.
PLANNED_SCHEMA: Final = pa.schema(
    [
        pa.field("cell", pa.int32(), nullable=False),
        pa.field("number", pa.int64(), nullable=False),
        pa.field("user", pa.int64(), nullable=False),
        pa.field("offset_s", pa.float64()),
        pa.field("prompt_tokens", pa.int32(), nullable=False),
        pa.field("shared_prefix_tokens", pa.int32(), nullable=False),
        pa.field("pages", pa.list_(pa.int64())),
        pa.field("page_tokens", pa.float64()),
        pa.field("max_tokens", pa.int32(), nullable=False),
        pa.field("stay_tokens", pa.int32()),
        pa.field("stream", pa.bool_(), nullable=False),
        pa.field("n", pa.int32(), nullable=False),
        pa.field("role", pa.string(), nullable=False),
        pa.field("plan", pa.string(), nullable=False),
        pa.field("way", pa.string(), nullable=False),
        pa.field("leave_after_tokens", pa.int32()),
        pa.field("pause", pa.string(), nullable=False),
        pa.field("pause_ns", pa.int64()),
        pa.field("think_fraction", pa.float64(), nullable=False),
        pa.field("ttft_share", pa.float64()),
        pa.field("arm", pa.string(), nullable=False),
        pa.field("text", pa.int32()),
    ]
)
_OF_CELLS: Final[dict[str, type[msgspec.Struct]]] = {
    "requests": RequestRow,
    "lifecycle": LifecycleEvent,
    "steps": StepRow,
}


def write_plan(folder: Path, plan: dict[str, Any]) -> None:
    (folder / SIMULATION).write_bytes(msgspec.json.encode(plan))


def write_planned(path: Path, rows: Iterable[Row]) -> int:
    """A row group has rows of one cell, so that each cell reads its own. Returns their number."""
    waiting: dict[int, list[Row]] = {}
    written = 0
    part = path.with_name(path.name + ".part")
    with pq.ParquetWriter(part, PLANNED_SCHEMA) as writer:

        def write(group: list[Row]) -> None:
            writer.write_table(pa.Table.from_pylist(group, schema=PLANNED_SCHEMA))
            group.clear()

        for row in rows:
            group = waiting.setdefault(row["cell"], [])
            group.append(row)
            written += 1
            if len(group) == ROWS_AT_ONCE:
                write(group)
        for _, group in sorted(waiting.items()):
            if group:
                write(group)
    part.replace(path)
    return written


def cell_folders(folder: Path) -> list[Path]:
    found = folder.glob("cell-*")
    return sorted(found, key=lambda path: int(path.name.partition("-")[2]))


class Gauges(msgspec.Struct, frozen=True, kw_only=True):
    """A replica at rest."""

    worker: str
    free_blocks: int
    running: int
    waiting: int


class CellFacts(msgspec.Struct, frozen=True, kw_only=True):
    """`cell.json`, as `reference_engine.simulate.rows` says."""

    cell: int
    complete: bool
    began_ns: int
    load_ended_ns: int
    reached_ns: int
    planned: int
    sent: int
    retries: int
    before: list[Gauges]
    after: list[Gauges]
    notes: list[str] = []
    ran_out: int = 0

    @property
    def reached_s(self) -> float:
        return (self.reached_ns - self.began_ns) / 1e9

    @property
    def load_s(self) -> float:
        return (self.load_ended_ns - self.began_ns) / 1e9


def read_facts(cells: Iterable[Path]) -> list[CellFacts]:
    return [_read(cell / "cell.json", CellFacts) for cell in cells]


def read_engine(folder: Path) -> dict[str, Any]:
    """The engine's whole configuration, as a live one says at /walkaway/config."""
    return _read(folder / "engine.json", dict[str, Any])


def _read(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise TargetError(
            f"{path}: the simulation did not leave it whole: {in_words(error)}"
        ) from error


def join_cells(folder: RunFolder) -> None:
    """Make the run's tables of those of its cells, a row group at a time."""
    folder.write_rows(RunRows())
    cells = cell_folders(folder.path)
    for name, record in _OF_CELLS.items():
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
    """When the first request was sent and the last ended."""
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


def waits_of_missed(folder: Path, cells: Sequence[CellFacts]) -> tuple[list[float], list[float]]:
    """How long each request of an open loop had waited that was due in one of the cells and was not
    sent: of users that would have stayed, and of users that would have left."""
    sent = pq.read_table(folder / "requests.parquet", columns=["user"])["user"]
    columns, ran = ["cell", "user", "offset_s", "way"], [cell.cell for cell in cells]
    planned = pq.read_table(folder / PLANNED, columns=columns, filters=[("cell", "in", ran)])
    ends_s = np.zeros(max(ran) + 1)
    ends_s[ran] = [cell.load_s for cell in cells]
    waits = ends_s[planned["cell"].to_numpy()] - planned["offset_s"].to_numpy()
    was_sent = pc.is_in(planned["user"], value_set=pc.unique(sent)).to_numpy()
    stays = pc.equal(planned["way"], "").to_numpy()
    is_missed = (waits > 0) & ~was_sent
    return waits[is_missed & stays].tolist(), waits[is_missed & ~stays].tolist()
