"""The suite's documents and CI files: they say what there is, and fail on new failures only."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.harness.documents import ROOT
from tests.harness.test_documents import flags_by_command
from tools.truth.conform_docs import FOLDER, pages

CI = ROOT / "docs" / "ci"
ACTION, JOB = CI / "conform" / "action.yml", CI / "conform-gitlab.yml"


def test_the_pages_of_the_cases_and_faults_are_up_to_date() -> None:
    for name, text in pages().items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, "run `make conform-docs`"


def run_of_action() -> str:
    action = yaml.safe_load(ACTION.read_text())
    (step,) = (one for one in action["runs"]["steps"] if one.get("name") == "Conform")
    inputs = set(re.findall(r"inputs\.([\w-]+)", ACTION.read_text()))
    assert inputs == action["inputs"].keys()
    assert "inputs." not in step["run"], "an input is no script"
    return str(step["run"])


def run_of_job() -> str:
    lines = yaml.safe_load(JOB.read_text())["conform"]["script"]
    return str(lines[-1])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a `walkaway` that notes its arguments and ends as EXIT says."""
    shutil.copytree(CI, tmp_path / "walkaway" / "docs" / "ci")
    stub = tmp_path / "bin" / "walkaway"
    stub.parent.mkdir()
    stub.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > given\nexit $EXIT\n')
    stub.chmod(0o755)
    return tmp_path


def code_of(script: str, folder: Path, code: int, **variables: str) -> int:
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    own = {
        "PATH": path,
        "EXIT": str(code),
        "GITHUB_ACTION_PATH": str(folder / "walkaway" / "docs" / "ci" / "conform"),
    }
    done = subprocess.run(["bash", "-ec", script], cwd=folder, env=own | variables, check=False)
    return done.returncode


GIVEN = {
    "TARGET": "http://127.0.0.1:8000",
    "ENGINE": "vllm",
    "MODEL": "a model",
    "EXPECTED": "known",
}


@pytest.mark.parametrize("script", [run_of_action(), run_of_job()], ids=["action", "job"])
def test_only_new_failures_fail(script: str, folder: Path) -> None:
    more = GIVEN | {"MORE": "--quick --slots 8"}
    expected = {0: 0, 3: 3, 4: 0, 5: 5, 2: 2}
    assert {code: code_of(script, folder, code, **more) for code in expected} == expected
    assert code_of(script, folder, 4, **more, FAIL_ON_UNDECIDED="true") == 4
    given = (folder / "given").read_text().splitlines()
    flags = {word for word in given if word.startswith("--")}
    assert {"--target", "--expected-failures", "--junit", "--markdown", "--out"} <= flags
    assert flags <= flags_by_command()["conform"]


def test_what_the_action_was_not_given_is_not_asked_for(folder: Path) -> None:
    empty = GIVEN | {"MODEL": "", "EXPECTED": "", "MORE": ""}
    assert code_of(run_of_action(), folder, 0, **empty) == 0
    given = (folder / "given").read_text().splitlines()
    assert given[:5] == ["conform", "--target", GIVEN["TARGET"], "--engine", "vllm"]
    assert "--model" not in given
    assert "--expected-failures" not in given
