"""The shipped workloads and targets are listed and explained; the template runs."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.commands.catalogue import GROUPS
from harness.commands.index import app
from harness.errors import ConfigError
from harness.run.run_config import RunConfig, resolve_run
from harness.workload.workload import SHIPPED_TARGETS, SHIPPED_WORKLOADS, load_workload, shipped

TEMPLATE = Path("harness/workload_template.toml")


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.exception
    return result.output


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert isinstance(result.exception, ConfigError)
    return str(result.exception)


@pytest.mark.parametrize(
    ("verb", "package", "name", "how", "key"),
    [
        ("workloads", SHIPPED_WORKLOADS, "demo", "walkaway run demo", "run"),
        ("targets", SHIPPED_TARGETS, "vllm", "run demo --target URL --engine vllm", "metrics"),
    ],
)
def test_shipped_files_are_listed_and_explained(
    verb: str, package: str, name: str, how: str, key: str, tmp_path: Path
) -> None:
    known, listed = shipped(package), printed(verb)
    assert not [one for one in known if one not in listed.split()]
    assert set(json.loads(printed(verb, "--json"))) == set(known)
    explained = printed(verb, name)
    assert explained.startswith(f"{name}\n")
    assert how in explained
    assert explained.endswith(known[name].read_text())
    assert key in json.loads(printed(verb, name, "--json"))
    mine = tmp_path / "mine.toml"
    mine.write_text(known[name].read_text())
    assert f"  {mine}\n" in printed(verb, str(mine))
    assert "unknown" in refused(verb, "no-such")


def test_the_questions_are_listed_in_groups_and_those_to_begin_with_have_a_line_each() -> None:
    names = [name for group in GROUPS.values() for name in group]
    assert sorted(names) == sorted(shipped(SHIPPED_WORKLOADS)), "each stands in one group"
    listed = printed("workloads").splitlines()
    assert max(map(len, listed)) <= 80
    assert listed[0] == "Begin with one of these:"
    assert [line.split()[0] for line in listed[1:6]] == list(next(iter(GROUPS.values())))
    assert listed[6] == ""


def test_the_template_can_be_run_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    assert printed("init", str(file)) == f"wrote {file}; run it: walkaway run {file}\n"
    assert resolve_run(RunConfig(workload=str(file))).workload.name == "mine"
    file.write_text("mine")
    assert "replace it with --force" in refused("init", str(file))
    assert file.read_text() == "mine"
    printed("init", str(file), "--force")
    assert file.read_text() == TEMPLATE.read_text()
    assert "cannot be written" in refused("init", str(file / "below.toml"))
    assert printed("init", "-") == TEMPLATE.read_text()
    spaced = tmp_path / "my own.toml"
    assert printed("init", str(spaced)).endswith(f"run it: walkaway run '{spaced}'\n")


def test_each_example_in_the_template_holds_and_each_key_is_explained(tmp_path: Path) -> None:
    text, file = TEMPLATE.read_text(), tmp_path / "all.toml"
    file.write_text(text.replace("#| ", ""))
    workload = load_workload(str(file))
    assert [arm.name for arm in workload.arms] == ["without", "with"]
    assert (workload.arrivals.kind, workload.run.processes) == ("poisson", 2)
    keys = [line for line in text.splitlines() if " = " in line and line[0] != "#"]
    assert not [line for line in keys if "#" not in line and not line.startswith("question")]
