"""What the counters tell of waste and leaks: prompts that nobody was told of are guessed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pytest

from harness.analysis.tokens import prompt_total
from tests.harness.audited import accounts, verdicts
from tests.harness.told import summary_of

if TYPE_CHECKING:
    from tests.made_up.run import RunBuilder

    MakeRun = Callable[[], RunBuilder]


def early_leaver(run: RunBuilder, *, counted: float) -> None:
    """Two who read prompts of 10 tokens, and two who left before a first token."""
    run.another_engine()
    run.metrics(running="exact", prompt_tokens="exact")
    for name in ("r1", "r2"):
        run.request(name, sent=0, tokens=[10, 20], outcome="completed", end=25, prompt_tokens=10)
    for name in ("l1", "l2"):
        run.abandon(name, t0=50, tokens=[])
    idle = {"running": 0.0, "prompt_tokens": 100.0}
    run.idle(idle, idle | {"prompt_tokens": 100.0 + counted})


def test_prompts_that_were_computed_for_nobody_are_waste(make_run: MakeRun) -> None:
    run = make_run()
    early_leaver(run, counted=36)
    wasted = summary_of(run.frames())["metrics"]["wasted_prompt_tokens"]
    assert (wasted["mean"], wasted["n"], wasted["bound"]) == (8.0, 2, "point")
    assert wasted["others"]["total_tokens"] == 16


def test_a_counter_that_leaves_aborted_prompts_out_gives_a_lower_bound(make_run: MakeRun) -> None:
    run = make_run()
    early_leaver(run, counted=20)
    assert run.manifest.target is not None
    run.manifest.target.spec["metrics"]["prompt_tokens"]["trust"] = "lower"
    wasted = summary_of(run.frames())["metrics"]["wasted_prompt_tokens"]
    assert (wasted["mean"], wasted["bound"]) == (0.0, "lower")


def test_prompts_that_nobody_was_told_of_are_guessed_and_the_interval_says_so(
    make_run: MakeRun,
) -> None:
    run = make_run()
    early_leaver(run, counted=50)
    run.request("r3", sent=0, tokens=[10, 20], outcome="completed", end=25, prompt_tokens=14)
    run.abandon("r4", t0=50, tokens=[30])
    wasted = summary_of(run.frames())["metrics"]["wasted_prompt_tokens"]
    low, high = wasted["mean_ci95"]
    assert low < wasted["mean"] < high


@pytest.mark.parametrize("counted", [20, 40])
def test_a_prompt_may_be_counted_for_each_of_several_answers(
    make_run: MakeRun, counted: float
) -> None:
    run = make_run()
    early_leaver(run, counted=counted)
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


def test_blocks_follow_from_their_share_where_their_number_is_told(make_run: MakeRun) -> None:
    run = make_run()
    run.another_engine()
    run.metrics(running="exact", kv_usage="exact")
    run.abandon("a", t0=50, tokens=[10])
    run.idle({"running": 0.0, "kv_usage": 0.0}, {"running": 0.0, "kv_usage": 0.0102})
    assert "leaked_blocks" in summary_of(run.frames())["not_measurable"]
    assert run.manifest.target is not None
    run.manifest.target.blocks_found = 1000
    assert summary_of(run.frames())["metrics"]["leaked_blocks"]["mean"] == 10


def test_who_was_cut_off_is_counted_among_those_left(make_run: MakeRun) -> None:
    run = accounts(make_run())
    run.request("c", sent=0, tokens=[10], outcome="cut_off", end=20, prompt_tokens=10)
    wasted = summary_of(run.frames())["metrics"]["wasted_tokens"]
    assert (wasted["n"], wasted["others"]["cut_off"]) == (2, 1)
