"""The summary as a whole: complete, plain, ordered, honest about what it lacks, and fast."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pandas as pd
import pytest

from harness.metrics import METRICS
from harness.records import Metric, Role, TokenCounting
from harness.store.frames import RunFrames
from harness.store.manifest import Clock
from tests.harness.told import summary_of

if TYPE_CHECKING:
    from tests.made_up.run import RunBuilder

    MakeRun = Callable[[], RunBuilder]


def small_run(run: RunBuilder) -> RunBuilder:
    run.abandon("a", t0=33, tokens=[21, 31], planned_abandon=2)
    run.events("a", arrived=1, admitted=10.1, first_token=20, disconnected=34, abort_received=35)
    run.events("a", removed=40.1, blocks_freed=40.2, finished=40.3, generated=3)
    run.request("s", sent=0, tokens=[21, 31, 41], outcome="completed", end=42)
    run.events("s", reason="length", arrived=1, admitted=10.2, first_token=20)
    run.events("s", reason="length", removed=40.01, blocks_freed=40.02, finished=40.03, generated=3)
    run.step(10, 20, sampled=("a", "s"), a=5, s=5)
    run.steps(2, 3, "a", "s")
    run.lag(0, 0.1)
    run.metrics(running="exact", free_blocks="exact")
    run.idle({"running": 0, "free_blocks": 9}, {"running": 0, "free_blocks": 9})
    return run


def texts(summary: dict[str, Any], level: str) -> list[str]:
    return [one["text"] for one in summary["validity"] if one["level"] == level]


def test_a_whole_summary(make_run: MakeRun) -> None:
    summary = summary_of(small_run(make_run()).frames())
    assert summary["outcomes"] == {
        "completed": 1,
        "abandoned": 1,
        "timed_out": 0,
        "rejected": 0,
        "failed": 0,
        "cut_off": 0,
    }
    assert (summary["schema_version"], summary["run_id"]) == (1, "made-up")
    assert (summary["workload"], summary["engine"], summary["model"]) == (
        "hand-made",
        "reference",
        "tiny",
    )
    assert summary["status"] == "complete"
    assert summary["token_counting"] == "usage"
    assert {one["level"] for one in summary["validity"]} == {"info"}
    assert all("not enough data" in text or "takes" in text for text in texts(summary, "info"))
    assert summary["flags"] == {}
    latency = summary["metrics"]["cancel_latency_s"]
    assert set(latency) == set(Metric.__struct_fields__)
    assert latency["p50"] == pytest.approx(0.0072)
    assert latency["mean_ci95"] is None
    assert summary["metrics"]["leaked_blocks"]["mean"] == 0
    assert summary["not_measurable"]["scrape_interval_s"] == "the run did not scrape"


def test_it_is_json_and_the_figures_come_in_their_order(make_run: MakeRun) -> None:
    summary = summary_of(small_run(make_run()).frames())
    read_back = json.loads(json.dumps(summary, allow_nan=False))
    assert list(read_back) == list(summary)
    names = list(summary["metrics"])
    assert names == [name for name in METRICS if name in names]
    assert set(names) | set(summary["not_measurable"]) <= set(METRICS)
    assert msgspec.convert(read_back["metrics"], dict[str, Metric])["wasted_tokens"].mean == 1


def test_the_same_frames_give_the_same_summary(make_run: MakeRun) -> None:
    frames = small_run(make_run()).frames()
    assert summary_of(frames) == summary_of(frames)


def test_an_empty_run_is_invalid(make_run: MakeRun) -> None:
    summary = summary_of(make_run().frames())
    assert texts(summary, "invalid") == ["no request ended: there is nothing to report"]
    assert summary["metrics"] == {}
    assert sum(summary["outcomes"].values()) == 0


def test_nobody_left_is_said(make_run: MakeRun) -> None:
    run = small_run(make_run())
    gone = run.requests.pop(0).request_id
    run.lifecycle = [event for event in run.lifecycle if event.client_request_id != gone]
    summary = summary_of(run.frames())
    assert texts(summary, "warning") == [
        "no request was abandoned: the run says nothing about cancellation"
    ]
    assert summary["not_measurable"]["cancel_latency_s"] == "no request was abandoned"


def test_an_unfinished_run_says_so(make_run: MakeRun) -> None:
    for status, word in (
        ("interrupted", "interrupted"),
        ("target_failed", "the target or the load failed"),
    ):
        run = small_run(make_run())
        run.manifest.status = status  # type: ignore[assignment]
        assert any(word in text for text in texts(summary_of(run.frames()), "warning"))


def test_too_little_left_to_run(make_run: MakeRun) -> None:
    run = small_run(make_run())
    # 2 generated at t0 and 10 ms a step: with 402 tokens just twice the settle time of 2 s is left.
    run.requests[0].max_tokens = 402
    assert texts(summary_of(run.frames()), "warning") == []
    run.requests[0].max_tokens = 401
    (text,) = texts(summary_of(run.frames()), "warning")
    assert "1 of 1 abandoned requests had less than twice the settle time (2 s)" in text


def test_what_went_wrong_is_counted(make_run: MakeRun) -> None:
    run = small_run(make_run())
    run.request("t", sent=0, tokens=[21], outcome="timed_out", end=90)
    run.request("f", sent=0, tokens=[], outcome="failed", end=90)
    (text,) = texts(summary_of(run.frames()), "warning")
    assert text == "2 of 4 requests went wrong: 1 failed, 1 timed out"


def test_a_figure_below_the_floor_is_flagged(make_run: MakeRun) -> None:
    run = small_run(make_run())
    run.lag(100, 15)
    summary = summary_of(run.frames())
    # Gaps of 10 ms between tokens; nothing that the engine itself stamped is touched.
    assert set(summary["flags"]) == {"itl_s", "tpot_s"}
    assert "client_lag_s p99 is 15 ms" in summary["flags"]["itl_s"]
    assert len(texts(summary, "warning")) == 2


def test_holes_in_the_log_are_said(make_run: MakeRun) -> None:
    run = small_run(make_run())
    run.abandon("lost", t0=33, tokens=[21])
    run.manifest.notes = ["3 lifecycle events fell out of the engine's log"]
    summary = summary_of(run.frames())
    assert set(run.manifest.notes) <= set(texts(summary, "info"))
    assert "1 of 2 abandoned requests are not in the lifecycle log" in texts(summary, "warning")[0]


def test_what_may_be_wrong_with_the_collection_is_a_warning(make_run: MakeRun) -> None:
    run = small_run(make_run())
    run.manifest.warnings = ["the page of metrics could not be read 3 times"]
    assert texts(summary_of(run.frames()), "warning") == run.manifest.warnings


def leave_and_run_on(run: RunBuilder) -> None:
    """Two ghosts, one of them cut off by the end of the run and then preempted, still run."""
    run.abandon("g", t0=33, tokens=[21, 31])
    run.request("cut", sent=0, tokens=[21], outcome="cut_off", end=900)
    for name in ("g", "cut"):
        run.events(name, arrived=1, admitted=10.1, first_token=20)
    run.events("cut", preempted=30.1, resumed=50.1)
    run.events("somebody else's", arrived=1, admitted=10.1, first_token=20)
    run.step(10, 20, sampled=("g", "cut"), g=5, cut=5)
    run.step(20, 30, sampled=("g", "cut"), g=1, cut=1)
    run.steps(3, 4, "g")
    run.step(50, 60, sampled=("g", "cut"), g=1, cut=7)
    run.metrics(running="exact", free_blocks="exact")


def test_what_ghosts_hold_is_missing_but_not_lost(make_run: MakeRun) -> None:
    run = make_run()
    leave_and_run_on(run)
    run.idle({"running": 0, "free_blocks": 100}, {"running": 2, "free_blocks": 90})
    summary = summary_of(run.frames())
    assert summary["metrics"]["leaked_slots"]["mean"] == 2
    assert summary["metrics"]["leaked_blocks"]["mean"] == 10
    # Of 4 tokens each: 9 of "g" lie in 3 blocks, 7 of "cut" in 2; the other 5 blocks are lost.
    assert summary["breakdown"]["leaks_in_use"] == {"slots": 2, "blocks": 5}
    assert texts(summary, "warning")[0] == (
        "leaked_slots and leaked_blocks: of these, 2 slots and 5 blocks are held by requests that "
        "are still running (ghosts)"
    )


def test_no_more_is_in_use_than_is_missing(make_run: MakeRun) -> None:
    run = make_run()
    leave_and_run_on(run)
    run.idle({"running": 0, "free_blocks": 100}, {"running": 1, "free_blocks": 100})
    assert summary_of(run.frames())["breakdown"]["leaks_in_use"] == {"slots": 1}


def test_what_is_lost_is_in_nobodys_hands(make_run: MakeRun) -> None:
    run = small_run(make_run())
    run.idle({"running": 0, "free_blocks": 9}, {"running": 0, "free_blocks": 2})
    summary = summary_of(run.frames())
    assert summary["breakdown"]["leaks_in_use"] == {}
    assert texts(summary, "warning") == []


def test_the_length_of_the_control_is_the_workloads_choice(make_run: MakeRun) -> None:
    run = make_run()
    run.manifest.workload["load"] = {"kind": "slot_recovery", "control_answer_tokens": 64}
    run.request(
        "p", sent=0, tokens=[10], outcome="completed", end=9, role=Role.PROBE, arm="unloaded"
    )
    (text,) = texts(summary_of(run.frames()), "info")
    assert "a filler's natural end, here after 64 tokens" in text


def test_a_busy_server_and_two_clocks_are_said(make_run: MakeRun) -> None:
    run = small_run(make_run())
    run.idle({"running": 2}, {"running": 2})
    run.manifest.clock = Clock(comparable=False)
    first, second = texts(summary_of(run.frames()), "warning")
    assert first.startswith("2 requests of other users")
    assert "clock" in second


def test_void_trials_are_said(make_run: MakeRun) -> None:
    run = small_run(make_run())
    run.request(
        "p", sent=0, tokens=[10], outcome="completed", end=9, role=Role.PROBE, arm="abandon"
    )
    assert texts(summary_of(run.frames()), "warning") == [
        "1 of 1 probe trials are void: no filler left, or the probe was served before"
    ]


def test_a_run_against_another_engine(make_run: MakeRun) -> None:
    run = make_run()
    run.another_engine()
    run.metrics(running="exact", generated_tokens="exact_when_idle")
    run.idle({"running": 0, "generated_tokens": 0}, {"running": 1, "generated_tokens": 60})
    run.abandon("a", t0=33, tokens=[21, 31])
    run.request("s", sent=0, tokens=[21, 31, 41], outcome="completed", end=42)
    for row in run.requests:
        row.token_counting = TokenCounting.EVENTS
    summary = summary_of(run.frames())
    assert summary["metrics"]["wasted_tokens"]["mean"] == 55
    assert summary["metrics"]["wasted_tokens"]["bound"] == "lower"
    assert summary["metrics"]["leaked_slots"]["mean"] == 1
    ghosts = summary["metrics"]["ghost_rate"]
    assert (ghosts["method"], ghosts["bound"], ghosts["mean"]) == ("gauge", "lower", 1.0)
    for name in ("cancel_latency_s", "wasted_after_close_tokens", "leaked_blocks"):
        assert name not in summary["metrics"]
        assert summary["not_measurable"][name]
    assert any("counted as events" in text for text in texts(summary, "info"))


def test_exact_waste_has_the_counter_beside_it(make_run: MakeRun) -> None:
    run = small_run(make_run())
    run.metrics(generated_tokens="exact")
    run.idle({"generated_tokens": 0}, {"generated_tokens": 6})
    waste = summary_of(run.frames())["metrics"]["wasted_tokens"]
    assert (waste["method"], waste["mean"]) == ("exact", 1.0)
    assert waste["others"]["counter"]["mean"] == 1.0


def large(frames: RunFrames, copies: int) -> RunFrames:
    """The same small run over and over, one second apart, under new names."""

    def repeat(frame: pd.DataFrame, ids: list[str]) -> pd.DataFrame:
        number = np.repeat(np.arange(copies), len(frame))
        many = pd.concat([frame] * copies, ignore_index=True)
        shift = number * 1_000_000_000
        times = [c for c in many.columns if c.endswith("_ns") and c != "token_times_ns"]
        changed = {c: many[c] + shift for c in times if many[c].notna().any()}
        changed |= {c: many[c] + "#" + number.astype(str).astype(object) for c in ids}
        return many.assign(**changed)

    steps = repeat(frames.steps, [])
    names = [
        np.array([f"{name}#{i // len(frames.steps)}" for name in ids], dtype=object)
        for i, ids in enumerate(steps["request_ids"])
    ]
    return replace(
        frames,
        requests=repeat(frames.requests, ["request_id"]),
        lifecycle=repeat(frames.lifecycle, ["request_id", "client_request_id"]),
        steps=steps.assign(request_ids=pd.Series(names, index=steps.index)),
    )


def test_many_requests_have_the_figures_of_one(make_run: MakeRun) -> None:
    run = small_run(make_run())
    run.manifest.window.settled_ns = None
    copies = 500
    summary = summary_of(large(run.frames(), copies))
    latency = summary["metrics"]["cancel_latency_s"]
    assert (latency["n"], latency["n_censored"]) == (copies, 0)
    assert latency["p99"] == latency["p50"] == pytest.approx(0.0072)
    assert summary["metrics"]["wasted_tokens"]["mean"] == 1.0
    assert summary["metrics"]["gpu_seconds_after_abandon"]["mean"] == pytest.approx(0.0035)


@pytest.mark.parametrize(("quiet", "is_said"), [(450, True), (0, False)])
def test_a_long_warm_up_is_said(make_run: MakeRun, quiet: int, is_said: bool) -> None:
    run = make_run()
    tokens = [float(t) for t in range(quiet, 1000)]
    run.request("a", sent=0, tokens=tokens, outcome="completed", end=1000)
    said = texts(summary_of(run.frames()), "warning")
    assert any("the first 45% of the load were warm-up" in text for text in said) is is_said
