"""The gate as CI runs it: the project's own, and the examples that are there to be copied."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import junitparser
import pytest
import yaml

from tests.e2e.running import MOST_TRIES, ROOT, UNDECIDED, scripted_server, until_decided

JOB_S = 110

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(MOST_TRIES * JOB_S + 70)]

EXAMPLES = ROOT / "docs" / "ci"

# A load that no machine is too slow for, and limits that do not depend on how fast it is.
SHORT = (
    "--set run.users=6 --set engine.max_num_seqs=4 --set load.stop_after_abandons=120 "
    '--set \'gate.limits=["ghost_rate.mean == 0", "leaked_slots.max == 0", '
    '"leaked_blocks.max == 0", "cancel_latency_steps.p50 < 1.5"]\''
)


def steps(file: str, job: str) -> list[dict[str, Any]]:
    content = yaml.safe_load((EXAMPLES / file).read_text())
    if file == "gitlab-ci.yml":
        return [{"run": line} for line in content[job]["script"]]
    return [step for step in content["jobs"][job]["steps"] if "run" in step]


class Job:
    """A step of CI, run to its end in a repository into which the examples were copied."""

    def __init__(self, folder: Path, *, step: str, is_on_github: bool) -> None:
        self.folder = folder
        self.summary = folder / "step-summary.md"
        shutil.copytree(EXAMPLES, folder / "ci")
        self.summary.touch()
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        summary = str(self.summary) if is_on_github else ""
        with (folder / "output.txt").open("wb") as output:
            process = subprocess.Popen(
                ["sh", "-c", step],
                cwd=folder,
                env={**os.environ, "PATH": path, "GITHUB_STEP_SUMMARY": summary},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self.code = process.wait(JOB_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def __str__(self) -> str:
        return f"exit code {self.code}\n{self.output}"

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text()

    def junit(self) -> dict[str, junitparser.TestCase]:
        (suite,) = junitparser.JUnitXml.fromfile(str(self.folder / "gate-run" / "gate.xml"))
        return {case.name: case for case in suite}


def judged(run: Callable[[Path], Job], folder: Path, *, code: int) -> Job:
    def make(number: int) -> Job:
        job = run(folder / str(number))
        assert job.code in (code, UNDECIDED), job.output
        return job

    return until_decided(make, lambda job: job.code == code and job.junit()["the run"].is_passed)


def not_passed(job: Job) -> list[str]:
    return [name for name, case in job.junit().items() if not case.is_passed]


def test_the_projects_own_engine_passes_its_gate(tmp_path: Path) -> None:
    step = f"{steps('github-actions.yml', 'gate')[-1]['run']} {SHORT}"
    good = judged(partial(Job, step=step, is_on_github=True), tmp_path, code=0)
    cases = good.junit()
    assert len(cases) == 5, "the run, and four limits"
    assert all(case.is_passed for case in cases.values())
    assert "✅ walkaway gate: pass" in good.summary.read_text()


@pytest.mark.slow
def test_a_build_with_a_fault_fails_by_the_limit_that_it_breaks(tmp_path: Path) -> None:
    step = f"{steps('gitlab-ci.yml', 'gate')[-1]['run']} {SHORT}"
    step += " --set engine.allow_faults=true --set 'engine.faults=[\"leak-blocks=1\"]'"
    bad = judged(partial(Job, step=step, is_on_github=False), tmp_path, code=3)
    assert not_passed(bad) == ["leaked_blocks.max == 0"]
    assert "❌ fail" in (bad.folder / "gate-run" / "gate.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("ghost_every", "code"), [(0, 0), (20, 3)])
def test_a_server_that_shows_nothing_passes_if_it_forgets_nobody(
    ghost_every: int, code: int, tmp_path: Path
) -> None:
    """GitLab's step, on a server of which nothing is known."""
    step = steps("gitlab-ci.yml", "gate")[-1]["run"].replace(" gate", " gate_black_box")
    few = "--set run.max_seconds=15 --set load.slots=12 --set gate.min_abandons=20"

    def run(folder: Path) -> Job:
        script: dict[str, float] = {"step_s": 0.01, "slots": 12, "num_blocks": 4096}
        with scripted_server(**script, ghost_every=ghost_every) as server:
            target = f"--target {server.url} --engine openai"
            return Job(folder, step=f"{step} {target} {few}", is_on_github=False)

    job = judged(run, tmp_path, code=code)
    assert ("cancel_latency_s.max < 2" in not_passed(job)) == (ghost_every > 0)


@pytest.mark.slow
def test_two_builds_in_turn_are_gated_on_their_difference(tmp_path: Path) -> None:
    """The new one hears of each abort three steps later."""
    step = steps("github-actions.yml", "two-builds")[-1]["run"]
    few = "--set run.rounds=3 --set load.stop_after_abandons=34"
    worse = (
        """sed -i '/name = "new"/{n;s/ 20"/ 20 --fault delay-abort=0.06"/}' ci/two_builds.toml"""
    )
    job = partial(Job, step=f"{worse} && {step} {few}", is_on_github=True)
    two_builds = judged(job, tmp_path, code=3)
    assert not_passed(two_builds) == ["new - old: cancel_latency_steps.mean <= 0.5"]


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
