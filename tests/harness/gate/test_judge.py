"""Verdicts: what passes, what fails, and what cannot be decided, each with its reason."""

from typing import Any

import pytest

from harness.gate.judge import Check, Verdict, overall
from harness.records import Metric
from tests.harness.gate.judging import FAIL, OPEN, PASS, judged
from tests.made_up import gated


def the_check(line: str, metric: Metric, **more: Any) -> Check:
    """The judgement of one limit on a run with this metric."""
    name = line.partition(".")[0]
    run = gated.measured(gated.summary({name: metric}, **more))
    return judged(run, line).checks[1]


def verdict(line: str, metric: Metric) -> Verdict:
    return the_check(line, metric).verdict


# A figure by itself.


@pytest.mark.parametrize(
    ("mean", "half", "expected"),
    [(1.0, 0.1, PASS), (1.4, 0.2, OPEN), (1.6, 0.2, OPEN), (2.0, 0.1, FAIL)],
)
def test_a_mean_is_judged_by_its_interval(mean: float, half: float, expected: Verdict) -> None:
    assert verdict("cancel_latency_steps.mean <= 1.5", gated.steps(mean, half)) is expected


def test_how_many_would_decide_a_mean_is_said() -> None:
    """Half the distance takes four times as many: 2,000, and 500 are there."""
    found = the_check("cancel_latency_steps.mean <= 1.5", gated.steps(1.4, 0.2))
    assert found.to_decide == "about 2,000 would do, if it stays so: 1,500 more"


def test_a_mean_at_its_limit_is_never_decided() -> None:
    found = the_check("cancel_latency_steps.mean <= 1.5", gated.steps(1.5, 0.2))
    assert "no number of abandons" in found.to_decide


def test_a_mean_of_few_alike_is_no_pass_though_its_interval_is_narrow() -> None:
    found = the_check("cancel_latency_steps.mean <= 1.5", gated.steps(1.0, 0.0, n=3))
    assert (found.verdict, found.to_decide) == (OPEN, "30 would do: 27 more")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("cancel_latency_steps.p99 <= 2", PASS),
        ("cancel_latency_steps.p99 < 2", OPEN),
        ("cancel_latency_steps.p99 < 1", FAIL),
        ("cancel_latency_steps.p50 == 1", PASS),
        ("cancel_latency_steps.p50 == 2", FAIL),
        ("cancel_latency_steps.p99 == 2", OPEN),
        ("cancel_latency_steps.max <= 2", PASS),
        ("cancel_latency_steps.max < 2", FAIL),
        ("cancel_latency_steps.p99 >= 1", PASS),
        ("cancel_latency_steps.p99 > 1", OPEN),
    ],
)
def test_a_quantile_is_judged_by_its_interval(line: str, expected: Verdict) -> None:
    assert verdict(line, gated.steps()) is expected


def test_too_few_for_a_quantile_says_how_many_more() -> None:
    metric = gated.steps(n=100, p99_ci95=None, needs={"p99_ci95": 368})
    found = the_check("cancel_latency_steps.p99 <= 2", metric)
    assert (found.verdict, found.to_decide) == (OPEN, "368 would do: 268 more")


def test_too_few_for_a_quantile_fails_where_half_of_them_are_beyond_it() -> None:
    metric = gated.steps(n=100, p50_ci95=(7.0, 9.0), p99_ci95=None, needs={"p99_ci95": 368})
    assert verdict("cancel_latency_steps.p99 <= 2", metric) is FAIL


def test_p95_lies_between_the_quantiles_beside_it() -> None:
    metric = gated.steps(p95=1.0)
    assert verdict("cancel_latency_steps.p95 <= 2", metric) is PASS
    assert verdict("cancel_latency_steps.p95 < 1", metric) is FAIL
    assert verdict("cancel_latency_steps.p95 <= 1", metric) is OPEN


def test_who_was_never_let_go_breaks_every_upper_limit() -> None:
    metric = gated.steps(
        n_censored=10, p99=None, p99_ci95=None, mean=0, lower_bounds={"p99": 90.0, "max": 90.0}
    )
    found = the_check("cancel_latency_steps.p99 <= 1000", metric)
    assert (found.verdict, found.measured) == (FAIL, "> 90 steps: 10 of 500 were never let go")


def test_a_first_token_that_was_not_waited_for_is_no_failure_and_no_pass() -> None:
    metric = Metric(unit="s", n=50, n_censored=9, method="client", lower_bounds={"p99": 1.6})
    assert verdict("ttft_s.p99 <= 3", metric) is OPEN
    assert verdict("ttft_s.p99 <= 1", metric) is FAIL


def test_a_figure_without_an_interval_is_not_decided_in_one_run() -> None:
    metric = Metric(unit="s", n=900, mean=0.02, p50=0.02, p99=0.03, method="client")
    found = the_check("itl_s.p99 <= 1", metric)
    assert found.verdict is OPEN
    assert "has no interval within one run" in found.reason


