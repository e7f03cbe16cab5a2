"""The rows that a cell leaves in its folder, with the columns of a live run's parquet files.

Rows go out in row groups of bounded size, so a cell's memory does not grow with its length. A file
is called `.part` until it is closed. Thin rows leave out what holds an entry for each token: the
lists of a request are empty, and a step has one entry, its sums, under no request's id.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from shutil import rmtree
from typing import Any, Final, NamedTuple, Protocol

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from reference_engine.protocol import Event, StepRecord

ROWS_AT_ONCE: Final = 20_000
VALUES_AT_ONCE: Final = 1_000_000  # in the lists of the rows of one group
FACTS: Final = "cell.json"


class RequestRow(NamedTuple):
    """One request as its client saw it; `harness.records` says what each field means."""

    request_id: str
    arm: str
    role: str
    trial: int | None
    user: int
    stream: bool
    planned_abandon: int | None
    think_ns: int | None
    max_tokens: int
    intended_start_ns: int
    sent_ns: int
    first_token_ns: int | None
    last_token_ns: int | None
    abandoned_ns: int | None
    reference_ns: int | None
    ended_ns: int
    wire_close: str | None
    tokens_read: int
    token_times_ns: "Sequence[int] | NDArray[Any]"
    event_tokens: "Sequence[int] | NDArray[Any]"
    token_counting: str
    outcome: str
    status_code: int | None
    error: str | None
    finish_reason: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    plan: str
    way: str
    delivery: str
    n: int
    tokens_after_leaving: int | None
    server_ended_ns: int | None
    repeats: str | None = None
    answer: str | None = None
    resent: bool = False
    frontend: int = 0
    tokens_per_event: float | None = None
    tokens_error: float | None = None
    unread: str | None = None


class Gauges(msgspec.Struct, frozen=True, kw_only=True):
    """A replica at rest."""

    worker: str
    free_blocks: int
    running: int
    waiting: int


class CellFacts(msgspec.Struct, kw_only=True):
    """`cell.json`. `reached_ns`: how far virtual time came; an interrupted cell is not `complete`.

    `planned` counts the requests that were due before the end of the load, `sent` those that were
    sent; retries are sent and not planned. `before` and `after`: the gauges of each replica; one
    that is gone has none after. `notes`: what a reader of the figures must know. `ran_out`: users
    of a closed loop that had no planned request left before the load ended.
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
    notes: list[str] = []
    ran_out: int = 0


class Sink(Protocol):
    """Where a cell's rows go. Lists of tokens are left out unless `keeps_tokens`."""

    keeps_tokens: bool

    def request(self, row: RequestRow) -> None: ...

    def events(
        self, events: Iterable[Event], worker: str, client_ids: Mapping[str, str]
    ) -> None: ...

    def step(self, record: StepRecord) -> None: ...

    def close(self, facts: CellFacts) -> None: ...


def _text(name: str, *, nullable: bool = False) -> pa.Field:
    return pa.field(name, pa.string(), nullable=nullable)


def _number(name: str, *, nullable: bool = False) -> pa.Field:
    return pa.field(name, pa.int64(), nullable=nullable)


def _list(name: str, of: pa.DataType) -> pa.Field:
    return pa.field(name, pa.list_(of), nullable=False)


_NULLABLE: Final = {
    *("trial", "planned_abandon", "think_ns", "first_token_ns", "last_token_ns", "abandoned_ns"),
    *("reference_ns", "status_code", "prompt_tokens", "completion_tokens"),
    *("tokens_after_leaving", "server_ended_ns"),
    *("wire_close", "error", "finish_reason", "repeats", "answer"),
    *("tokens_per_event", "tokens_error", "unread"),
}
_TEXTS: Final = {
    *("request_id", "arm", "role", "wire_close", "token_counting", "outcome", "error"),
    *("finish_reason", "plan", "way", "delivery", "repeats", "answer", "unread"),
}


def _request_field(name: str) -> pa.Field:
    if name in ("token_times_ns", "event_tokens"):
        return _list(name, pa.int64())
    if name in ("tokens_per_event", "tokens_error"):
        return pa.field(name, pa.float64(), nullable=True)
    if name in ("stream", "resent"):
        return pa.field(name, pa.bool_(), nullable=False)
    return (_text if name in _TEXTS else _number)(name, nullable=name in _NULLABLE)


