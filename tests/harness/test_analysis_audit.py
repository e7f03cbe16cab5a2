"""The audit's verdicts, one lie of a counter each; strange answers; methods that do not agree."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pandas as pd
import pytest

from harness.analysis.others import foreign_requests
from harness.analysis.summary import summarise
from harness.analysis.tokens import prompt_total
from harness.analysis.void_trials import about_void_trials
from harness.records import Delivery, TokenCounting, VoidTrial
from harness.run import find_void
from tests.harness.conftest import at

if TYPE_CHECKING:
    from tests.harness.conftest import RunBuilder

    MakeRun = Callable[[], RunBuilder]

MS = 1_000_000


def accounts(run: RunBuilder) -> RunBuilder:
    """Two users: one reads 60 tokens, one leaves after 40; each prompt has 10 tokens."""
    run.another_engine()
    roles = ("running", "waiting", "generated_tokens", "prompt_tokens", "aborted", "ended")
    run.metrics(**dict.fromkeys(roles, "exact"))
    tokens = [10.0 * i for i in range(1, 61)]
    run.request(
        "s", sent=0, tokens=tokens, outcome="completed", end=605, max_tokens=60, prompt_tokens=10
    )
    run.abandon("a", t0=405, tokens=tokens[:40], prompt_tokens=10)
    for t in range(5, 1000, 20):
        there = sum(t < end for end in (605, 415))
        run.scrape(t, "its_running", there)
        run.scrape(t, "its_waiting", 0)
        run.scrape(t, "its_generated_tokens", min(t / 10, 60) + min(t / 10, 41))
    before = dict.fromkeys(roles, 0.0)
    due = {"generated_tokens": 101.0, "prompt_tokens": 20.0, "aborted": 1.0, "ended": 2.0}
    run.idle(before, before | due)
    return run


def verdicts(run: RunBuilder) -> dict[str, str]:
    counters = summarise(run.frames())["audit"]["counters"]
    return {entry["role"]: entry["verdict"] for entry in counters}


def test_an_honest_server_is_exact(make_run: MakeRun) -> None:
    run = accounts(make_run())
    assert set(verdicts(run).values()) == {"exact"}
    client = summarise(run.frames())["audit"]["client"]
    assert (client["sent"], client["completed"], client["abandoned_while_reading"]) == (2, 1, 1)
    assert (client["tokens_read"], client["prompt_tokens_known"]) == (100, 20)


@pytest.mark.parametrize(
    ("role", "told", "verdict"),
    [
        ("aborted", 0.0, "stuck"),
        ("aborted", 2.0, "double"),
        ("aborted", 3.0, "gross"),
        ("generated_tokens", 60.0, "lower"),
        ("generated_tokens", 202.0, "double"),
        ("generated_tokens", 500.0, "gross"),
        ("prompt_tokens", 0.0, "stuck"),
        ("prompt_tokens", 40.0, "double"),
        ("ended", 1.0, "lower"),
        ("running", 1.0, "gross"),
    ],
)
def test_each_lie_has_its_verdict(make_run: MakeRun, role: str, told: float, verdict: str) -> None:
    run = accounts(make_run())
    run.manifest.idle.after[role] = told
    assert verdicts(run)[role] == verdict


def test_a_counter_that_appears_with_its_first_count_began_at_nothing(make_run: MakeRun) -> None:
    run = accounts(make_run())
    del run.manifest.idle.before["aborted"]
    assert verdicts(run)["aborted"] == "exact"
    run.manifest.idle.before = {}  # nobody read the page before
    assert verdicts(run)["aborted"] == "not told"
    run = accounts(make_run())
    del run.manifest.idle.before["running"]
    assert verdicts(run)["running"] == "not told"


def test_what_counts_only_at_the_end_is_late(make_run: MakeRun) -> None:
    run = accounts(make_run())
    for sample in run.server_metrics:
        if sample.name == "its_generated_tokens" and sample.value < 101:
            sample.value = 0.0
    assert verdicts(run)["generated_tokens"] == "late"


def test_what_moves_on_after_the_settle_time_is_late(make_run: MakeRun) -> None:
    run = accounts(make_run())
    run.manifest.idle.after["ended"] = 1.0
    run.manifest.idle.later = run.manifest.idle.after | {"ended": 2.0}
    assert verdicts(run)["ended"] == "late"


def test_a_gauge_that_never_moves_is_stuck(make_run: MakeRun) -> None:
    run = accounts(make_run())
    for sample in run.server_metrics:
        if sample.name == "its_running":
            sample.value = 0.0
    assert verdicts(run)["running"] == "stuck"


def test_a_gauge_is_not_called_stuck_by_scrapes_that_fell_between_answers(
    make_run: MakeRun,
) -> None:
    run = accounts(make_run())
    run.server_metrics = [
        msgspec.structs.replace(sample, value=0.0 if sample.name == "its_running" else sample.value)
        for sample in run.server_metrics
        if sample.t_ns > at(605) or sample.t_ns < at(10)
    ]
    assert verdicts(run)["running"] == "exact"


def test_what_is_called_a_lower_bound_stays_one(make_run: MakeRun) -> None:
    run = accounts(make_run())
    assert run.manifest.target is not None
    run.manifest.target.spec["metrics"]["generated_tokens"]["trust"] = "lower"
    assert verdicts(run)["generated_tokens"] == "lower"


def test_what_is_known_never_to_move_is_stuck_also_where_it_need_not_have_moved(
    make_run: MakeRun,
) -> None:
    run = accounts(make_run())
    run.requests.pop()
    run.abandon("early", t0=405, tokens=[], prompt_tokens=10)
    run.manifest.idle.after["aborted"] = 0.0
    assert verdicts(run)["aborted"] == "exact"
    assert run.manifest.target is not None
    run.manifest.target.spec["metrics"]["aborted"]["trust"] = "stuck"
    assert verdicts(run)["aborted"] == "stuck"


def test_a_counter_that_is_right_when_idle_is_not_judged_while_requests_run(
    make_run: MakeRun,
) -> None:
    run = accounts(make_run())
    assert run.manifest.target is not None
    run.manifest.target.spec["metrics"]["generated_tokens"]["trust"] = "exact_when_idle"
    assert verdicts(run)["generated_tokens"] == "exact"
    run.manifest.idle.after |= {"generated_tokens": 0.0, "running": 4.0}
    assert verdicts(run)["generated_tokens"] == "cannot be judged"


def test_a_counter_without_an_upper_limit_is_not_called_exact(make_run: MakeRun) -> None:
    run = accounts(make_run())
    run.server_metrics = []
    run.manifest.idle.after["generated_tokens"] = 150.0
    assert verdicts(run)["generated_tokens"] == "cannot be judged"


def test_what_the_target_does_not_tell(make_run: MakeRun) -> None:
    run = accounts(make_run())
    run.metrics(running="exact")
    assert verdicts(run)["aborted"] == "not told"


def warnings(run: RunBuilder) -> list[str]:
    said: list[dict[str, Any]] = summarise(run.frames())["validity"]
    return [one["text"] for one in said if one["level"] == "warning"]


def test_an_ignored_max_tokens_is_said(make_run: MakeRun) -> None:
    run = make_run()
    run.request("a", sent=0, tokens=[1, 2, 3], outcome="completed", end=4, max_tokens=2)
    assert any("1 of 1 answers were longer than their `max_tokens`" in t for t in warnings(run))


def test_an_empty_stream_is_said(make_run: MakeRun) -> None:
    run = make_run()
    run.request("a", sent=0, tokens=[], outcome="completed", end=4)
    run.request("b", sent=0, tokens=[1], outcome="completed", end=4)
    assert any("1 of 2 completed answers held no token" in text for text in warnings(run))


def test_a_stream_of_errors_is_said_once_for_each_kind(make_run: MakeRun) -> None:
    run = make_run()
    for i in range(3):
        run.request(
            f"{i}", sent=0, tokens=[], outcome="failed", end=4, error=f"HTTP 500: block {i}"
        )
    run.request("r", sent=0, tokens=[], outcome="rejected", end=4, error="HTTP 429: full")
    said = [text for text in warnings(run) if "ended with" in text]
    assert said == [
        "3 of 4 requests ended with: HTTP 500: block 0",
        "1 of 4 requests ended with: HTTP 429: full",
    ]


def test_requests_that_went_out_twice_are_said(make_run: MakeRun) -> None:
    run = make_run()
    run.request("a", sent=0, tokens=[1], outcome="completed", end=4)
    assert not [text for text in warnings(run) if "once more" in text]
    run.request("b", sent=0, tokens=[1], outcome="completed", end=4, resent=True)
    assert any("1 of 2 requests were sent once more" in text for text in warnings(run))


def test_answers_that_are_over_before_anybody_leaves(make_run: MakeRun) -> None:
    run = make_run()
    run.request("a", sent=0, tokens=[1, 2], outcome="completed", end=4, planned_abandon=5)
    said = warnings(run)
    assert any("1 of 1 who were to leave found the answer over" in text for text in said)
    assert any("does the target know `ignore_eos`?" in text for text in said)
    assert any("1 were to leave; of these: 1 completed" in text for text in said)


def test_events_are_no_tokens_in_the_audit(make_run: MakeRun) -> None:
    run = accounts(make_run())
    for row in run.requests:
        row.token_counting = TokenCounting.EVENTS
    run.requests[0].completion_tokens = 120
    run.manifest.idle.after["generated_tokens"] = 202.0
    for sample in run.server_metrics:
        if sample.name == "its_generated_tokens":
            sample.value *= 2
    assert verdicts(run)["generated_tokens"] == "exact"


def test_methods_that_nothing_explains_are_a_warning(make_run: MakeRun) -> None:
    run = make_run()
    run.metrics(running="exact", waiting="exact")
    for i in range(30):
        t0 = 20.0 + 30 * i
        run.abandon(f"{i}", t0=t0, tokens=[t0 - 5])
        run.requests[-1].sent_ns += round((t0 - 10) * 1e6)
        run.events(f"{i}", arrived=t0 - 10, admitted=t0 - 9, removed=t0 + 1, finished=t0 + 2)
        run.events(f"{i}", blocks_freed=t0 + 2)
    for t in range(0, 1000, 5):
        run.scrape(t, "its_running", 3)  # whatever is held: three of nobody
        run.scrape(t, "its_waiting", t % 2)
    run.idle({"running": 0, "waiting": 0}, {"running": 0, "waiting": 0})
    run.scrape(1001, "its_running", 0)
    run.scrape(1001, "its_waiting", 0)
    summary = summarise(run.frames())
    (pair,) = [
        one
        for one in summary["agreement"]
        if (one["metric"], one["method"]) == ("cancel_latency_s", "gauge")
    ]
    assert pair["exact"] == pytest.approx(0.002)
    assert not pair["agrees"]
    assert any("more apart than interval and refresh rule explain" in t for t in warnings(run))


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
    wasted = summarise(run.frames())["metrics"]["wasted_prompt_tokens"]
    assert (wasted["mean"], wasted["n"], wasted["bound"]) == (8.0, 2, "point")
    assert wasted["others"]["total_tokens"] == 16


def test_a_counter_that_leaves_aborted_prompts_out_gives_a_lower_bound(make_run: MakeRun) -> None:
    run = make_run()
    early_leaver(run, counted=20)
    assert run.manifest.target is not None
    run.manifest.target.spec["metrics"]["prompt_tokens"]["trust"] = "lower"
    wasted = summarise(run.frames())["metrics"]["wasted_prompt_tokens"]
    assert (wasted["mean"], wasted["bound"]) == (0.0, "lower")


def test_prompts_that_nobody_was_told_of_are_guessed_and_the_interval_says_so(
    make_run: MakeRun,
) -> None:
    run = make_run()
    early_leaver(run, counted=50)
    run.request("r3", sent=0, tokens=[10, 20], outcome="completed", end=25, prompt_tokens=14)
    run.abandon("r4", t0=50, tokens=[30])
    wasted = summarise(run.frames())["metrics"]["wasted_prompt_tokens"]
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
    reason = summarise(run.frames())["not_measurable"]["wasted_prompt_tokens"]
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


def test_who_left_an_answer_in_one_piece_had_read_nothing(make_run: MakeRun) -> None:
    run = accounts(make_run())
    said = "had asked for an answer in one piece"
    assert not any(said in one["text"] for one in summarise(run.frames())["validity"])
    run.requests[-1].delivery = Delivery.UNARY
    assert any(said in one["text"] for one in summarise(run.frames())["validity"])


def test_whoever_reads_no_events_counts_none(make_run: MakeRun) -> None:
    run = make_run()
    run.abandon("a", t0=50, tokens=[], token_counting=TokenCounting.EVENTS)
    texts = [one["text"] for one in summarise(run.frames())["validity"]]
    assert not any("counted as events" in text for text in texts)


@pytest.mark.parametrize(("every", "is_said"), [(20, False), (58, True)])
def test_a_page_that_is_read_more_seldom_than_asked_is_warned_of(
    make_run: MakeRun, every: int, is_said: bool
) -> None:
    run = accounts(make_run())
    run.server_metrics.clear()
    run.manifest.scrape_interval_s = 0.02
    for t in range(5, 1000, every):
        run.scrape(t, "its_running", float(t < 500))
    assert any("was to be read every 0.02 s" in text for text in warnings(run)) is is_said


def test_blocks_follow_from_their_share_where_their_number_is_told(make_run: MakeRun) -> None:
    run = make_run()
    run.another_engine()
    run.metrics(running="exact", kv_usage="exact")
    run.abandon("a", t0=50, tokens=[10])
    run.idle({"running": 0.0, "kv_usage": 0.0}, {"running": 0.0, "kv_usage": 0.0102})
    assert "leaked_blocks" in summarise(run.frames())["not_measurable"]
    assert run.manifest.target is not None
    run.manifest.target.blocks_found = 1000
    assert summarise(run.frames())["metrics"]["leaked_blocks"]["mean"] == 10


def test_who_was_cut_off_is_counted_among_those_left(make_run: MakeRun) -> None:
    run = accounts(make_run())
    run.request("c", sent=0, tokens=[10], outcome="cut_off", end=20, prompt_tokens=10)
    wasted = summarise(run.frames())["metrics"]["wasted_tokens"]
    assert (wasted["n"], wasted["others"]["cut_off"]) == (2, 1)


def test_a_page_that_took_long_is_judged_by_when_it_was_asked_for(make_run: MakeRun) -> None:
    """Its middle is late by half of what it took; then clients had read more than it shows."""
    run = accounts(make_run())
    for sample in run.server_metrics:
        sample.t_ns += 60 * MS  # all of them 120 ms
        sample.duration_ns = 120 * MS
    assert verdicts(run)["generated_tokens"] == "exact"
    for number, sample in enumerate(run.server_metrics):
        if number // 3 == 5:  # and one, of three gauges, 410
            sample.t_ns += 145 * MS
            sample.duration_ns += 290 * MS
    assert verdicts(run)["generated_tokens"] == "exact"


def test_several_counters_that_tell_too_much_tell_of_somebody_else(make_run: MakeRun) -> None:
    run = accounts(make_run())
    run.manifest.idle.after |= {"generated_tokens": 500.0, "ended": 9.0}
    summary = summarise(run.frames())
    found = {one["role"]: one["verdict"] for one in summary["audit"]["counters"]}
    assert set(found.values()) == {"cannot be judged"}
    (said,) = [one["text"] for one in summary["validity"] if "somebody else" in one["text"]]
    assert said.startswith("its_generated_tokens, its_ended all told more than this run's clients")


def test_the_log_tells_of_somebody_else(make_run: MakeRun) -> None:
    run = make_run()
    run.metrics(generated_tokens="exact")
    run.idle({"generated_tokens": 0.0}, {"generated_tokens": 50.0})
    for number in (1, 2):
        run.request(f"walkaway-aa-0-{number}", sent=0, tokens=[10], outcome="completed", end=20)
        run.events(f"walkaway-aa-0-{number}", arrived=1)
    run.events("walkaway-aa-0-3", arrived=2)  # its row was lost with its process
    assert foreign_requests(run.frames()) == 0
    run.events("walkaway-bb-0-1", arrived=2)
    summary = summarise(run.frames())
    texts = [one["text"] for one in summary["validity"] if one["level"] == "warning"]
    assert any(text.startswith("somebody else used the server") for text in texts)
    assert summary["audit"]["counters"][0]["verdict"] == "cannot be judged"


def test_void_trials_are_told_with_their_reasons(make_run: MakeRun) -> None:
    run = accounts(make_run())
    run.manifest.workload = {"load": {"trials": 2}, "run": {}}
    void = [VoidTrial(trial=0, arm=arm, why="no slot") for arm in ("control", "abandon")]
    run.manifest.void_trials = void
    (said,) = about_void_trials(run.frames().manifest)
    assert (said.level, said.text) == ("warning", "void trials: 2, because no slot (2)")
    run.manifest.void_trials = [*void, VoidTrial(trial=1, arm="abandon", why="too short")]
    (said,) = about_void_trials(run.frames().manifest)
    assert said.level == "invalid"
    assert said.text == "void trials: 3, because no slot (2); too short (1)"
    failure = find_void(run.manifest)
    assert str(failure) == "no trial means anything; the first, arm control: no slot"
