"""The rows of a cell: what a live run's files would hold, in row groups of bounded size."""

from pathlib import Path

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest

from harness.records import LifecycleEvent, StepRow
from harness.records import RequestRow as ClientRow
from harness.store.parquet import schema_of
from reference_engine.protocol import Event, StepRecord
from reference_engine.simulate import rows
from reference_engine.simulate.rows import CellFacts, CellFiles, Gauges, RequestRow


def _row(name: str, *, tokens: int = 2) -> RequestRow:
    values = dict.fromkeys(RequestRow._fields[: -len(RequestRow._field_defaults)], 0) | {
        "request_id": name,
        **dict.fromkeys(("arm", "plan", "way", "wire_close", "error", "finish_reason"), ""),
        "role": "user",
        "stream": True,
        "token_times_ns": np.arange(tokens),
        "event_tokens": [1] * tokens,
        "token_counting": "usage",
        "outcome": "completed",
        "delivery": "stream",
    }
    return RequestRow(**values)  # type: ignore[arg-type]


def _step(number: int) -> StepRecord:
    return StepRecord(
        step=number,
        started_ns=number * 10,
        ended_ns=number * 10 + 9,
        num_running=2,
        num_waiting=0,
        free_blocks=5,
        scheduled={"a": 7, "b": 1},
        sampled={"b": 1},
        worker="worker-0",
    )


FACTS = CellFacts(
    cell=0,
    complete=True,
    began_ns=1,
    load_ended_ns=2,
    reached_ns=3,
    planned=1,
    sent=1,
    retries=0,
    steps=1,
    scheduled_tokens=8,
    generated_tokens=1,
    before=[Gauges(worker="worker-0", free_blocks=9, running=0, waiting=0)],
    after=[],
)


@pytest.mark.parametrize(
    ("schema", "record"),
    [(rows.REQUESTS, ClientRow), (rows.LIFECYCLE, LifecycleEvent), (rows.STEPS, StepRow)],
)
def test_a_cell_has_the_columns_of_a_live_run(schema: object, record: type[msgspec.Struct]) -> None:
    assert schema == schema_of(record)


def test_rows_come_out_as_they_went_in(tmp_path: Path) -> None:
    files = CellFiles(tmp_path, keeps_tokens=True)
    files.request(_row("r"))
    event = Event(t_ns=5, event="admitted", request_id="a", step=1)
    files.events([event, event], "worker-0", {"a": "r"})
    files.step(_step(1))
    assert not (tmp_path / "requests.parquet").exists()  # it is not whole
    files.close(FACTS)
    [request] = pq.read_table(tmp_path / "requests.parquet").to_pylist()
    assert RequestRow(**request)._replace(token_times_ns=()) == _row("r")._replace(
        token_times_ns=()
    )
    assert request["token_times_ns"] == [0, 1]
    events = pq.read_table(tmp_path / "lifecycle.parquet").to_pylist()
    assert [(one["seq"], one["client_request_id"]) for one in events] == [(1, "r"), (2, "r")]
    [step] = pq.read_table(tmp_path / "steps.parquet").to_pylist()
    assert (step["request_ids"], step["scheduled_tokens"]) == (["a", "b"], [7, 1])
    assert step["sampled_tokens"] == [0, 1]
    found = msgspec.json.decode((tmp_path / "cell.json").read_bytes(), type=CellFacts)
    assert found == FACTS
    assert not list(tmp_path.glob("*.part"))


def test_thin_rows_keep_sums(tmp_path: Path) -> None:
    files = CellFiles(tmp_path, keeps_tokens=False)
    files.request(_row("r"))
    files.step(_step(1))
    files.close(FACTS)
    [request] = pq.read_table(tmp_path / "requests.parquet").to_pylist()
    assert request["token_times_ns"] == request["event_tokens"] == []
    [step] = pq.read_table(tmp_path / "steps.parquet").to_pylist()
    assert (step["request_ids"], step["scheduled_tokens"]) == ([""], [8])


def test_long_lists_make_short_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "ROWS_AT_ONCE", 5)
    monkeypatch.setattr(rows, "VALUES_AT_ONCE", 100)
    files = CellFiles(tmp_path, keeps_tokens=True)
    for tokens in (1, 1, 1, 1, 1, 60, 1):
        files.request(_row("r", tokens=tokens))
    files.close(FACTS)
    found = pq.ParquetFile(tmp_path / "requests.parquet").metadata
    assert [found.row_group(n).num_rows for n in range(found.num_row_groups)] == [5, 1, 1]
