"""The commands that only tell, and what the manifest says was typed."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.commands import app
from harness.errors import ConfigError

COMMANDS = ("demo", "run", "report", "engine", "workloads", "targets")


def test_workloads_are_listed_with_their_questions() -> None:
    result = CliRunner().invoke(app, ["workloads"])
    assert result.exit_code == 0
    for name in ("demo", "cancel_steps", "slot_recovery"):
        assert name in result.output


def test_targets_are_listed() -> None:
    result = CliRunner().invoke(app, ["targets"])
    assert result.exit_code == 0
    for name in ("reference", "vllm", "llamacpp", "openai"):
        assert name in result.output


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "engine"])
def test_every_help_text_gives_an_example(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert f"Example: walkaway {command}" in result.output


def test_help_names_every_command() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in COMMANDS:
        assert command in result.output


def test_a_report_of_several_runs_must_be_told_where_to_go(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
    result = CliRunner().invoke(app, ["report", str(tmp_path / "a"), str(tmp_path / "b")])
    assert isinstance(result.exception, ConfigError)
    assert "-o FILE" in str(result.exception)
