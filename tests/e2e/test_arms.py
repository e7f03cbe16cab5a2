"""Several arms in rounds, on real processes: what is kept, what is compared, how it ends."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.running import ROOT, Harness, Run, finish, measure, wait_until, wait_until_gone

pytestmark = pytest.mark.e2e

WORKLOAD = """\
question = "Which arm is slower?"
headlines = ["itl_s"]
[run]
seed = 20
users = 6
max_seconds = 20
rounds = {rounds}
[load]
kind = "abandon"
abandon_after_tokens = [0, 4]
stay_share = 0.5
prompt_tokens = [8, 16]
answer_tokens = 2000
stay_tokens = 20
stop_after_abandons = {abandons}
[engine]
runner = "simulated"
sim_fixed_ms = 3
max_num_seqs = 4
[[arms]]
name = "fast"
[[arms]]
name = "other"
[arms.engine]
{other}
"""


def write(folder: Path, *, rounds: int, other: str, abandons: int = 12) -> Path:
    path = folder / "two.toml"
    path.write_text(WORKLOAD.format(rounds=rounds, other=other, abandons=abandons))
    return path


def report(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "harness", "report", str(folder)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("arms")
    return measure(write(folder, rounds=3, other="sim_fixed_ms = 12"), folder / "run")


@pytest.mark.slow
def test_every_run_is_a_run_like_any_other_and_its_rows_lie_in_one_file_too(parent: Run) -> None:
    runs = parent.rounds()
    kept = set()
    for name, run in runs.items():
        number, arm = name.split("-")
        assert run.manifest["status"] == run.summary["status"] == "complete"
        assert run.manifest["seed"] == 20 + int(number)
        assert run.metrics["cancel_latency_s"]["n"] >= 12
        assert run.rows("steps")
        kept |= {(int(number), arm, row["request_id"]) for row in run.rows("requests")}
    started = {name: run.manifest["window"]["load_started_ns"] for name, run in runs.items()}
    in_turn = ["1-fast", "1-other", "2-other", "2-fast", "3-fast", "3-other"]
    assert sorted(started, key=lambda name: started[name]) == in_turn
    rows = parent.rows("requests")
    assert {(row["round"], row["arm"], row["request_id"]) for row in rows} == kept
    assert len(rows) == len(kept)


@pytest.mark.slow
def test_the_report_can_be_drawn_again_and_the_summary_made_again(parent: Run) -> None:
    before = parent.summary
    for name in ("summary.json", "report.html"):
        (parent.folder / name).unlink()
    done = report(parent.folder)
    assert done.returncode == 0, done.stderr
    assert parent.summary == before
    assert "Which arm is slower?" in (parent.folder / "report.html").read_text()


def test_an_arm_that_cannot_run_does_not_cost_the_others(tmp_path: Path) -> None:
    workload = write(tmp_path, rounds=1, other="num_blocks = 3")
    ended = finish(workload, tmp_path / "run")
    assert ended.code == 2, ended.output
    assert "round 1 of 1, arm other: the engine refuses its settings" in ended.output
    assert "Traceback" not in ended.output
    summary = ended.run.summary
    assert summary["arms"]["fast"]["metrics"]["cancel_latency_s"]["n"] >= 12
    assert summary["arms"]["other"]["metrics"] == {}
    said = [one["text"] for one in summary["validity"] if one["level"] == "warning"]
    assert "1 of 2 runs gave no figures: 1-other" in said
    assert (ended.run.folder / "report.html").exists()


@pytest.mark.slow
def test_when_no_arm_can_run_nothing_is_left_behind(tmp_path: Path) -> None:
    workload = write(tmp_path, rounds=1, other="sim_fixed_ms = 5")
    ended = finish(workload, tmp_path / "run", "--set", "engine.num_blocks=3")
    assert ended.code == 2, ended.output
    assert not ended.run.folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_what_was_saved_before_an_early_end_is_kept_and_judged(
    tmp_path: Path, number: signal.Signals
) -> None:
    """By the run itself after Ctrl-C; by `report` after a kill, without the second run."""
    without_an_end = "sim_fixed_ms = 5\n[arms.load]\nstop_after_abandons = 100000"
    workload = write(tmp_path, rounds=2, other=without_an_end)
    shards = tmp_path / "run" / "rounds" / "1-other" / "shards"
    with Harness(workload, tmp_path / "run", "--set", "run.max_seconds=300") as harness:
        wait_until(
            lambda: any(shard.stat().st_size for shard in shards.glob("requests-*.ndjson")),
            "the second run is under load",
        )
        below = harness.below()
        harness.send(number)
        code = harness.wait()
        wait_until_gone(below)
    if number == signal.SIGINT:
        assert code == 130, harness.output
        assert "Traceback" not in harness.output
        assert set(harness.run.rounds()) == {"1-fast", "1-other"}
        assert sum(harness.run.summary["arms"]["other"]["outcomes"].values()) > 0
    else:
        done = report(harness.run.folder)
        assert done.returncode == 0, done.stderr
        assert harness.run.summary["arms"]["other"]["metrics"] == {}
    arms = harness.run.summary["arms"]
    assert harness.run.summary["status"] == "interrupted"
    assert arms["fast"]["metrics"]["cancel_latency_s"]["n"] >= 12
    assert (harness.run.folder / "report.html").exists()
