"""Verdicts: what passes, what fails, and what cannot be decided, each with its reason."""

from typing import Any

import pytest

from harness.gate.judge import Check, GateVerdict, Judgement, Measured, overall
from harness.records import Metric
from tests.harness.gate.judging import FAIL, OPEN, PASS, Rounds, judged
from tests.made_up import gated


def the_check(line: str, metric: Metric, **more: Any) -> Check:
    """The judgement of one limit on a run with this metric."""
    name = line.partition(".")[0]
    run = gated.measured(gated.summary({name: metric}, **more))
    return judged(run, line).checks[1]


FEW: dict[str, Any] = {"n": 100, "p99_ci95": None, "needs": {"p99_ci95": 368}}
NEVER_FREED = gated.steps(
    n_censored=10, p99=None, p99_ci95=None, mean=0, lower_bounds={"p99": 90.0, "max": 90.0}
)
NOT_WAITED_FOR = Metric(unit="s", n=50, n_censored=9, method="client", lower_bounds={"p99": 1.6})
OF_ROUNDS = Metric(unit="rps", n=3, mean=10, mean_ci95=(9.0, 11.0), max=10.5, method="client")
ONLY_LIMITED = Metric(unit="s", n=40, upper95=0.1, method="gauge", bound="upper")


@pytest.mark.parametrize(
    ("line", "metric", "expected"),
    [
        # a mean by its interval
        ("cancel_latency_steps.mean <= 1.5", gated.steps(1.0, 0.1), PASS),
        ("cancel_latency_steps.mean <= 1.5", gated.steps(1.4, 0.2), OPEN),
        ("cancel_latency_steps.mean <= 1.5", gated.steps(1.6, 0.2), OPEN),
        ("cancel_latency_steps.mean <= 1.5", gated.steps(2.0, 0.1), FAIL),
        ("goodput_rps.mean >= 8", OF_ROUNDS, PASS),
        ("goodput_rps.mean >= 10", OF_ROUNDS, OPEN),
        ("cancel_latency_s.mean <= 0.2", ONLY_LIMITED, PASS),
        ("cancel_latency_s.mean <= 0.05", ONLY_LIMITED, OPEN),
        # a quantile by its interval, p95 by the intervals of p50 and p99
        ("cancel_latency_steps.p99 <= 2", gated.steps(), PASS),
        ("cancel_latency_steps.p99 < 2", gated.steps(), OPEN),
        ("cancel_latency_steps.p99 < 1", gated.steps(), FAIL),
        ("cancel_latency_steps.p50 == 1", gated.steps(), PASS),
        ("cancel_latency_steps.p50 == 2", gated.steps(), FAIL),
        ("cancel_latency_steps.p99 == 2", gated.steps(), OPEN),
        ("cancel_latency_steps.max <= 2", gated.steps(), PASS),
        ("cancel_latency_steps.max < 2", gated.steps(), FAIL),
        ("cancel_latency_steps.p99 >= 1", gated.steps(), PASS),
        ("cancel_latency_steps.p99 > 1", gated.steps(), OPEN),
        ("cancel_latency_steps.p95 <= 2", gated.steps(p95=1.0), PASS),
        ("cancel_latency_steps.p95 < 1", gated.steps(p95=1.0), FAIL),
        ("cancel_latency_steps.p95 <= 1", gated.steps(p95=1.0), OPEN),
        ("cancel_latency_steps.p99 <= 2", gated.steps(p50_ci95=(7.0, 9.0), **FEW), FAIL),
        # censored: a cancel that never came breaks each limit, a first token may have come
        ("cancel_latency_steps.p99 <= 1000", NEVER_FREED, FAIL),
        ("ttft_s.p99 <= 3", NOT_WAITED_FOR, OPEN),
        ("ttft_s.p99 <= 1", NOT_WAITED_FOR, FAIL),
        # a share by its bounds
        ("ghost_rate.upper95 < 0.01", gated.share(0, 500), PASS),
        ("ghost_rate.upper95 < 0.01", gated.share(0, 100), OPEN),
        ("ghost_rate.upper95 < 0.01", gated.share(3, 500), OPEN),
        ("ghost_rate.upper95 < 0.01", gated.share(20, 500), FAIL),
        ("ghost_rate.mean == 0", gated.share(0, 500), PASS),
        ("ghost_rate.mean == 0", gated.share(1, 500), FAIL),
        ("removed_at_first_boundary.lower95 >= 0.99", gated.share(500, 500), PASS),
        ("removed_at_first_boundary.lower95 >= 0.99", gated.share(493, 500), OPEN),
        ("removed_at_first_boundary.lower95 >= 0.99", gated.share(400, 500), FAIL),
        # a count is certain, unless it is a bound
        ("leaked_blocks.max == 0", gated.count(0), PASS),
        ("leaked_blocks.max == 0", gated.count(1), FAIL),
        ("leaked_blocks.max == 0", gated.count(0, bound="lower"), OPEN),
        ("leaked_blocks.mean <= 2", gated.count(3, bound="lower"), FAIL),
        ("leaked_blocks.mean <= 2", gated.count(3, bound="upper"), OPEN),
        ("leaked_blocks.mean <= 2", gated.count(1, bound="upper"), PASS),
    ],
)
def test_a_figure_is_judged_by_its_range(line: str, metric: Metric, expected: GateVerdict) -> None:
    assert the_check(line, metric).verdict is expected


