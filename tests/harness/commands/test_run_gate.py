"""`walkaway run --gate`: what is refused before anything is measured."""

from pathlib import Path

import pytest

from harness.commands.run_and_show import GateReports, rounds_settings
from harness.errors import ConfigError
from harness.workload.workload import load_workload


def asked(**flags: object) -> GateReports | None:
    given: dict[str, object] = {"gates": True, "junit": None, "markdown": None, "as_json": False}
    return GateReports.asked(**{**given, **flags})  # type: ignore[arg-type]


def test_reports_of_a_gate_need_a_gate() -> None:
    with pytest.raises(ConfigError, match="--junit needs --gate"):
        asked(gates=False, junit=Path("gate.xml"))
    assert asked(gates=False) is None


def test_two_reports_cannot_both_be_printed() -> None:
    with pytest.raises(ConfigError, match="only one can be printed"):
        asked(junit=Path("-"), markdown=Path("-"))
    with pytest.raises(ConfigError, match="only one can be printed"):
        asked(markdown=Path("-"), as_json=True)


def test_a_workload_without_limits_is_refused_before_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where no baseline is saved
    gate = GateReports()
    gate.check_can_judge(load_workload("gate"))
    with pytest.raises(ConfigError, match="workload chat_stop has no limits"):
        gate.check_can_judge(load_workload("chat_stop"))


def test_rounds_of_a_workload_without_arms_are_of_one_build() -> None:
    plain = load_workload("chat_stop", rounds_settings("chat_stop", 3))
    assert ([arm.name for arm in plain.arms], plain.run.rounds) == (["build"], 3)
    arms = load_workload("innocent_bystanders", rounds_settings("innocent_bystanders", 3))
    assert len(arms.arms) > 1
    assert arms.run.rounds == 3
