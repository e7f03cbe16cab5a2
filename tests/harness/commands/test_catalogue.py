"""What there is to choose from, one explained, and the workload that one begins with."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.commands.catalogue import TRUST_IN_WORDS
from harness.commands.verbs import app
from harness.errors import ConfigError
from harness.run.run_config import RunConfig, resolve_run
from harness.workload.workload import (
    SHIPPED_TARGETS,
    SHIPPED_WORKLOADS,
    load_target,
    load_workload,
    shipped,
)

TEMPLATE = Path("harness/workload_template.toml")


def said(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.exception
    return result.output


def test_a_workload_is_explained_with_its_keys_and_their_comments() -> None:
    text = said("workloads", "chunk_frontier")
    assert text.startswith("chunk_frontier\n")
    assert "Run it: walkaway run chunk_frontier" in text
    assert "Arms, run in turn: " in text
    assert text.endswith(shipped(SHIPPED_WORKLOADS)["chunk_frontier"].read_text())


def test_a_workload_is_known_by_its_path_too(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(shipped(SHIPPED_WORKLOADS)["demo"].read_text())
    assert str(mine) in said("workloads", str(mine))


@pytest.mark.parametrize("name", sorted(shipped(SHIPPED_TARGETS)))
def test_each_metric_of_a_target_is_explained_in_words(name: str) -> None:
    text = re.sub(r"\s+", " ", said("targets", name))
    for role, source in load_target(name).metrics.items():
        assert f" {role} {source.name}" in text
        assert f"Refreshed: {source.refresh}" in text
        assert TRUST_IN_WORDS[source.trust] in text


def test_lists_and_explanations_are_there_as_json() -> None:
    assert set(json.loads(said("workloads", "--json"))) == set(shipped(SHIPPED_WORKLOADS))
    assert set(json.loads(said("targets", "--json"))) == set(shipped(SHIPPED_TARGETS))
    assert json.loads(said("workloads", "demo", "--json"))["run"]["users"] == 12
    assert json.loads(said("targets", "vllm", "--json"))["settle_s"] == 5


@pytest.mark.parametrize("what", ["workloads", "targets"])
def test_an_unknown_name_is_answered_with_those_that_there_are(what: str) -> None:
    result = CliRunner().invoke(app, [what, "no-such"])
    assert isinstance(result.exception, ConfigError)
    assert "unknown" in str(result.exception)


def test_the_template_can_be_run_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    assert said("init", str(file)) == f"wrote {file}; run it: walkaway run {file}\n"
    assert resolve_run(RunConfig(workload=str(file))).workload.name == "mine"


def test_every_example_in_the_template_holds(tmp_path: Path) -> None:
    file = tmp_path / "all.toml"
    file.write_text(TEMPLATE.read_text().replace("#| ", ""))
    workload = load_workload(str(file))
    assert [arm.name for arm in workload.arms] == ["without", "with"]
    assert workload.arrivals.kind == "poisson"
    assert workload.run.processes == 2


def test_every_setting_of_the_template_is_explained() -> None:
    keys = [line for line in TEMPLATE.read_text().splitlines() if " = " in line and line[0] != "#"]
    unexplained = [line for line in keys if "#" not in line and not line.startswith("question")]
    assert not unexplained


def test_a_file_is_overwritten_only_by_force(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("mine")
    result = CliRunner().invoke(app, ["init", str(file)])
    assert isinstance(result.exception, ConfigError)
    assert "replace it with --force" in str(result.exception)
    assert file.read_text() == "mine"
    said("init", str(file), "--force")
    assert file.read_text() == TEMPLATE.read_text()


def test_a_template_that_cannot_be_written_is_a_message(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["init", str(tmp_path / "no" / "such" / "folder.toml")])
    assert isinstance(result.exception, ConfigError)
    assert "cannot be written" in str(result.exception)