@pytest.mark.parametrize(
    ("line", "metric", "to_decide"),
    [
        # half the distance takes four times as many: 2,000, and 500 are there
        ("mean <= 1.5", gated.steps(1.4, 0.2), "about 2,000 would do, if it stays so: 1,500 more"),
        (
            "mean <= 1.5",
            gated.steps(1.5, 0.2),
            "it is as good as the limit: no number of abandons tells them apart",
        ),
        ("mean <= 1.5", gated.steps(1.0, 0.0, n=3), "30 would do: 27 more"),
        ("p99 <= 2", gated.steps(**FEW), "368 would do: 268 more"),
    ],
)
def test_an_open_limit_says_how_many_would_decide(
    line: str, metric: Metric, to_decide: str
) -> None:
    found = the_check(f"cancel_latency_steps.{line}", metric)
    assert (found.verdict, found.to_decide) == (OPEN, to_decide)
    few = the_check("ghost_rate.upper95 < 0.01", gated.share(0, 100))
    assert few.to_decide == "299 without a single one would do: 199 more"


def test_the_measured_value_and_the_reason_are_in_words() -> None:
    found = the_check("cancel_latency_steps.p99 <= 1000", NEVER_FREED)
    assert found.measured == "> 90 steps: 10 of 500 were never let go"
    metric = Metric(unit="s", n=900, mean=0.02, p50=0.02, p99=0.03, method="client")
    found = the_check("itl_s.p99 <= 1", metric)
    assert found.verdict is OPEN
    assert "has no interval within one run" in found.reason


# Never a pass.


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("slot_recovery_s.p50 < 1", "not measurable: the workload has no probes"),
        ("step_s.p50 < 1", "not measurable: the summary does not have it"),
        ("leaked_blocks.p99 < 1", "leaked_blocks has no p99 here, only mean"),
    ],
)
def test_a_figure_that_is_missing_cannot_be_decided(line: str, reason: str) -> None:
    found = judged(gated.measured(gated.summary()), line)
    assert (found.verdict, found.checks[1].reason) == (OPEN, reason)


INVALID: dict[str, Any] = {"validity": [{"level": "invalid", "text": "the load could not keep up"}]}


def leaking(blocks: float, **more: Any) -> Judgement:
    summary = gated.summary({"leaked_blocks": gated.count(blocks)}, **more)
    return judged(gated.measured(summary), "leaked_blocks.max == 0")


