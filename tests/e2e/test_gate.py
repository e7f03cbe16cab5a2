"""The gate as CI runs it: the project's own, and the examples that are there to be copied."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import junitparser
import pytest
import yaml
from typer.testing import CliRunner

from harness.commands import app
from tests.e2e.running import ROOT, scripted_server

pytestmark = pytest.mark.e2e

EXAMPLES = ROOT / "docs" / "ci"

# A load that no machine is too slow for, and limits that do not depend on how fast it is.
SHORT = (
    "--set run.users=6 --set engine.max_num_seqs=4 --set load.stop_after_abandons=120 "
    '--set \'gate.limits=["ghost_rate.mean == 0", "leaked_slots.max == 0", '
    '"leaked_blocks.max == 0", "cancel_latency_steps.p50 < 1.5"]\''
)


def steps(file: str, job: str) -> list[dict[str, Any]]:
    """The steps of a job that run something."""
    content = yaml.safe_load((EXAMPLES / file).read_text())
    if file == "gitlab-ci.yml":
        return [{"run": line} for line in content[job]["script"]]
    return [step for step in content["jobs"][job]["steps"] if "run" in step]


class Job:
    """A step of CI, running in a repository into which the examples were copied."""

    def __init__(self, folder: Path, step: str, **environment: str) -> None:
        self.folder = folder
        shutil.copytree(EXAMPLES, folder / "ci")
        self._output = (folder / "output.txt").open("w+b")
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self._process = subprocess.Popen(
            ["sh", "-c", step],
            cwd=folder,
            env={**os.environ, "PATH": path, **environment},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Make sure that it is over."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._output.close()

    def code(self) -> int:
        return self._process.wait(110)

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text()

    def junit(self) -> dict[str, junitparser.TestCase]:
        (suite,) = junitparser.JUnitXml.fromfile(str(self.folder / "gate-run" / "gate.xml"))
        return {case.name: case for case in suite}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """The same gate on a good build (GitHub's step), on one that leaks, and on one that lets go a
    step later (both GitLab's), at once."""
    github, gitlab = steps("github-actions.yml", "gate")[-1], steps("gitlab-ci.yml", "gate")[-1]
    folders = {name: tmp_path_factory.mktemp(name) for name in ("good", "leaky", "late")}
    summary = folders["good"] / "step-summary.md"
    summary.touch()
    bad = f"{gitlab['run']} {SHORT} --set engine.allow_faults=true"
    leaks, is_late = (
        f"{bad} --set 'engine.faults=[\"{fault}\"]'"
        for fault in ("leak-blocks=1", "delay-abort=0.02")
    )
    with (
        Job(folders["good"], f"{github['run']} {SHORT}", GITHUB_STEP_SUMMARY=str(summary)) as good,
        Job(folders["leaky"], leaks, GITHUB_STEP_SUMMARY="") as leaky,
        Job(folders["late"], is_late, GITHUB_STEP_SUMMARY="") as late,
    ):
        assert good.code() == 0, good.output
        assert leaky.code() == 3, leaky.output
        assert late.code() == 3, late.output
    return {"good": good, "leaky": leaky, "late": late}


def test_the_projects_own_engine_passes_its_gate(jobs: dict[str, Job]) -> None:
    cases = jobs["good"].junit()
    assert len(cases) == 5, "the run, and four limits"
    assert all(case.is_passed for case in cases.values())
    assert "✅ walkaway gate: pass" in (jobs["good"].folder / "step-summary.md").read_text()


def test_a_build_that_leaks_does_not(jobs: dict[str, Job]) -> None:
    failed = [name for name, case in jobs["leaky"].junit().items() if not case.is_passed]
    assert failed == ["leaked_blocks.max == 0"]
    assert "❌ fail" in (jobs["leaky"].folder / "gate-run" / "gate.md").read_text()


def test_a_build_that_is_late_by_one_step_does_not(jobs: dict[str, Job]) -> None:
    failed = [name for name, case in jobs["late"].junit().items() if not case.is_passed]
    assert failed == ["cancel_latency_steps.p50 < 1.5"]


def test_servers_that_show_only_gauges_are_judged(tmp_path: Path) -> None:
    """At once: one that lets go of all, and one that forgets every twentieth."""
    step = steps("gitlab-ci.yml", "gate")[-1]["run"].replace(" gate", " gate_black_box")
    few = "--set run.users=6 --set run.max_seconds=30 --set load.stop_after_abandons=110"
    (tmp_path / "good").mkdir()
    (tmp_path / "bad").mkdir()
    with (
        scripted_server(step_s=0.01, slots=12, num_blocks=4096) as good,
        scripted_server(step_s=0.01, slots=12, num_blocks=4096, ghost_every=20) as bad,
        Job(
            tmp_path / "good",
            f"{step} --target {good.url} --engine vllm {few}",
            GITHUB_STEP_SUMMARY="",
        ) as passes,
        Job(
            tmp_path / "bad",
            f"{step} --target {bad.url} --engine vllm {few}",
            GITHUB_STEP_SUMMARY="",
        ) as fails,
    ):
        assert passes.code() == 0, passes.output
        assert fails.code() == 3, fails.output
        assert not fails.junit()["leaked_slots.max == 0"].is_passed


@pytest.fixture(scope="module")
def two_builds(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Two builds in turn; the new one hears of each abort three steps later."""
    folder = tmp_path_factory.mktemp("two-builds")
    step = steps("github-actions.yml", "two-builds")[-1]["run"]
    few = "--set run.rounds=3 --set load.stop_after_abandons=34"
    worse = (
        """sed -i '/name = "new"/{n;s/ 20"/ 20 --fault delay-abort=0.06"/}' ci/two_builds.toml"""
    )
    with Job(folder, f"{worse} && {step} {few}") as job:
        assert job.code() == 3, job.output
    return job


def test_two_builds_in_turn_are_gated_on_their_difference(two_builds: Job) -> None:
    failed = [name for name, case in two_builds.junit().items() if not case.is_passed]
    assert failed == ["new - old: cancel_latency_steps.mean <= 0.5"]


def test_the_examples_install_what_they_fetched(tmp_path: Path) -> None:
    fetch, install = (step["run"] for step in steps("gitlab-ci.yml", "gate")[:2])
    told = {**os.environ, "WALKAWAY": str(ROOT)}
    subprocess.run(["sh", "-c", fetch], cwd=tmp_path, env=told, check=True, timeout=60)
    assert install == "python -m pip install ./walkaway --constraint walkaway/constraints.txt"
    assert all((tmp_path / "walkaway" / name).exists() for name in ("pyproject.toml", "harness"))
    assert (tmp_path / "walkaway" / "constraints.txt").is_file()
    content = yaml.safe_load((EXAMPLES / "github-actions.yml").read_text())
    for job in content["jobs"]:
        _, _, fetched, *_ = content["jobs"][job]["steps"]
        assert fetched["with"]["path"] == "walkaway"
        assert steps("github-actions.yml", job)[1]["run"] == install


def test_the_examples_say_that_nobody_told_them_where_walkaway_is(tmp_path: Path) -> None:
    told = {**os.environ, "WALKAWAY": ""}
    first = [steps("gitlab-ci.yml", "gate")[0]]
    first += [steps("github-actions.yml", job)[0] for job in ("gate", "two-builds")]
    for step in first:
        done = subprocess.run(
            ["sh", "-c", step["run"]], cwd=tmp_path, env=told, capture_output=True, text=True
        )
        assert done.returncode != 0
        assert "WALKAWAY: set this variable" in done.stderr


# A baseline, from the same run: whose new build is known to be the slower one.

STEPS_LIMIT = "new / baseline: cancel_latency_steps.mean <= 1.7"


class Baseline:
    """The commands that keep one and hold a run to it, in a folder of their own."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self.file = Path("results") / "baselines" / "two_builds.json"

    def gate(self, limit: str, *flags: str) -> tuple[int, str]:
        """Exit code and what was printed."""
        Path("limits.txt").write_text(limit)
        order = ["gate", str(self._run), "--limits", "limits.txt", *flags]
        result = CliRunner().invoke(app, order)
        return result.exit_code, result.output

    def change(self, change: Callable[[dict[str, Any]], None]) -> None:
        content = json.loads(self.file.read_text())
        change(content["measured"])
        self.file.write_text(json.dumps(content))


@pytest.fixture
def baseline(two_builds: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Baseline:
    monkeypatch.chdir(tmp_path)
    saved = Baseline(two_builds.folder / "gate-run")
    code, said = saved.gate("new: leaked_blocks.max == 0", "--save-baseline")
    assert (code, saved.file.is_file()) == (0, True), said
    return saved


def test_a_build_like_its_baseline_passes_and_a_slower_one_does_not(baseline: Baseline) -> None:
    assert baseline.gate(STEPS_LIMIT)[0] == 0
    baseline.change(lambda of: of["sides"].update(new=of["sides"]["old"]))
    code, said = baseline.gate(STEPS_LIMIT)
    assert (code, "fail" in said) == (3, True)


def from_a_faster_machine(measured: dict[str, Any]) -> None:
    for side in measured["sides"].values():
        side["conditions"]["machine"].update(cpu="a faster one")


def test_on_other_hardware_times_cannot_be_decided_and_steps_can(baseline: Baseline) -> None:
    baseline.change(from_a_faster_machine)
    assert baseline.gate(STEPS_LIMIT)[0] == 0
    code, said = baseline.gate("new / baseline: cancel_latency_s.mean <= 100", "--json")
    assert code == 4
    assert "a time on another machine than the baseline's (a faster one" in said
