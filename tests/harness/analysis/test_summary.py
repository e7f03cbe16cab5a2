"""The summary as a whole: complete, plain, ordered, and honest about what it lacks."""

import json
from typing import Any

import msgspec
import pytest

from harness.metrics import METRICS
from harness.records import Metric, Role
from harness.store.manifest import Clock
from tests.conftest import Snapshot
from tests.harness.told import MakeRun, summary_of
from tests.made_up.run import RunBuilder


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


def test_a_whole_summary(run: RunBuilder) -> None:
    frames = small_run(run).frames()
    summary = summary_of(frames)
    assert summary == summary_of(frames)
    assert json.dumps(summary, allow_nan=False)
    outcomes = dict.fromkeys(("timed_out", "rejected", "failed", "cut_off"), 0)
    expected = {
        "outcomes": {"completed": 1, "abandoned": 1, **outcomes},
        "schema_version": 1,
        "run_id": "made-up",
        "workload": "hand-made",
        "engine": "reference",
        "model": "tiny",
        "status": "complete",
        "token_counting": "usage",
        "flags": {},
    }
    assert {key: summary[key] for key in expected} == expected
    names = list(summary["metrics"])
    assert names == [name for name in METRICS if name in names]
    assert set(names) | set(summary["not_measurable"]) <= set(METRICS)
    latency = summary["metrics"]["cancel_latency_s"]
    assert set(latency) == set(Metric.__struct_fields__)
    assert (latency["p50"], latency["mean_ci95"]) == (pytest.approx(0.0072), None)
    assert msgspec.convert(summary["metrics"], dict[str, Metric])["wasted_tokens"].mean == 1


def test_an_empty_run_has_no_figures(run: RunBuilder) -> None:
    summary = summary_of(run.frames())
    assert summary["metrics"] == {}
    assert sum(summary["outcomes"].values()) == 0


def end_early(run: RunBuilder) -> None:
    run.manifest.status = "interrupted"
    run.manifest.warnings = ["the page of metrics could not be read 3 times"]


def fail(run: RunBuilder) -> None:
    run.manifest.status = "target_failed"
    run.request("t", sent=0, tokens=[21], outcome="timed_out", end=90)
    run.request("f", sent=0, tokens=[], outcome="failed", end=90)


def stay(run: RunBuilder) -> None:
    gone = run.requests.pop(0).request_id
    run.lifecycle = [event for event in run.lifecycle if event.client_request_id != gone]


def lag(run: RunBuilder) -> None:
    """Gaps of 10 ms between tokens; nothing that the engine itself stamped is touched."""
    run.lag(100, 15)


def lose_events(run: RunBuilder) -> None:
    run.abandon("lost", t0=33, tokens=[21])
    run.manifest.notes = ["3 lifecycle events fell out of the engine's log"]


def share(run: RunBuilder) -> None:
    run.idle({"running": 2}, {"running": 2})
    run.manifest.clock = Clock(comparable=False)


def probe(run: RunBuilder) -> None:
    run.manifest.workload["load"] = {"kind": "slot_recovery", "control_answer_tokens": 64}
    row: dict[str, Any] = {"sent": 0, "tokens": [10], "outcome": "completed", "end": 9}
    run.request("p", **row, role=Role.PROBE, arm="abandon")


def just_enough(run: RunBuilder) -> None:
    """2 generated at t0, 10 ms a step: twice the settle time of 2 s is just left of 402 tokens."""
    run.requests[0].max_tokens = 402


def too_little(run: RunBuilder) -> None:
    run.requests[0].max_tokens = 401


def lose_blocks(run: RunBuilder) -> None:
    run.idle({"running": 0, "free_blocks": 9}, {"running": 0, "free_blocks": 2})


def start_late(run: RunBuilder) -> None:
    tokens = [float(t) for t in range(450, 1000)]
    run.request("late", sent=0, tokens=tokens, outcome="completed", end=1000)


SMALL_RUNS = (
    *(end_early, fail, stay, lag, lose_events, share, probe, just_enough, too_little),
    *(lose_blocks, start_late),
)


def test_a_run_says_how_far_to_believe_it(make_run: MakeRun, snapshot: Snapshot) -> None:
    said = ["empty", *map(str, summary_of(make_run().frames())["validity"])]
    for change in SMALL_RUNS:
        run = small_run(make_run())
        change(run)
        summary = summary_of(run.frames())
        said += ["", f"{change.__name__}: flags {list(summary['flags'])}"]
        said += [f"{one['level']}: {one['text']}" for one in summary["validity"]]
    snapshot("remarks", "\n".join(said) + "\n")


@pytest.mark.parametrize(
    ("after", "in_use"),
    [
        # Of 4 tokens each: 9 of "g" lie in 3 blocks, 7 of "cut" in 2; the other 5 blocks are lost.
        ({"running": 2, "free_blocks": 90}, {"slots": 2, "blocks": 5}),
        ({"running": 1, "free_blocks": 100}, {"slots": 1}),
    ],
)
def test_blocks_of_ghosts_are_missing_but_not_lost(
    run: RunBuilder, after: dict[str, float], in_use: dict[str, float]
) -> None:
    """Two ghosts, one of them cut off by the end of the run and then preempted, still run."""
    run.abandon("g", t0=33, tokens=[21, 31])
    run.request("cut", sent=0, tokens=[21], outcome="cut_off", end=900)
    for name in ("g", "cut", "somebody else's"):
        run.events(name, arrived=1, admitted=10.1, first_token=20)
    run.events("cut", preempted=30.1, resumed=50.1)
    run.step(10, 20, sampled=("g", "cut"), g=5, cut=5)
    run.step(20, 30, sampled=("g", "cut"), g=1, cut=1)
    run.steps(3, 4, "g")
    run.step(50, 60, sampled=("g", "cut"), g=1, cut=7)
    run.metrics(running="exact", free_blocks="exact")
    run.idle({"running": 0, "free_blocks": 100}, after)
    summary = summary_of(run.frames())
    assert summary["metrics"]["leaked_slots"]["mean"] == after["running"]
    assert summary["metrics"]["leaked_blocks"]["mean"] == 100 - after["free_blocks"]
    assert summary["breakdown"]["leaks_in_use"] == in_use
    text = " and ".join(f"{n:g} {name}" for name, n in in_use.items())
    assert any(f"{text} are held by requests" in one["text"] for one in summary["validity"])
