"""`walkaway gate` on folders that are damaged, cut short or empty: none is a pass."""

from pathlib import Path
from typing import Any

import junitparser
import pyarrow.parquet as pq
import pytest

from harness.gate.run import read_run
from harness.store.run_folder import RECORDS, RunFolder, RunRows, UnusableRunError
from tests.harness.gate.gating import gate, said
from tests.made_up import gated

pytestmark = pytest.mark.usefixtures("elsewhere")


def undecided(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Why the run cannot be judged."""
    assert gate(run) == 4
    reason: str = said(capsys)["checks"][0]["reason"]
    return reason


def test_a_report_is_advised_only_of_a_killed_run_that_has_requests(tmp_path: Path) -> None:
    def advice(run: Path) -> str:
        (run / "summary.json").unlink(missing_ok=True)
        with pytest.raises(UnusableRunError) as raised:
            read_run(run)
        return raised.value.remedy

    run = gated.save(tmp_path / "run")
    report = f"a whole run; for what was saved of this one: walkaway report {run}"
    assert advice(run) == report
    (run / "requests.parquet").write_bytes(b"PAR1 but no more")
    assert advice(run) == report
    (run / "requests.parquet").unlink()
    assert advice(run) == "a whole run"
    (run / "shards").mkdir()
    shard = run / "shards" / "requests-here-1.ndjson"
    shard.touch()
    assert advice(run) == "a whole run"
    shard.write_text("{}")
    assert advice(run) == report
    RunFolder(tmp_path / "run").write_rows(RunRows())
    assert advice(run) == "a whole run"


def test_a_killed_run_with_arms_has_the_requests_of_its_rounds(tmp_path: Path) -> None:
    run = gated.save_rounds(tmp_path / "run", 1.0, 1.0, 1.0)
    (run / "requests.parquet").unlink()
    assert RunFolder(run).may_have_requests()
    RunFolder(run / "rounds" / "1-build").write_rows(RunRows())
    assert not RunFolder(run).may_have_requests()


@pytest.mark.parametrize(
    ("summary", "said"),
    [
        ({"schema_version": 99}, "summary.json: has schema version 99"),
        (
            {"outcomes": {"abandoned": 500}},
            "requests.parquet has 3 rows, and summary.json is of 500",
        ),
        ({"outcomes": {"abandoned": 3}}, "did not end as summary.json counts them"),
        (None, "cut short before it was judged"),
    ],
)
def test_a_summary_that_is_not_of_the_rows_is_not_judged(
    summary: dict[str, Any] | None,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = gated.save(tmp_path / "run", gated.summary(**(summary or {})))
    if summary is None:
        (run / "summary.json").unlink()
    assert said in undecided(run, capsys)


def spoil(file: Path, content: bytes | None) -> None:
    file.unlink() if content is None else file.write_bytes(content)


CUT = pytest.mark.parametrize("content", [b"PAR1 but no more", None], ids=["cut", "gone"])


@CUT
@pytest.mark.parametrize("name", ["requests", "lifecycle"])
@pytest.mark.parametrize("part", ["", "probe/"])
def test_a_damaged_file_of_rows_is_named(
    part: str, name: str, content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = gated.save(tmp_path / "run")
    RunFolder.claim(run / "probe").write_rows(RunRows())
    assert gate(run) == 0
    said(capsys)
    spoil(run / part / f"{name}.parquet", content)
    assert f"{part}{name}.parquet cannot be read" in undecided(run, capsys)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("requests", b"PAR1 but no more", "1-build/requests.parquet cannot be read"),
        ("steps", b"PAR1 but no more", "1-build/steps.parquet cannot be read"),
        ("requests", None, "the files of the rounds have 0 rows"),
    ],
)
def test_a_damaged_round_is_named(
    name: str,
    content: bytes | None,
    reason: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = gated.save_rounds(tmp_path / "run", 1.0, 1.0, 1.0)
    spoil(run / "rounds" / "1-build" / f"{name}.parquet", content)
    assert gate(run, "build: cancel_latency_steps.p99 <= 2") == 4
    assert reason in said(capsys)["checks"][0]["reason"]


@pytest.mark.parametrize("name", RECORDS)
def test_a_byte_flipped_in_any_column_of_any_file_is_found(name: str, tmp_path: Path) -> None:
    run = gated.save(tmp_path / "run")
    file = run / f"{name}.parquet"
    whole = file.read_bytes()
    columns = pq.read_metadata(file).row_group(0)
    read_run(run)
    for number in range(columns.num_columns):
        column = columns.column(number)
        end = column.data_page_offset  # of a dictionary, whose last bytes are a value
        if not column.has_dictionary_page:
            end += column.total_compressed_size
        content = bytearray(whole)
        content[end - 1] ^= 255
        file.write_bytes(content)
        with pytest.raises(UnusableRunError, match=f"{name}.parquet cannot be read"):
            read_run(run)


NESTED = pytest.param('{"a":' * 100_000, id="nested")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema_version": 1}', NESTED])
@pytest.mark.parametrize("name", ["summary.json", "manifest.json"])
def test_a_damaged_file_is_no_pass(
    name: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = gated.save(tmp_path / "run")
    (run / name).write_text(text)
    assert name in undecided(run, capsys)


def test_an_empty_run_is_no_pass(tmp_path: Path) -> None:
    empty = gated.summary({}, outcomes={"abandoned": 0, "completed": 3})
    assert gate(gated.save(tmp_path / "run", empty)) == 4


def test_reports_are_written_for_a_run_that_cannot_be_judged_too(tmp_path: Path) -> None:
    run = gated.save(tmp_path / "run")
    (run / "summary.json").unlink()
    assert gate(run, junit=Path("gate.xml"), markdown=Path("gate.md")) == 4
    assert next(iter(junitparser.JUnitXml.fromfile("gate.xml"))).errors == 1
    assert "cannot decide" in Path("gate.md").read_text()
