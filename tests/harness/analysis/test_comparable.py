"""May two figures be compared, and two runs? Arms, `compare`, `trend` and the gate agree."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from dashboards.run_history import PastRun, Point, may_be_joined, read_past_run
from harness.compare.comparable import (
    figure_remarks,
    manifest_remarks,
    why_not_figures,
    why_not_runs,
)
from harness.compare.pairs import pair_of
from harness.compare.pool import differences
from harness.gate.judge import GateVerdict
from harness.records import ArmSummary, Metric
from tests.harness.gate.judging import judged, of_arms
from tests.made_up import gated

NAME = "wasted_tokens"
PER_ROUND = {NAME: {"mean": [3.0, 3.1, 2.9]}}


class Side(NamedTuple):
    """A figure, and how the tokens of its side were counted."""

    metric: Metric
    counting: str | None

    @property
    def as_arm(self) -> dict[str, Any]:
        return gated.arm({NAME: self.metric}, PER_ROUND, self.counting)


def figure(**more: Any) -> Metric:
    plain: dict[str, Any] = {
        "n": 500,
        "mean": 3.0,
        "mean_ci95": (2.9, 3.1),
        "p50": 3.0,
        "method": "exact",
    }
    return Metric(unit="tokens", **(plain | more))


def in_arms(first: Side, second: Side) -> bool:
    arms = {
        name: msgspec.convert(one.as_arm, ArmSummary)
        for name, one in (("old", first), ("new", second))
    }
    (found,) = differences(arms, "old")[NAME]["mean"]
    return found.difference is not None


def in_compare(first: Side, second: Side) -> bool:
    counting = first.counting, second.counting
    return pair_of(NAME, "mean", first.metric, second.metric, counting=counting).note is None


def in_gate_of_arms(first: Side, second: Side) -> bool:
    run = of_arms({"old": first.as_arm}, {"new": second.as_arm})
    return judged(run, f"new - old: {NAME}.mean <= 1").checks[1].verdict is GateVerdict.PASS


def in_gate_of_baseline(first: Side, second: Side) -> bool:
    run, baseline = of_arms({"new": second.as_arm}), of_arms({"new": first.as_arm})
    found = judged(run, f"new / baseline: {NAME}.mean <= 1.5", baseline=baseline)
    return found.checks[1].verdict is GateVerdict.PASS


@pytest.fixture
def night(tmp_path: Path) -> PastRun:
    return read_past_run(gated.save(tmp_path / "run"))


USAGE = Side(figure(), "usage")
ALIKE = {"alike": USAGE, "counting not said": Side(figure(), None)}
UNLIKE = {
    "tokens are counted by usage and by events": Side(figure(), "events"),
    "measured by exact and by gauge": Side(figure(method="gauge"), "usage"),
    "one is a value, the other a lower bound": Side(figure(bound="lower"), "usage"),
    "one is of all, the other of ghosts or lost slots": Side(
        figure(of="ghosts or lost slots"), "usage"
    ),
}
DOORS = [in_arms, in_compare, in_gate_of_arms, in_gate_of_baseline]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("other", ALIKE | UNLIKE)
def test_one_rule_at_every_door(door: Callable[[Side, Side], bool], other: str) -> None:
    assert door(USAGE, (ALIKE | UNLIKE)[other]) == (other in ALIKE)


@pytest.mark.parametrize("other", ALIKE | UNLIKE)
def test_a_trend_joins_by_the_same_rule(night: PastRun, other: str) -> None:
    points = [
        Point(
            run=night,
            conditions=night.measured.sides["run"].conditions,
            config={},
            metric=one.metric,
            counting=one.counting,
            value=3.0,
            more_than=None,
            limits=None,
        )
        for one in (USAGE, (ALIKE | UNLIKE)[other])
    ]
    assert may_be_joined(NAME, *points) == (other in ALIKE)


@pytest.mark.parametrize("why", UNLIKE)
def test_the_reason_is_said(why: str) -> None:
    counting = "usage", UNLIKE[why].counting
    assert why_not_figures(NAME, USAGE.metric, UNLIKE[why].metric, counting) == why


def test_figures_without_tokens_are_compared_however_tokens_were_counted() -> None:
    assert why_not_figures("ttft_s", figure(), figure(), ("usage", "events")) is None


# Runs.

MANIFEST: dict[str, Any] = {
    "seed": 1,
    "workload": {"name": "demo", "load": {"kind": "abandon", "stay_share": 0.2}},
    "target": {"engine": "reference", "model": "tiny", "config": {"max_num_seqs": 8}},
    "hardware": {"cpu": "slow", "cores": 2, "platform": "Linux"},
    "versions": {"walkaway": "1"},
}


def target(**more: Any) -> dict[str, Any]:
    return {"target": MANIFEST["target"] | more}


def loaded(stay_share: float) -> dict[str, Any]:
    return {"workload": {"name": "demo", "load": {"kind": "abandon", "stay_share": stay_share}}}


@pytest.mark.parametrize(
    ("changes", "level", "said"),
    [
        ({"seed": 2}, "info", "different seeds: 1 and 2"),
        (loaded(0.5), "warning", "different [load]: stay_share 0.2 / 0.5"),
        (target(model="large"), "warning", "different models: tiny and large"),
        (target(engine="vllm"), "warning", "different kinds of server: reference and vllm"),
        (
            target(engine="reference, simulated (cost model b, 4 of 8 replicas)"),
            "warning",
            "different kinds of server: reference and reference, simulated",
        ),
        (
            target(config={"max_num_seqs": 16}),
            "warning",
            "different numbers of batch slots: 8 and 16",
        ),
        (
            target(config={"max_num_seqs": 8, "faults": {"x": 1}}),
            "info",
            "set up differently: faults None / {'x': 1}",
        ),
        (
            target(config={"max_num_seqs": 8, "workers": {"prefill-0": 7}}),
            "info",
            "set up differently: workers ['worker-0'] / ['prefill-0']",
        ),
        (target(version="0.2"), "info", "different versions of the server: not known and 0.2"),
        (
            {"hardware": {"cpu": "fast", "cores": 2, "platform": "other"}},
            "warning",
            "different machines (cpu slow / fast)",
        ),
        ({"versions": {"walkaway": "2"}}, "info", "different versions: walkaway 1 / 2"),
    ],
)
def test_a_difference_of_two_manifests_is_remarked_on(
    changes: dict[str, Any], level: str, said: str
) -> None:
    (remark,) = manifest_remarks(MANIFEST, MANIFEST | changes)
    assert remark.level == level
    assert said in remark.text
    assert not list(manifest_remarks(MANIFEST, MANIFEST))


@pytest.mark.parametrize(
    ("workload", "why"),
    [
        ({"name": "soak"}, "different workloads, `demo` and `soak`"),
        ({"name": "demo", "load": {"kind": "cancel_storm"}}, "`abandon` and `cancel_storm`"),
        (MANIFEST["workload"], None),
    ],
)
def test_what_has_no_common_question_is_refused(workload: dict[str, Any], why: str | None) -> None:
    found = why_not_runs(MANIFEST, MANIFEST | {"workload": workload})
    assert (found is None) if why is None else (found is not None and why in found)


def test_other_steps_and_another_counting_are_remarked_on() -> None:
    def part(step_s: float, counting: str) -> ArmSummary:
        arm = gated.arm({"step_s": Metric(unit="s", n=9, p50=step_s, method="exact")})
        return msgspec.convert(arm | {"token_counting": counting}, ArmSummary)

    found = [one.text for one in figure_remarks(part(0.020, "usage"), part(0.025, "events"))]
    assert [text.partition(": ")[0] for text in found] == [
        "tokens are counted by usage and by events",
        "a step takes 20 ms and 25 ms",
    ]
    assert not list(figure_remarks(part(0.020, "usage"), part(0.021, "usage")))


def test_the_part_of_the_replicas_that_was_simulated_is_no_other_server() -> None:
    engines = [f"reference, simulated (cost model a{part})" for part in ("", ", 4 of 8 replicas")]
    said = manifest_remarks(*(MANIFEST | target(engine=engine) for engine in engines))
    assert not [one for one in said if "kinds of server" in one.text]
