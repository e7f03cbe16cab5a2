"""Runs side by side: what is said, what is refused, what a terminal of 80 columns shows."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from harness.commands.verbs import app
from harness.errors import ConfigError
from harness.export.comparison import Comparison, compare_runs
from harness.export.library import load_run
from tests.conftest import Snapshot
from tests.made_up.run import save_judged
from tests.made_up.summaries import content_of_arms


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A cancel of 11 ms in steps of 10 ms, and one of 31 ms in steps of 20 ms."""
    folder = tmp_path_factory.mktemp("runs")
    return (
        save_judged(folder / "before"),
        save_judged(folder / "after", step_ms=20, freed_ms=131),
    )


def compared(*paths: Path) -> Comparison:
    first, second = (load_run(path) for path in paths)
    (found,) = compare_runs(first, second)
    return found


def changed(path: Path, name: str, **changes: Any) -> None:
    content = json.loads((path / name).read_text())
    (path / name).write_text(json.dumps(content | changes))


def test_times_are_compared_in_steps_too(runs: tuple[Path, Path]) -> None:
    found = compared(*runs)
    pair = next(one for one in found.pairs if one.metric == "cancel_latency_s")
    assert pair.difference == pytest.approx(0.020)
    assert pair.ratio == pytest.approx(31 / 11)
    assert pair.ratio_in_steps == pytest.approx(31 / 11 / 2)
    assert any("a step takes 10 ms and 20 ms" in one.text for one in found.remarks)
    assert found.shifts["cancel_latency_s"].n == 1


@pytest.mark.parametrize("width", [80, 140])
def test_the_table_fits_the_terminal(
    width: int, runs: tuple[Path, Path], snapshot: Snapshot
) -> None:
    command = ["compare", *map(str, runs)]
    result = CliRunner().invoke(app, command, env={"COLUMNS": str(width)})
    assert result.exit_code == 0, result.exception
    assert max(map(len, result.output.splitlines())) <= width
    snapshot(f"compare/{width}-columns", result.output)


def test_the_terminal_marks_what_the_page_calls_sure(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    """Twice as long in steps twice as long is not; three times as long is."""
    copies = [str(shutil.copytree(run, tmp_path / run.name)) for run in runs]
    for name, times, marks in (("ttft_s", 2, 0), ("cancel_latency_s", 3, 1)):
        for copy, p50 in zip(map(Path, copies), (0.01, 0.01 * times), strict=True):
            metrics = json.loads((copy / "summary.json").read_text())["metrics"]
            metrics[name] |= {"p50": p50, "p50_ci95": (p50 * 0.99, p50 * 1.01)}
            changed(copy, "summary.json", metrics=metrics)
        result = CliRunner().invoke(app, ["compare", *copies], env={"COLUMNS": "140"})
        (line,) = (line for line in result.output.splitlines() if f" {name} p50" in f" {line}")
        assert line.count("*") == marks
        legend = "* surely better or worse as measured and in steps"
        assert (legend in result.output) == bool(marks)


def test_several_candidates_as_json(runs: tuple[Path, Path]) -> None:
    first, second = map(str, runs)
    result = CliRunner().invoke(app, ["compare", first, second, first, "--json"])
    found = json.loads(result.output)
    assert [one["candidate"] for one in found] == ["after", "before"]
    same = next(one for one in found[1]["pairs"] if one["metric"] == "cancel_latency_s")
    assert same["difference"] == 0


def with_arms(folder: Path, run: Path, *arms: str, **summary: Any) -> Path:
    """The run as one round of each of these arms; `summary`: more of each arm's."""
    shutil.copytree(run, folder)
    whole = json.loads((run / "summary.json").read_text()) | summary
    changed(folder, "summary.json", **content_of_arms(dict.fromkeys(arms, whole)))
    for arm in arms:
        shutil.copytree(run, folder / "rounds" / f"1-{arm}")
    return folder


def test_tokens_of_an_arm_that_are_counted_differently_are_not_compared(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    x, y = (
        with_arms(tmp_path / counting, runs[0], "on", token_counting=counting)
        for counting in ("usage", "events")
    )
    found = compared(x, y)
    wasted = next(one for one in found.pairs if one.metric == "wasted_tokens")
    assert wasted.note == "tokens are counted by usage and by events"
    assert any("no figure of tokens is compared" in one.text for one in found.remarks)


def test_a_run_that_is_not_whole_is_told_of(runs: tuple[Path, Path], tmp_path: Path) -> None:
    other = Path(shutil.copytree(runs[1], tmp_path / "other"))
    said = [{"level": "invalid", "text": "nobody left"}]
    changed(other, "summary.json", status="interrupted", validity=said)
    (other / "requests.parquet").unlink()
    texts = [(one.level, one.text) for one in compared(runs[0], other).remarks]
    assert texts[0] == ("invalid", "the candidate: nobody left")
    assert ("warning", "the candidate is not complete: interrupted") in texts
    assert any("requests are not compared one by one" in text for _, text in texts)


def test_other_questions_are_refused(runs: tuple[Path, Path], tmp_path: Path) -> None:
    other = Path(shutil.copytree(runs[1], tmp_path / "other"))
    changed(other, "manifest.json", workload={"name": "soak"})
    result = CliRunner().invoke(app, ["compare", str(runs[0]), str(other)])
    assert isinstance(result.exception, ConfigError)
    assert "cannot be compared: they are of different workloads" in str(result.exception)
    among = CliRunner().invoke(app, ["compare", *map(str, (runs[0], other, runs[1])), "--json"])
    assert [one["candidate"] for one in json.loads(among.stdout)] == ["after"]
    assert "left out: " in among.stderr
    assert "they are of different workloads" in " ".join(among.stderr.split())


def test_arms_are_compared_by_name(runs: tuple[Path, Path], tmp_path: Path) -> None:
    x = with_arms(tmp_path / "x", runs[0], "off", "on")
    y = with_arms(tmp_path / "y", runs[0], "on", "more")
    z = with_arms(tmp_path / "z", runs[0], "other")
    found = compared(x, y)
    assert found.arm == "on"
    assert found.shifts["cancel_latency_s"].n == 1
    with pytest.raises(ConfigError, match=r"no arm in common \(off, on and other\)"):
        compared(x, z)
    with pytest.raises(ConfigError, match="only one of them has arms"):
        compared(x, runs[0])


def test_an_arm_is_held_to_the_load_of_its_own_runs(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    x, y = (with_arms(tmp_path / name, runs[0], "on") for name in ("x", "y"))
    for run, stay_share in ((x, 0.2), (y, 0.7)):
        of_arm = run / "rounds" / "1-on"
        workload = json.loads((of_arm / "manifest.json").read_text())["workload"]
        load = {"kind": "abandon", "stay_share": stay_share}
        changed(of_arm, "manifest.json", workload=workload | {"load": load})
    said = [one.text for one in compared(x, y).remarks]
    assert "different [load]: stay_share 0.2 / 0.7" in said


def test_a_page_and_json_are_one_too_many(runs: tuple[Path, Path]) -> None:
    result = CliRunner().invoke(app, ["compare", *map(str, runs), "--json", "-o", "page.html"])
    assert isinstance(result.exception, ConfigError)
    assert "choose one of them" in str(result.exception)


def test_the_page_is_drawn_by_the_command(runs: tuple[Path, Path], tmp_path: Path) -> None:
    page = tmp_path / "comparison.html"
    command = [sys.executable, "-m", "harness", "compare", *map(str, runs), "-o", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"{page}\n"
    assert "after against before" in page.read_text(encoding="utf-8")