REQUESTS: Final = pa.schema([_request_field(name) for name in RequestRow._fields])
LIFECYCLE: Final = pa.schema(
    [
        _number("seq"),
        _number("t_ns"),
        _text("event"),
        _text("request_id"),
        _text("client_request_id", nullable=True),
        _number("step", nullable=True),
        _number("num_generated"),
        _number("num_blocks"),
        _text("reason", nullable=True),
        _text("worker"),
    ]
)
STEPS: Final = pa.schema(
    [
        *map(_number, ("step", "started_ns", "ended_ns", "num_running", "num_waiting")),
        _number("free_blocks"),
        _text("worker"),
        _list("request_ids", pa.string()),
        _list("scheduled_tokens", pa.int32()),
        _list("sampled_tokens", pa.int32()),
    ]
)


class _RowFile:
    """Writes a row group when so many rows, or values in their lists, have come together."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._path, self._part = path, path.with_suffix(".part")
        self._schema = schema
        self._writer = pq.ParquetWriter(self._part, schema, write_page_checksum=True)
        self._rows: list[tuple[Any, ...]] = []
        self._num_values = 0

    def append(self, row: tuple[Any, ...], num_values: int = 0) -> None:
        self._rows.append(row)
        self._num_values += num_values
        if len(self._rows) >= ROWS_AT_ONCE or self._num_values >= VALUES_AT_ONCE:
            self._write()

    def close(self) -> None:
        """Only now the file has its name."""
        if self._rows:
            self._write()
        self._writer.close()
        self._part.replace(self._path)

    def _write(self) -> None:
        columns = zip(zip(*self._rows, strict=True), self._schema, strict=True)
        arrays = [pa.array(column, type=field.type) for column, field in columns]
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema))
        self._rows, self._num_values = [], 0


class CellFiles:
    """The sink that writes a cell's folder."""

    def __init__(self, folder: Path, *, keeps_tokens: bool) -> None:
        self.keeps_tokens = keeps_tokens
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._requests = _RowFile(folder / "requests.parquet", REQUESTS)
        self._lifecycle = _RowFile(folder / "lifecycle.parquet", LIFECYCLE)
        self._steps = _RowFile(folder / "steps.parquet", STEPS)
        self._seq = 0

    def request(self, row: RequestRow) -> None:
        if not self.keeps_tokens:
            row = row._replace(token_times_ns=(), event_tokens=())
        self._requests.append(row, 2 * len(row.token_times_ns))

    def events(self, events: Iterable[Event], worker: str, client_ids: Mapping[str, str]) -> None:
        append = self._lifecycle.append
        for one in events:
            self._seq += 1
            name = one.request_id
            append(
                (
                    self._seq,
                    one.t_ns,
                    one.event,
                    name,
                    client_ids.get(name),
                    one.step,
                    one.num_generated,
                    one.num_blocks,
                    one.reason,
                    worker,
                )
            )

    def step(self, record: StepRecord) -> None:
        scheduled, sampled = record.scheduled, record.sampled
        if self.keeps_tokens:
            ids, tokens = list(scheduled), list(scheduled.values())
            new = [sampled.get(name, 0) for name in scheduled]
        else:
            ids, tokens, new = [""], [sum(scheduled.values())], [sum(sampled.values())]
        num = (record.step, record.started_ns, record.ended_ns)
        level = (record.num_running, record.num_waiting, record.free_blocks)
        row = (*num, *level, record.worker, ids, tokens, new)
        self._steps.append(row, 3 * len(ids))

    def discard(self) -> None:
        """After an error: no half of it stays."""
        rmtree(self._folder)

    def close(self, facts: CellFacts) -> None:
        for file in (self._requests, self._lifecycle, self._steps):
            file.close()
        part = self._folder / f"{FACTS}.part"
        part.write_bytes(msgspec.json.format(msgspec.json.encode(facts), indent=2) + b"\n")
        part.replace(self._folder / FACTS)
