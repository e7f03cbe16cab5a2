"""The summary as a whole, and how far it says that a run is to be believed."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest

from harness.metrics import METRICS
from harness.records import Delivery, Metric, Role, TokenCounting
from harness.store.manifest import ClockCheck
from tests.conftest import Snapshot
from tests.harness.analysis.scenes import four_steps, leave_in_decode
from tests.harness.told import MakeRun, remarks, summary_of
from tests.made_up.run import RunBuilder


def small_run(run: RunBuilder) -> RunBuilder:
    leave_in_decode(run)
    run.request("s", sent=0, tokens=[21, 31, 41], outcome="completed", end=42)
    run.events("s", reason="length", arrived=1, admitted=10.2, first_token=20)
    run.events("s", reason="length", removed=40.01, blocks_freed=40.02, finished=40.03, generated=3)
    four_steps(run, "a", "s")
    run.lag(0, 0.1)
    run.metrics(running="exact", free_blocks="exact")
    run.idle({"running": 0, "free_blocks": 9}, {"running": 0, "free_blocks": 9})
    return run


def test_a_whole_summary(run: RunBuilder) -> None:
    summary = summary_of(small_run(run).frames())
    assert json.dumps(summary, allow_nan=False)
    metrics = summary["metrics"]
    assert list(metrics) == [name for name in METRICS if name in metrics]
    assert set(summary["not_measurable"]) <= set(METRICS)
    units = {name: one["unit"] for name, one in metrics.items()}
    assert units == {name: METRICS[name].unit for name in metrics}
    assert msgspec.convert(metrics, dict[str, Metric])["wasted_tokens"].mean == 1


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
    run.manifest.clock = ClockCheck(comparable=False)


def probe(run: RunBuilder) -> None:
    run.manifest.workload["load"] = {"kind": "slot_recovery"}
    row: dict[str, Any] = {"sent": 0, "tokens": [10], "outcome": "completed", "end": 9}
    run.request("p", **row, role=Role.PROBE, arm="abandon")


def just_enough(run: RunBuilder) -> None:
    """2 generated at t0, 10 ms a step: twice the settle time of 2 s is just left of 402 tokens."""
    run.requests[0].max_tokens = 402


def too_little(run: RunBuilder, context: int | None = None) -> None:
    run.requests[0].max_tokens = 401
    run.configure(max_model_len=context)


def lose_blocks(run: RunBuilder) -> None:
    run.idle({"running": 0, "free_blocks": 9}, {"running": 0, "free_blocks": 2})


def start_late(run: RunBuilder) -> None:
    tokens = [float(t) for t in range(450, 1000)]
    run.request("late", sent=0, tokens=tokens, outcome="completed", end=1000)


def answer_strangely(run: RunBuilder) -> None:
    plain: dict[str, Any] = {"sent": 0, "tokens": [1], "outcome": "completed", "end": 4}
    empty = plain | {"tokens": []}
    run.request("long", **plain | {"tokens": [1, 2, 3], "max_tokens": 2})
    run.request("empty", **empty)
    for i in range(3):
        run.request(f"failed {i}", **empty | {"outcome": "failed", "error": f"HTTP 500: block {i}"})
    run.request("full", **empty | {"outcome": "rejected", "error": "HTTP 429: full"})
    run.request("again", **plain, resent=True)
    run.request("over before", **plain | {"tokens": [1, 2], "planned_abandon": 5})


def count_events(run: RunBuilder, *, all_of_them: bool) -> None:
    for row in run.requests[: None if all_of_them else 1]:
        row.token_counting = TokenCounting.EVENTS


def read_in_one_piece(run: RunBuilder) -> None:
    """Nothing was read: how it was counted does not matter."""
    stay(run)
    run.requests.clear()
    piece = {"delivery": Delivery.UNARY, "token_counting": TokenCounting.EVENTS}
    run.abandon("whole", t0=50, tokens=[], **piece)


def race(run: RunBuilder, *, has_log: bool) -> None:
    plan: dict[str, Any] = {"plan": "last_token", "max_tokens": 4}
    leave_in_decode(run, "won", **plan)
    leave_in_decode(run, "lost", t0=35, reason="length", **plan)
    leave_in_decode(run, "late", t0=41, reason="length", **plan)
    read: dict[str, Any] = {"planned_abandon": 2, "completion_tokens": 3, **plan}
    run.request("read", sent=0, tokens=[21, 31, 41], outcome="completed", end=42, **read)
    if not has_log:
        run.another_engine()


def queue(run: RunBuilder, waiting: list[float]) -> None:
    run.another_engine()
    run.lifecycle.clear()
    run.metrics(waiting="exact")
    run.abandon("queued", t0=500, tokens=[], plan="queued")
    for number, value in enumerate(waiting):
        run.scrape(100.0 * number, "its_waiting", value)
    run.idle({"waiting": 0.0}, {"waiting": 0.0})


SMALL_RUNS: dict[str, Callable[[RunBuilder], None]] = {
    "end early": end_early,
    "fail": fail,
    "stay": stay,
    "lag": lag,
    "lose events": lose_events,
    "share": share,
    "probe": probe,
    "just enough": just_enough,
    "too little": too_little,
    "too little, long context": partial(too_little, context=4096),
    "too little, short context": partial(too_little, context=399),
    "lose blocks": lose_blocks,
    "start late": start_late,
    "answer strangely": answer_strangely,
    "count events": partial(count_events, all_of_them=True),
    "count some events": partial(count_events, all_of_them=False),
    "read in one piece": read_in_one_piece,
    "race": partial(race, has_log=True),
    "race without a log": partial(race, has_log=False),
    "queue": partial(queue, waiting=[0.0, 2.0, 0.0]),
    "queue without anybody": partial(queue, waiting=[0.0, 0.0, 0.0]),
    "queue that was not scraped": partial(queue, waiting=[]),
}


def test_a_run_says_how_far_to_believe_it(make_run: MakeRun, snapshot: Snapshot) -> None:
    said = ["empty", *map(str, summary_of(make_run().frames())["validity"])]
    for name, change in SMALL_RUNS.items():
        run = small_run(make_run())
        change(run)
        summary = summary_of(run.frames())
        said += ["", f"{name}: flags {list(summary['flags'])}"]
        said += [f"{one['level']}: {one['text']}" for one in summary["validity"]]
    snapshot("remarks", "\n".join(said) + "\n")


@pytest.mark.parametrize(
    ("after", "in_use"),
    [
        # A block has 4 tokens: 9 of "g" lie in 3, 7 of "cut" in 2; the other 5 blocks are lost.
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
    assert remarks(run, f"{text} are held by requests")