def test_an_invalid_run_fails_only_by_what_no_client_brings_about() -> None:
    for mean in (1.0, 9.0):
        summary = gated.summary({"cancel_latency_steps": gated.steps(mean)}, **INVALID)
        found = judged(gated.measured(summary), "cancel_latency_steps.mean <= 2")
        assert [one.verdict for one in found.checks] == [OPEN, OPEN]
        assert found.checks[0].reason == "the load could not keep up"
    for more in (INVALID, {"status": "interrupted"}, {"status": "target_failed"}):
        assert leaking(0, **more).verdict is OPEN
        assert leaking(5, **more).verdict is FAIL


def test_a_fail_wins_and_too_little_is_no_pass() -> None:
    of = {one: Check(name="x", verdict=one, reason="") for one in GateVerdict}
    assert overall([of[PASS], of[OPEN], of[FAIL]]) is FAIL
    assert overall([of[PASS], of[OPEN]]) is OPEN
    assert overall([of[PASS]]) is PASS
    assert overall([]) is OPEN
    silent = gated.measured(gated.summary(), probing={"is_silent": True})
    assert judged(silent).verdict is FAIL
    few = judged(gated.measured(gated.summary()), "leaked_blocks.max == 0", fewest=10)
    assert few.verdict is OPEN
    assert few.checks[-1].to_decide.startswith("8 more")


def test_of_what_a_server_never_shows_the_nearest_is_named() -> None:
    shown = {"leaked_slots": gated.count(0, "slots"), "leaked_kv_share": gated.count(0, "ratio")}
    limits = ("leaked_blocks.max == 0", "ghost_rate.mean == 0", "slot_recovery_s.p50 < 1")
    _, *checks = judged(gated.measured(gated.summary(shown)), *limits).checks[:4]
    assert [one.to_decide for one in checks] == [
        "a run that can measure it, or a limit on `leaked_kv_share`, which this server shows",
        "a run that can measure it, or a limit on `leaked_slots`, which this server shows",
        "a run that can measure it",
    ]


# Two arms.


def two(old: Rounds, new: Rounds) -> Measured:
    name = "cancel_latency_steps"
    arms = {
        arm: gated.arm({name: gated.steps()}, {name: {"mean": list(values)}})
        for arm, values in (("old", old), ("new", new))
    }
    return gated.measured(gated.summary_of_arms(arms), ["old", "new"])


DIFFERENCE = "new - old: cancel_latency_steps.mean <= 0.5"
RATIO = "new / old: cancel_latency_steps.mean <= 1.25"


@pytest.mark.parametrize("line", [DIFFERENCE, RATIO])
def test_arms_are_compared_round_by_round(line: str) -> None:
    old = [1.0, 2.0, 4.0]  # the rounds differ much, the arms in each of them hardly
    assert judged(two(old, [1.01, 2.03, 4.02]), line).verdict is PASS
    assert judged(two(old, [2.0, 4.0, 8.0]), RATIO).verdict is FAIL
    assert judged(two(old, [2.0, 3.01, 5.0]), DIFFERENCE).verdict is FAIL
    assert judged(two(old, [1.0, 4.0, 3.0]), line).verdict is OPEN


def test_two_rounds_decide_nothing_and_nothing_in_either_arm_is_no_change() -> None:
    found = judged(two([1.0, 1.0], [9.0, 9.0]), DIFFERENCE)
    assert found.verdict is OPEN
    assert "at least 3 rounds" in found.checks[1].to_decide
    assert judged(two([0.0] * 3, [0.0] * 3), RATIO).verdict is PASS
    found = judged(two([0.0] * 3, [1.0, 2.0, 1.0]), RATIO)
    assert found.verdict is OPEN
    assert found.checks[1].to_decide == "a limit on the difference: `new - old: ...`"
