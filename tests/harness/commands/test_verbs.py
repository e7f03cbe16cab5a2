"""The commands that only tell, what they load for it, and what the manifest says was typed."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_group
from typer.testing import CliRunner

from harness.commands.verbs import app
from harness.errors import ConfigError
from harness.http_client import typed_command
from harness.store.run_folder import RunFolder, RunRows
from harness.workload.workload import SHIPPED_TARGETS, SHIPPED_WORKLOADS, shipped
from tests.conftest import Snapshot

COMMANDS = tuple(sorted(get_group(app).commands))


def test_workloads_are_listed_with_their_questions() -> None:
    result = CliRunner().invoke(app, ["workloads"])
    assert result.exit_code == 0
    for name, path in shipped(SHIPPED_WORKLOADS).items():
        assert f"{name}\n" in result.output
        assert f"  {path}\n" in result.output


def test_targets_are_listed() -> None:
    result = CliRunner().invoke(app, ["targets"])
    assert result.exit_code == 0
    for name, path in shipped(SHIPPED_TARGETS).items():
        assert f"{name}\n" in result.output
        assert f"  {path}\n" in result.output


@pytest.mark.parametrize("command", ["walkaway", *(c for c in COMMANDS if c != "engine")])
def test_the_help_of_a_command(command: str, snapshot: Snapshot) -> None:
    words = [] if command == "walkaway" else [command]
    result = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert f"Example: {' '.join(['walkaway', *words])}" in result.output
    assert max(map(len, result.output.splitlines())) <= 80
    snapshot(f"help/{command}", result.output)


def test_help_loads_nothing_that_takes_long() -> None:
    script = (
        "import sys\nfrom harness.cli import main\nsys.argv = ['walkaway', 'run', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    print(*sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert "Usage:" in done.stdout
    loaded = set(done.stderr.split())
    assert "harness.commands.verbs" in loaded
    assert not loaded & {"pandas", "numpy", "scipy", "pyarrow", "httpx", "harness.run.pipeline"}


def test_a_report_of_several_runs_must_be_told_where_to_go(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
    result = CliRunner().invoke(app, ["report", str(tmp_path / "a"), str(tmp_path / "b")])
    assert isinstance(result.exception, ConfigError)
    assert "-o FILE" in str(result.exception)


def test_a_report_of_a_killed_run_says_how_to_save_what_it_left(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    (folder.path / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"was killed.*walkaway collect .*shards --out"):
        CliRunner().invoke(app, ["report", str(folder.path)], catch_exceptions=False)


def test_a_run_without_a_request_has_nothing_to_report(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    (folder.path / "manifest.json").write_text("{}")
    folder.write_rows(RunRows())
    result = CliRunner().invoke(app, ["report", str(folder.path)])
    assert isinstance(result.exception, ConfigError)
    assert "no request was made in this run" in str(result.exception)
    assert not (folder.path / "summary.json").exists()


def test_no_header_value_gets_into_the_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = ["X-Key=secret1", "X-Key=secret2"]
    typed = ["walkaway", "run", "demo", "--header", headers[0], f"--header={headers[1]}"]
    monkeypatch.setattr(sys, "argv", typed)
    assert typed_command(headers) == [*typed[:4], "X-Key=***", "--header=X-Key=***"]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("walkaway run chunk", "chunk_frontier"),
        ("walkaway workloads slot", "slot_recovery"),
        ("walkaway targets vl", "vllm"),
        ("walkaway run demo --engine llama", "llamacpp"),
    ],
)
def test_a_shell_completes_names(words: str, offered: str) -> None:
    told = {
        "_WALKAWAY_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    result = CliRunner().invoke(app, [], prog_name="walkaway", env=told)
    assert result.output.split() == [offered]
