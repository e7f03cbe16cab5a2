"""The rows that a cell leaves in its folder: tables as of a live run.

Rows go out in row groups of bounded size, so a cell's memory does not grow with its length. Thin
rows leave out what holds an entry for each token: the lists of a request are empty, and a step has
one entry, its sums, under no request's id.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from shutil import rmtree
from typing import Final, Generic, Protocol, TypeVar

import msgspec

from harness.records import LifecycleEvent, RequestRow, StepRow
from harness.store.parquet import TableWriter
from reference_engine.protocol import RequestEvent, StepRecord

ROWS_AT_ONCE: Final = 20_000
VALUES_AT_ONCE: Final = 1_000_000  # in the lists of the rows of one group
FACTS: Final = "cell.json"
TABLES: Final[dict[str, type[msgspec.Struct]]] = {
    "requests": RequestRow,
    "lifecycle": LifecycleEvent,
    "steps": StepRow,
}
Row = TypeVar("Row", bound=msgspec.Struct)


class Gauges(msgspec.Struct, frozen=True, kw_only=True):
    """A replica at rest."""

    worker: str
    free_blocks: int
    running: int
    waiting: int


class CellFacts(msgspec.Struct, kw_only=True):
    """`cell.json`. `reached_ns`: how far virtual time came; an interrupted cell is not `complete`.

    `planned` counts the requests that were due before the end of the load, `sent` the requests that
    were sent; retries are sent and not planned. `missed_to_stay_s`, `missed_to_leave_s`: how long
    each request of an open loop that was due and not sent had waited, by whether its user would
    have stayed or left. `before` and `after`: the gauges of each replica; `after` lacks a replica
    that is gone. `notes`: what a reader of the figures must know.
    """

    cell: int
    complete: bool
    began_ns: int
    load_ended_ns: int
    reached_ns: int
    planned: int
    sent: int
    retries: int
    steps: int
    scheduled_tokens: int
    generated_tokens: int
    before: list[Gauges]
    after: list[Gauges]
    missed_to_stay_s: list[float] = []
    missed_to_leave_s: list[float] = []
    notes: list[str] = []

    @property
    def reached_s(self) -> float:
        return (self.reached_ns - self.began_ns) / 1e9


class Sink(Protocol):
    """Where a cell's rows go."""

    def request(self, row: RequestRow) -> None: ...

    def events(
        self, events: Iterable[RequestEvent], worker: str, client_ids: Mapping[str, str]
    ) -> None: ...

    def step(self, record: StepRecord) -> None: ...

    def close(self, facts: CellFacts) -> None: ...


class _Table(Generic[Row]):
    """Writes a row group after `ROWS_AT_ONCE` rows, or `VALUES_AT_ONCE` values in their lists."""

    def __init__(self, folder: Path, name: str) -> None:
        self._writer = TableWriter(folder / f"{name}.parquet", TABLES[name])
        self._rows: list[Row] = []
        self._num_values = 0

    def append(self, row: Row, num_values: int = 0) -> None:
        self._rows.append(row)
        self._num_values += num_values
        if len(self._rows) >= ROWS_AT_ONCE or self._num_values >= VALUES_AT_ONCE:
            self._write()

    def close(self) -> None:
        if self._rows:
            self._write()
        self._writer.close()

    def _write(self) -> None:
        self._writer.write(self._rows)
        self._rows, self._num_values = [], 0


class CellFiles:
    """The sink that writes a cell's folder."""

    def __init__(self, folder: Path, *, keeps_tokens: bool) -> None:
        self._keeps_tokens = keeps_tokens
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._requests = _Table[RequestRow](folder, "requests")
        self._lifecycle = _Table[LifecycleEvent](folder, "lifecycle")
        self._steps = _Table[StepRecord](folder, "steps")
        self._seq = 0

    def request(self, row: RequestRow) -> None:
        if not self._keeps_tokens:
            row.token_times_ns, row.event_tokens = [], []
        self._requests.append(row, 2 * len(row.token_times_ns))

    def events(
        self, events: Iterable[RequestEvent], worker: str, client_ids: Mapping[str, str]
    ) -> None:
        for one in events:
            self._seq += 1
            self._lifecycle.append(
                LifecycleEvent(
                    seq=self._seq,
                    t_ns=one.t_ns,
                    event=one.event,
                    request_id=one.request_id,
                    client_request_id=client_ids.get(one.request_id),
                    step=one.step,
                    num_generated=one.num_generated,
                    num_blocks=one.num_blocks,
                    reason=one.reason,
                    worker=worker,
                )
            )

    def step(self, record: StepRecord) -> None:
        """A record has the fields of a row."""
        if not self._keeps_tokens:
            record = msgspec.structs.replace(
                record,
                scheduled={"": sum(record.scheduled.values())},
                sampled={"": sum(record.sampled.values())},
            )
        self._steps.append(record, 3 * len(record.scheduled))

    def discard(self) -> None:
        """Call it after an error: no half of the cell stays."""
        rmtree(self._folder)

    def close(self, facts: CellFacts) -> None:
        for table in (self._requests, self._lifecycle, self._steps):
            table.close()
        part = self._folder / f"{FACTS}.part"
        part.write_bytes(msgspec.json.format(msgspec.json.encode(facts), indent=2) + b"\n")
        part.replace(self._folder / FACTS)
