"""Runs side by side: what is said, what is refused, what a terminal of 80 columns shows.

The golden runs hold the figures of a comparison, `analysis` and the page its rules.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.commands.index import app
from harness.compare.comparison import Comparison, compare_runs
from harness.errors import ConfigError
from harness.export.library import load_run
from tests.conftest import Snapshot
from tests.made_up.changed import change, change_metric, linked_copy, with_arms
from tests.made_up.run import save_judged


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A cancel of 11 ms in steps of 10 ms, and one of 31 ms in steps of 20 ms."""
    folder = tmp_path_factory.mktemp("runs")
    before = save_judged(folder / "before")
    after = save_judged(folder / "after", step_ms=20, freed_ms=131)
    change_metric(before, "cancel_latency_s", p50_ci95=(0.010, 0.012))
    change_metric(after, "cancel_latency_s", p50_ci95=(0.030, 0.032))
    return before, after


def compared(*paths: Path) -> Comparison:
    first, second = (load_run(path) for path in paths)
    (found,) = compare_runs(first, second)
    return found


@pytest.mark.parametrize("width", [80, 140])
def test_the_table_fits_the_terminal_and_marks_what_is_sure(
    width: int, runs: tuple[Path, Path], snapshot: Snapshot
) -> None:
    command = ["compare", *map(str, runs)]
    result = CliRunner().invoke(app, command, env={"COLUMNS": str(width)})
    assert result.exit_code == 0, result.exception
    assert max(map(len, result.output.splitlines())) <= width
    snapshot(f"compare/{width}-columns", result.output)


def test_without_its_rows_a_run_is_compared_by_its_figures(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    other = linked_copy(runs[1], tmp_path / "other")
    (other / "requests.parquet").unlink()
    said = [one.text for one in compared(runs[0], other).remarks]
    assert any("requests are not compared one by one" in text for text in said)


def test_other_questions_are_refused_or_left_out(runs: tuple[Path, Path], tmp_path: Path) -> None:
    first, second = map(str, runs)
    other = linked_copy(runs[1], tmp_path / "other")
    change(other, "manifest.json", workload={"name": "soak"})
    among = CliRunner().invoke(app, ["compare", first, str(other), second, "--json"])
    assert [one["candidate"] for one in json.loads(among.stdout)] == ["after"]
    assert "left out: " in among.stderr
    assert "they are of different workloads" in " ".join(among.stderr.split())
    for words, message in (
        ([first, str(other)], "cannot be compared: they are of different workloads"),
        ([first, second, "--json", "-o", "page.html"], "choose one of them"),
    ):
        result = CliRunner().invoke(app, ["compare", *words])
        assert isinstance(result.exception, ConfigError)
        assert message in str(result.exception)


def test_arms_are_compared_by_name_each_under_its_own_load(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    x = with_arms(runs[0], tmp_path / "x", "off", "on", stay_share=0.2)
    y = with_arms(runs[0], tmp_path / "y", "on", "more", stay_share=0.7)
    z = with_arms(runs[0], tmp_path / "z", "other")
    found = compared(x, y)
    assert found.arm == "on"
    assert found.shifts["cancel_latency_s"].n == 1
    assert "different [load]: stay_share 0.2 / 0.7" in [one.text for one in found.remarks]
    with pytest.raises(ConfigError, match=r"no arm in common \(off, on and other\)"):
        compared(x, z)
    with pytest.raises(ConfigError, match="only one of them has arms"):
        compared(x, runs[0])


def test_the_page_is_drawn_by_the_command(runs: tuple[Path, Path], tmp_path: Path) -> None:
    page = tmp_path / "comparison.html"
    command = [sys.executable, "-m", "harness", "compare", *map(str, runs), "-o", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"{page}\n"
    assert "after against before" in page.read_text(encoding="utf-8")
