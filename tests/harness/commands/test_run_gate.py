"""`walkaway run --gate`: what is refused before anything is measured."""

from pathlib import Path
from typing import Any

import pytest

from harness.commands.run_and_show import GateReports, rounds_settings
from harness.errors import ConfigError
from harness.records import Metric
from harness.text.headlines import stop_verdict
from harness.workload.workload import load_workload


def asked(**flags: object) -> GateReports | None:
    given: dict[str, object] = {"gates": True, "junit": None, "markdown": None}
    return GateReports.asked(**{**given, **flags})  # type: ignore[arg-type]


def test_reports_of_a_gate_need_a_gate() -> None:
    with pytest.raises(ConfigError, match="--junit needs --gate"):
        asked(gates=False, junit=Path("gate.xml"))
    assert asked(gates=False) is None


def test_a_report_of_a_gate_has_a_file_of_its_own() -> None:
    with pytest.raises(ConfigError, match="name a file"):
        asked(junit=Path("-"))
    with pytest.raises(ConfigError, match="name a file for each"):
        asked(junit=Path("gate"), markdown=Path("gate"))


def test_a_workload_without_limits_is_refused_before_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where no baseline is saved
    gate = GateReports()
    gate.check_can_judge(load_workload("gate"))
    gate.check_can_judge(load_workload("chat_stop"))  # by whether the server stops
    with pytest.raises(ConfigError, match="workload chat_stop has no limits"):
        GateReports(junit=Path("gate.xml")).check_can_judge(load_workload("chat_stop"))
    with pytest.raises(ConfigError, match="workload swap_or_recompute has no limits"):
        gate.check_can_judge(load_workload("swap_or_recompute"))


def test_rounds_of_a_workload_without_arms_are_of_one_build() -> None:
    plain = load_workload("chat_stop", rounds_settings("chat_stop", [], 3))
    assert ([arm.name for arm in plain.arms], plain.run.rounds) == (["build"], 3)
    arms = load_workload("innocent_bystanders", rounds_settings("innocent_bystanders", [], 3))
    assert len(arms.arms) > 1
    assert arms.run.rounds == 3


def metric(mean: float, **more: Any) -> Metric:
    return Metric(unit="ratio", mean=mean, **{"n": 40, "method": "exact", **more})


@pytest.mark.parametrize(
    ("metrics", "is_silent", "stops"),
    [
        ({"ghost_rate": metric(0.0)}, False, True),
        ({"ghost_rate": metric(0.05)}, False, False),
        ({"cancel_latency_s": metric(0.02, method="probe")}, False, True),
        ({"cancel_latency_s": metric(0.02, method="probe", max=0.1, n_censored=1)}, False, None),
        # A gauge that shows nothing does not acquit a server that holds a slot, or computes on.
        (
            {"ghost_rate": metric(0.0, bound="lower", others={"still_generating": 40.0})},
            False,
            False,
        ),
        (
            {
                "ghost_rate": metric(0.0, bound="lower"),
                "cancel_latency_s": metric(0.02, method="probe", max=5.0),
            },
            False,
            False,
        ),
        ({"cancel_latency_s": metric(0.02, method="probe", max=3.0)}, False, False),
        ({"cancel_latency_s": metric(0.02, method="gauge")}, False, None),
        ({"ghost_rate": metric(0.0)}, True, False),  # nobody is answered any more
        ({}, False, None),
    ],
)
def test_a_run_says_whether_the_server_stops(
    metrics: dict[str, Metric], stops: bool | None, *, is_silent: bool
) -> None:
    assert stop_verdict(metrics, is_silent=is_silent).stops is stops
