"""The example for Kubernetes: it can be read, and what it starts knows the options it is given."""

import argparse
import subprocess
from pathlib import Path
from typing import Any

import pytest

from harness.load.options import add_arguments

EXAMPLE = Path(__file__).parents[2] / "docs" / "kubernetes.yaml"


def words(job: dict[str, Any]) -> list[str]:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (script,) = container["args"]
    return str(script).replace(";", " ").split()


def test_the_example_is_a_master_its_address_and_its_workers() -> None:
    yaml = pytest.importorskip("yaml")
    service, master, worker = yaml.safe_load_all(EXAMPLE.read_text())
    assert [one["kind"] for one in (service, master, worker)] == ["Service", "Job", "Job"]
    labels = master["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels
    assert "--master" in words(master)
    options = words(worker)
    assert options[options.index("--master-host") + 1] == service["metadata"]["name"]
    expected = words(master)[words(master).index("--expect-workers") + 1]
    assert int(expected) == worker["spec"]["parallelism"] == worker["spec"]["completions"]


@pytest.mark.slow
@pytest.mark.e2e
def test_a_pod_ends_as_its_load_ended(tmp_path: Path) -> None:
    """After the wait in which its rows can be fetched, here a short one."""
    yaml = pytest.importorskip("yaml")
    for name, body in {"locust": "exit 5", "sleep": "exit 0", "python": "echo ."}.items():
        (program := tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
    _, *jobs = yaml.safe_load_all(EXAMPLE.read_text())
    for job in jobs:
        (container,) = job["spec"]["template"]["spec"]["containers"]
        command = [*container["command"], *container["args"]]
        ended = subprocess.run(command, env={"PATH": f"{tmp_path}:/bin"}, check=False)
        assert ended.returncode == 5


def test_its_options_are_ours() -> None:
    yaml = pytest.importorskip("yaml")
    parser = argparse.ArgumentParser()
    add_arguments(parser.add_argument_group("walkaway"))
    known = {option for action in parser._actions for option in action.option_strings}
    _, *jobs = yaml.safe_load_all(EXAMPLE.read_text())
    used = {word for job in jobs for word in words(job) if word.startswith("--walkaway-")}
    assert "--walkaway-rows" in used
    assert used <= known
