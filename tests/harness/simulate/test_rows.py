"""The rows of a cell: what a live run's files would hold, in row groups of bounded size."""

from pathlib import Path

import msgspec
import pyarrow.parquet as pq
import pytest

from harness.records import Outcome, RequestRow
from harness.simulate import rows
from harness.simulate.rows import CellFacts, CellFiles, Gauges
from reference_engine.protocol import RequestEvent, StepRecord
from tests.made_up.rows import request_row


def _row(name: str, *, tokens: int = 2) -> RequestRow:
    times = {"token_times_ns": list(range(tokens)), "event_tokens": [1] * tokens}
    return request_row(name, sent_ns=0, ended_ns=9, outcome=Outcome.COMPLETED, **times)


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


def test_rows_come_out_as_they_went_in(tmp_path: Path) -> None:
    files = CellFiles(tmp_path, keeps_tokens=True)
    files.request(_row("r"))
    event = RequestEvent(t_ns=5, event="admitted", request_id="a", step=1)
    files.events([event, event], "worker-0", {"a": "r"})
    files.step(_step(1))
    assert not (tmp_path / "requests.parquet").exists()  # it is not whole
    files.close(FACTS)
    [request] = pq.read_table(tmp_path / "requests.parquet").to_pylist()
    assert msgspec.convert(request, RequestRow) == _row("r")
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
