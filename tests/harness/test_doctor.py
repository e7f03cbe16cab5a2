"""What is said of machines that are made up, and that this one is looked at without an error."""

import json
import resource
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from harness.commands import doctor as doctor_command
from harness.commands import machine
from harness.commands.doctor import State, examine, lines, missing
from harness.commands.machine import Machine, TorchFacts, look_at_machine
from harness.commands.verbs import app
from harness.errors import ConfigError

GOOD = Machine(
    python="3.11.7",
    missing_packages=[],
    torch=TorchFacts(version="2.13.0", gpus=["H200"]),
    gpus=["H200"],
    nvml=None,
    handles=(1024, 65536),
    ports=28232,
    clock_resolution_ns=1.0,
    clock_is_shared=True,
    cores=16.0,
    memory_bytes=64 * 2**30,
    memory_available_bytes=60 * 2**30,
    loopback_round_trip_ns=12_000.0,
    loopback_error=None,
    results="results",
    results_error=None,
    disk_free_bytes=100 * 2**30,
)


def test_a_good_machine_has_nothing_to_mend() -> None:
    findings = examine(GOOD)
    assert {one.state for one in findings} == {State.GOOD}
    assert all(one.mend is None for one in findings)


@pytest.mark.parametrize(
    ("name", "changes", "state", "said"),
    [
        ("python", {"missing_packages": ["pandas"]}, State.MISSING, "pandas"),
        (
            "loopback",
            {"loopback_round_trip_ns": None, "loopback_error": "denied"},
            State.MISSING,
            "denied",
        ),
        ("results", {"results_error": "read-only"}, State.MISSING, "read-only"),
        ("results", {"disk_free_bytes": 1000}, State.LIMITED, "1,000 B free"),
        ("torch", {"torch": None}, State.LIMITED, "simulates"),
        ("torch", {"torch": TorchFacts(error="no libc")}, State.MISSING, "no libc"),
        ("gpu", {"torch": TorchFacts(version="2")}, State.LIMITED, "H200, but torch cannot"),
        ("gpu", {"torch": TorchFacts(version="2"), "gpus": []}, State.LIMITED, "none that torch"),
        ("gpu counters", {"nvml": "no GPU counters: none"}, State.LIMITED, "none"),
        ("clock", {"clock_is_shared": False}, State.LIMITED, "do not read the same clock"),
        ("clock", {"clock_resolution_ns": 1e6}, State.LIMITED, "1,000,000 ns"),
        ("cores", {"cores": 1.0}, State.LIMITED, "1 core"),
        ("memory", {"memory_available_bytes": 2**30}, State.LIMITED, "1 GiB of 64 GiB"),
        ("file handles", {"handles": (256, 1024)}, State.LIMITED, "1,024 for a process"),
        ("file handles", {"handles": (256, resource.RLIM_INFINITY)}, State.GOOD, "as many as"),
        ("ports", {"ports": 600}, State.LIMITED, "about 10 new connections a second"),
        ("ports", {"ports": None}, State.LIMITED, "does not tell"),
    ],
)
def test_what_is_said_of_a_machine(
    name: str, changes: dict[str, Any], state: State, said: str
) -> None:
    findings = examine(msgspec.structs.replace(GOOD, **changes))
    finding = next(one for one in findings if one.name == name)
    assert finding.state is state
    assert said in finding.text
    assert finding.mend is not None or state is not State.MISSING
    assert missing(findings) == ([finding] if state is State.MISSING else [])


def test_no_line_is_wider_than_the_terminal() -> None:
    poor = msgspec.structs.replace(GOOD, torch=None, handles=(256, 1024), ports=600, gpus=[])
    assert max(map(len, lines(examine(poor), width=80))) <= 80


def test_the_command_ends_with_2_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    poor = msgspec.structs.replace(GOOD, results_error="read-only")
    monkeypatch.setattr(doctor_command, "look_at_machine", lambda _results: poor)
    result = CliRunner().invoke(app, ["doctor"])
    assert isinstance(result.exception, ConfigError)
    assert "for want of: results" in str(result.exception)
    assert "exit code 2" in str(result.exception)
    assert "MISSING  results" in result.output


def test_the_command_says_it_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_command, "look_at_machine", lambda _results: GOOD)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0
    told = json.loads(result.output)
    assert told["can_run_demo"] is True
    assert {one["state"] for one in told["findings"]} == {"good"}


def test_this_machine_is_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "ASK_TORCH", "raise SystemExit('no such library')")
    monkeypatch.setattr(machine, "find_spec", lambda _name: True)
    found = look_at_machine(tmp_path / "results")
    assert found.torch == TorchFacts(error="no such library")
    assert found.missing_packages == []
    assert found.results_error is None
    assert not (tmp_path / "results").exists()
    assert found.loopback_error is None
    assert found.cores > 0
    assert found.clock_resolution_ns > 0
