"""A run that was cut short is judged by whatever rows it has left: `walkaway report`."""

import shutil
from pathlib import Path

import pytest

from harness.errors import ConfigError
from harness.gate.judge import GateVerdict, judge
from harness.gate.limits import parse_limits
from harness.gate.run import read_run
from harness.records import Summary
from harness.run.pipeline import draw_report
from harness.run.rounds import complete_summary
from harness.store.run_folder import RECORDS, RunFolder

RECORDED = Path(__file__).parents[2] / "golden" / "runs"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run whose rows were saved, and that was not judged."""
    return RunFolder(Path(shutil.copytree(RECORDED / "clean", tmp_path / "run")))


def judged(folder: RunFolder) -> Summary:
    complete_summary(folder)
    summary = folder.read_summary()
    assert isinstance(summary, Summary)
    return summary


def test_a_killed_run_is_judged_by_its_shards_which_stay(tmp_path: Path) -> None:
    folder = RunFolder(Path(shutil.copytree(RECORDED / "killed", tmp_path / "run")))
    before = sorted(path.name for path in folder.shards.iterdir())
    summary = judged(folder)
    assert summary.outcomes["abandoned"] > 0
    assert summary.status == "interrupted"
    assert any("was not saved to its end" in one.text for one in summary.validity)
    assert sorted(path.name for path in folder.shards.iterdir()) == before
    (folder.path / "summary.json").unlink()
    (folder.path / "steps.parquet").unlink()  # a full disk ended the saving before
    again = judged(folder)
    assert (again.outcomes, again.validity) == (summary.outcomes, summary.validity)
    assert draw_report(folder) == folder.report


@pytest.mark.parametrize("name", [name for name in RECORDS if name != "requests"])
@pytest.mark.parametrize("damage", ["missing", "cut off"])
def test_a_table_that_is_lost_costs_only_its_own_figures(
    folder: RunFolder, name: str, damage: str
) -> None:
    table = folder.path / f"{name}.parquet"
    whole = table.read_bytes()
    table.unlink() if damage == "missing" else table.write_bytes(whole[: len(whole) // 2])
    summary = judged(folder)
    assert summary.outcomes["abandoned"] > 0
    (said,) = [one.text for one in summary.validity if f"{name}.parquet" in one.text]
    assert said.endswith("what it held is in no figure")
    kept = folder.path / f"{name}.parquet.damaged"
    assert kept.exists() == (damage == "cut off")
    assert (kept.name in said) == kept.exists()
    limits = parse_limits(["ttft_s.p50 < 9"], source="", arms=())
    found = judge(read_run(folder.path), limits, run="run", fewest_abandons=0)
    assert found.verdict is GateVerdict.CANNOT_DECIDE


def test_a_run_without_rows_has_nothing_to_report(folder: RunFolder) -> None:
    (folder.path / "requests.parquet").unlink()
    with pytest.raises(ConfigError, match="was killed before a row of its load was written"):
        complete_summary(folder)