@pytest.mark.parametrize(
    ("hits", "n", "line", "expected"),
    [
        (0, 500, "ghost_rate.upper95 < 0.01", PASS),
        (0, 100, "ghost_rate.upper95 < 0.01", OPEN),
        (3, 500, "ghost_rate.upper95 < 0.01", OPEN),
        (20, 500, "ghost_rate.upper95 < 0.01", FAIL),
        (0, 500, "ghost_rate.mean == 0", PASS),
        (1, 500, "ghost_rate.mean == 0", FAIL),
        (500, 500, "removed_at_first_boundary.lower95 >= 0.99", PASS),
        (493, 500, "removed_at_first_boundary.lower95 >= 0.99", OPEN),
        (400, 500, "removed_at_first_boundary.lower95 >= 0.99", FAIL),
    ],
)
def test_a_share_is_judged_by_its_bounds(hits: int, n: int, line: str, expected: Verdict) -> None:
    assert verdict(line, gated.share(hits, n)) is expected


def test_how_many_without_a_ghost_would_do_is_said() -> None:
    found = the_check("ghost_rate.upper95 < 0.01", gated.share(0, 100))
    assert found.to_decide == "299 without a single one would do: 199 more"


def test_a_count_is_certain_unless_it_is_a_bound() -> None:
    line = "leaked_blocks.max == 0"
    assert verdict(line, gated.count(0)) is PASS
    assert verdict(line, gated.count(1)) is FAIL
    assert verdict(line, gated.count(0, bound="lower")) is OPEN
    assert verdict("leaked_blocks.mean <= 2", gated.count(3, bound="lower")) is FAIL
    assert verdict("leaked_blocks.mean <= 2", gated.count(3, bound="upper")) is OPEN
    assert verdict("leaked_blocks.mean <= 2", gated.count(1, bound="upper")) is PASS


def test_readings_of_rounds_have_an_interval() -> None:
    metric = Metric(unit="rps", n=3, mean=10, mean_ci95=(9.0, 11.0), max=10.5, method="client")
    assert verdict("goodput_rps.mean >= 8", metric) is PASS
    assert verdict("goodput_rps.mean >= 10", metric) is OPEN


def test_of_a_mean_that_is_only_limited_the_limit_counts() -> None:
    metric = Metric(unit="s", n=40, upper95=0.1, method="gauge", bound="upper")
    assert verdict("cancel_latency_s.mean <= 0.2", metric) is PASS
    assert verdict("cancel_latency_s.mean <= 0.05", metric) is OPEN


# What is never a pass.


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


def invalid() -> dict[str, Any]:
    return {"validity": [{"level": "invalid", "text": "the load could not keep up"}]}


@pytest.mark.parametrize("mean", [1.0, 9.0])
def test_an_invalid_run_decides_no_time(mean: float) -> None:
    summary = gated.summary({"cancel_latency_steps": gated.steps(mean)}, **invalid())
    found = judged(gated.measured(summary), "cancel_latency_steps.mean <= 2")
    assert [one.verdict for one in found.checks] == [OPEN, OPEN]
    assert found.checks[0].reason == "the load could not keep up"


@pytest.mark.parametrize(("leaked", "expected"), [(0, OPEN), (5, FAIL)])
def test_what_no_client_brings_about_is_wrong_in_an_invalid_run_too(
    leaked: int, expected: Verdict
) -> None:
    summary = gated.summary({"leaked_blocks": gated.count(leaked)}, **invalid())
    found = judged(gated.measured(summary), "leaked_blocks.max == 0")
    assert [one.verdict for one in found.checks] == [OPEN, expected]


@pytest.mark.parametrize("status", ["interrupted", "target_failed"])
def test_a_run_that_broke_off_can_fail_but_not_pass(status: str) -> None:
    good = gated.measured(gated.summary(status=status))
    assert judged(good, "leaked_blocks.max == 0").verdict is OPEN
    bad = gated.measured(gated.summary({"leaked_blocks": gated.count(5)}, status=status))
    assert judged(bad, "leaked_blocks.max == 0").verdict is FAIL


def test_a_server_that_serves_nobody_any_more_fails() -> None:
    assert judged(gated.measured(gated.summary(wedged=True))).verdict is FAIL


def test_too_few_abandons_are_no_pass() -> None:
    found = judged(gated.measured(gated.summary()), "leaked_blocks.max == 0", fewest=10)
    assert found.verdict is OPEN
    assert found.checks[-1].to_decide.startswith("8 more")


def test_a_fail_wins_and_nothing_judged_is_no_pass() -> None:
    of = {one: Check(name="x", verdict=one, reason="") for one in Verdict}
    assert overall([of[PASS], of[OPEN], of[FAIL]]) is FAIL
    assert overall([of[PASS], of[OPEN]]) is OPEN
    assert overall([of[PASS]]) is PASS
    assert overall([]) is OPEN


def test_of_what_a_server_never_shows_the_nearest_is_named() -> None:
    shown = {"leaked_slots": gated.count(0, "slots"), "leaked_kv_share": gated.count(0, "ratio")}
    limits = ("leaked_blocks.max == 0", "ghost_rate.mean == 0", "slot_recovery_s.p50 < 1")
    _, *checks = judged(gated.measured(gated.summary(shown)), *limits).checks[:4]
    assert [one.to_decide for one in checks] == [
        "a run that can measure it, or a limit on `leaked_kv_share`, which this server shows",
        "a run that can measure it, or a limit on `leaked_slots`, which this server shows",
        "a run that can measure it",
    ]
