"""Waste of servers that show only counters: tokens, prompts, blocks."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from msgspec import structs

from harness.analysis.black_box import Outside, figures_from_outside
from harness.analysis.figure import Figure
from harness.analysis.tokens import prompt_total
from harness.metrics import CANCEL_LATENCY
from harness.records import Outcome
from tests.harness.analysis.scenes import seen, verdicts
from tests.harness.told import MakeRun, known, metric, reason, summary_of
from tests.made_up.run import RunBuilder
from tests.made_up.servers import lonely


def waste_of(*rounds: Outside) -> Figure:
    return figures_from_outside(rounds)["wasted_tokens"]["counter"]


def test_waste_of_rounds_is_added_up(run: RunBuilder) -> None:
    one = seen(lonely(run))
    waste = metric(one.waste)
    assert (waste.mean, waste.n, waste.bound) == (4.0, 1, "point")
    others = {"total_tokens": 2.0, "generated_tokens": 20.0, "cut_off": 1}
    more = structs.replace(waste, mean=0.5, n=4, bound="lower", others=others)
    found = metric(waste_of(one, replace(one, waste=more)))
    assert (found.mean, found.n, found.bound) == ((4.0 + 2.0) / 5, 5, "lower")
    assert found.others["cut_off"] == 1


def test_a_counter_below_what_was_read_tells_of_no_waste(run: RunBuilder) -> None:
    run = lonely(run)
    run.manifest.idle.after |= {"generated_tokens": 1.0}
    why = "its_generated_tokens moved by 1, less than the 2 tokens that clients read"
    assert reason(waste_of(seen(run))) == why


def test_while_somebody_is_still_served_there_will_be_more_waste(run: RunBuilder) -> None:
    run = lonely(run)
    run.manifest.idle.later = {"running": 0, "waiting": 0, "generated_tokens": 7.0}
    waste = metric(waste_of(seen(run)))
    assert (waste.mean, waste.bound) == (4.0, "lower")


def test_a_latency_that_has_no_end_limits_no_waste(run: RunBuilder) -> None:
    """It is a lower bound while a ghost runs: the most waste does not follow from it."""
    run = lonely(run)
    assert "upper" in metric(waste_of(seen(run))).others
    run.manifest.idle.after |= {"running": 1}
    run.scrape(190, "its_running", 1)
    outside = seen(run)
    assert metric(figures_from_outside([outside])[CANCEL_LATENCY]["gauge"]).bound == "lower"
    assert "upper" not in metric(waste_of(outside)).others


def test_of_a_request_for_several_answers_all_may_be_wasted(make_run: MakeRun) -> None:
    """Its answers are generated side by side."""
    limits = []
    for answers in (1, 3):
        run = lonely(make_run())
        row = run.requests[0]
        row.n, row.token_times_ns = answers, sorted(row.token_times_ns * answers)
        row.event_tokens = [1] * len(row.token_times_ns)
        waste = metric(waste_of(seen(run)))
        assert waste.n == 1
        latency = metric(figures_from_outside([seen(run)])["cancel_latency_s"]["gauge"])
        limits.append(waste.others["upper"].mean / (known(latency.upper95) / 0.030 + 2))
    assert limits == pytest.approx([1, 3])


def early_leavers(run: RunBuilder, *, counted: float) -> RunBuilder:
    """Two who read prompts of 10 tokens, and two who left before a first token."""
    run.another_engine()
    run.metrics(running="exact", prompt_tokens="exact")
    for name in ("r1", "r2"):
        run.request(name, sent=0, tokens=[10, 20], outcome="completed", end=25, prompt_tokens=10)
    for name in ("l1", "l2"):
        run.abandon(name, t0=50, tokens=[])
    idle = {"running": 0.0, "prompt_tokens": 100.0}
    run.idle(idle, idle | {"prompt_tokens": 100.0 + counted})
    return run


def test_a_counter_that_leaves_aborted_prompts_out_gives_a_lower_bound(run: RunBuilder) -> None:
    early_leavers(run, counted=20)
    run.target.spec["metrics"]["prompt_tokens"]["trust"] = "lower"
    wasted = summary_of(run.frames())["metrics"]["wasted_prompt_tokens"]
    assert (wasted["mean"], wasted["n"], wasted["bound"]) == (0.0, 2, "lower")


def test_prompts_of_unknown_length_are_guessed_with_an_interval(run: RunBuilder) -> None:
    early_leavers(run, counted=50)
    run.request("r3", sent=0, tokens=[10, 20], outcome="completed", end=25, prompt_tokens=14)
    run.abandon("r4", t0=50, tokens=[30])
    wasted = summary_of(run.frames())["metrics"]["wasted_prompt_tokens"]
    low, high = wasted["mean_ci95"]
    assert low < wasted["mean"] < high


@pytest.mark.parametrize("counted", [20, 40])
def test_a_prompt_may_be_counted_for_each_of_several_answers(
    run: RunBuilder, counted: float
) -> None:
    early_leavers(run, counted=counted)
    for row in run.requests:
        row.n = 2
    assert verdicts(run)["prompt_tokens"] == "exact"
    reason = summary_of(run.frames())["not_measurable"]["wasted_prompt_tokens"]
    assert "each of several answers" in reason


def test_a_sum_of_guessed_prompts_is_known_less_well_the_fewer_were_told() -> None:
    def prompts(*told: int | None) -> tuple[float, float] | None:
        requests = pd.DataFrame({"prompt_tokens": pd.Series(told, dtype="Int64")})
        return prompt_total(requests, np.ones(len(told), dtype=bool))

    t_of_2, t_of_5 = 4.3027, 2.5706
    assert prompts(10, 12, 14) == (36, 0)
    # s * sqrt(g + g^2 / k), with two guessed from three, then from six
    spread = t_of_2 * 2 * (2 + 4 / 3) ** 0.5
    assert prompts(10, 12, 14, None, None) == pytest.approx((60, spread), rel=1e-4)
    spread = t_of_5 * 1.7889 * (2 + 4 / 6) ** 0.5
    assert prompts(*[10, 12, 14] * 2, None, None) == pytest.approx((96, spread), rel=1e-4)
    assert prompts(10) == (10, 0)
    assert prompts(10, None) is None
    assert prompts(8, 12, *[None] * 20) is None
    assert prompts() is None


def test_a_request_that_was_cut_off_makes_no_figure_of_cancellation(run: RunBuilder) -> None:
    lonely(run)
    for row in run.requests:
        row.outcome, row.abandoned_ns = Outcome.CUT_OFF, None
    summary = summary_of(run.frames())
    for name in ("cancel_latency_s", "ghost_rate", "wasted_tokens"):
        assert "no request was abandoned" in summary["not_measurable"][name]
    assert summary["audit"]["client"]["cut_off"] == 1
