"""doctor names what a machine lacks; this machine can run the demo."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.commands.doctor import DoctorFinding, engine, lines, loopback, results, torch
from harness.commands.index import app
from harness.errors import ConfigError


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (loopback("192.0.2.1"), "no connection over 192.0.2.1"),
        (results(Path("/proc/results")), "/proc/results cannot be written"),
        (torch("raise SystemExit('no such library')"), "it does not load: no such library"),
    ],
)
def test_a_missing_requirement_has_its_remedy(found: DoctorFinding, text: str) -> None:
    assert text in found.text
    assert found.mend is not None


def test_an_engine_that_would_refuse_its_settings_says_why() -> None:
    found = engine("engine.runner=simulated", "engine.device=cuda")
    assert "only the torch runner uses a device" in found.text
    assert found.mend is not None


def test_a_check_makes_no_folder(tmp_path: Path) -> None:
    assert results(tmp_path / "results").mend is None
    assert list(tmp_path.iterdir()) == []


def test_no_line_is_wider_than_the_terminal() -> None:
    poor = [DoctorFinding(name="torch", text="word " * 40, mend="word " * 40)]
    shown = list(lines(poor, width=80))
    assert max(map(len, shown)) <= 80
    assert shown[0].startswith("MISSING  torch")
    assert not any("can run here" in line for line in shown)


def test_this_machine_can_run_the_demo_where_it_may_write(monkeypatch: pytest.MonkeyPatch) -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["can_run_demo"] is True
    names = ["python", "loopback", "results", "torch", "engine"]
    assert [one["name"] for one in found["findings"]] == names
    assert found["findings"][-1]["text"].startswith(("cpu: ", "cuda", "simulated runner: "))
    monkeypatch.chdir("/proc")
    refused = CliRunner().invoke(app, ["doctor"])
    assert isinstance(refused.exception, ConfigError)
    assert str(refused.exception) == "`walkaway demo` cannot run here; missing: results"
