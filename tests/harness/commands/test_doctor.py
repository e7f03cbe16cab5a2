"""What is said of a machine that lacks something, and of this one."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.commands import doctor
from harness.commands.doctor import Finding, lines, loopback, results, torch
from harness.commands.verbs import app
from harness.errors import ConfigError


def test_what_is_missing_is_named_with_its_remedy(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.touch()
    for found, said in (
        (loopback("192.0.2.1"), "no connection over 192.0.2.1"),
        (results(Path("/proc/results")), "/proc/results cannot be written"),
        (torch("raise SystemExit('no such library')"), "it does not load: no such library"),
    ):
        assert said in found.text
        assert found.mend is not None


def test_results_are_not_made_by_looking(tmp_path: Path) -> None:
    assert results(tmp_path / "results").mend is None
    assert list(tmp_path.iterdir()) == []


def test_no_line_is_wider_than_the_terminal() -> None:
    poor = [Finding(name="torch", text="word " * 40, mend="word " * 40)]
    shown = list(lines(poor, width=80))
    assert max(map(len, shown)) <= 80
    assert shown[0].startswith("MISSING  torch")
    assert not any("can run here" in line for line in shown)


def test_this_machine_can_run_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    said = CliRunner().invoke(app, ["doctor", "--json"])
    assert said.exit_code == 0, said.output
    told = json.loads(said.output)
    assert told["can_run_demo"] is True
    assert [one["name"] for one in told["findings"]] == ["python", "loopback", "results", "torch"]
    read_only = Finding(name="results", text="read-only", mend="name another")
    monkeypatch.setattr(doctor, "results", lambda _: read_only)
    refused = CliRunner().invoke(app, ["doctor"])
    assert isinstance(refused.exception, ConfigError)
    assert str(refused.exception) == "`walkaway demo` cannot run here; missing: results"
