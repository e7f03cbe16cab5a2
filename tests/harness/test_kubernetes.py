"""The example for Kubernetes: it can be read, and its programs know their options."""

import argparse
import subprocess
from pathlib import Path
from typing import Any

import pytest

from harness.locust.options import add_arguments

EXAMPLE = Path(__file__).parents[2] / "docs" / "kubernetes.yaml"


@pytest.fixture
def parts() -> list[dict[str, Any]]:
    return list(pytest.importorskip("yaml").safe_load_all(EXAMPLE.read_text()))


def words(job: dict[str, Any]) -> list[str]:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (script,) = container["args"]
    return str(script).replace(";", " ").split()


def test_the_example_is_a_master_its_address_and_its_workers(parts: list[dict[str, Any]]) -> None:
    service, master, worker = parts
    assert [one["kind"] for one in parts] == ["Service", "Job", "Job"]
    labels = master["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels
    assert "--master" in words(master)
    options = words(worker)
    assert options[options.index("--master-host") + 1] == service["metadata"]["name"]
    expected = words(master)[words(master).index("--expect-workers") + 1]
    assert int(expected) == worker["spec"]["parallelism"] == worker["spec"]["completions"]

    parser = argparse.ArgumentParser()
    add_arguments(parser.add_argument_group("walkaway"))
    known = {option for action in parser._actions for option in action.option_strings}
    used = {word for job in parts[1:] for word in words(job) if word.startswith("--walkaway-")}
    assert "--walkaway-rows" in used
    assert used <= known


@pytest.mark.slow
@pytest.mark.e2e
def test_a_pod_ends_as_its_load_ended(parts: list[dict[str, Any]], tmp_path: Path) -> None:
    """After the wait in which its rows can be fetched, here a short one."""
    for name, body in {"locust": "exit 5", "sleep": "exit 0", "python": "echo ."}.items():
        (program := tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
    for job in parts[1:]:
        (container,) = job["spec"]["template"]["spec"]["containers"]
        command = [*container["command"], *container["args"]]
        ended = subprocess.run(command, env={"PATH": f"{tmp_path}:/bin"}, check=False)
        assert ended.returncode == 5
