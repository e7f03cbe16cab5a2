"""Users that cannot leave, and tokens that nobody sees: the run is invalid, and says why."""

from pathlib import Path
from typing import Any

import pytest

from harness.analysis.plan_failure import why_plan_failed
from harness.gate.judge import Verdict, judge
from harness.gate.limits import parse_limits
from harness.gate.run import read_run
from harness.records import Delivery
from harness.run.pipeline import write_summary
from harness.store.run_folder import RunFolder
from harness.workload.workload import as_plain_data, load_workload
from tests.harness.told import remarks
from tests.made_up.run import RunBuilder

SENT: dict[str, Any] = {"sent": 0, "outcome": "completed", "end": 99}
SHORT = {"tokens": [20, 40], "completion_tokens": 2, "finish_reason": "stop", "planned_abandon": 5}
CUT = SHORT | {"finish_reason": "length", "max_tokens": 200}
AT_ONCE = {"tokens": [20], "completion_tokens": 30, "finish_reason": "stop", "planned_abandon": 5}
UNSEEN = {"tokens": [], "completion_tokens": 30, "planned_abandon": 5}
LUMPS = {"tokens": [20, 40], "completion_tokens": 40, "planned_abandon": 5}
IN_TIME = {"tokens": [20, 40], "completion_tokens": 2, "planned_abandon": 0}
WHOLE = IN_TIME | {"tokens": [40], "delivery": Delivery.UNARY}


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (SHORT, "2 had no more tokens than the plan wanted read (at most 2; finish reasons `stop`"),
        (SHORT, "does the target know `ignore_eos`?"),
        (CUT, "finish reasons `length`: 2); the server itself ends answers at 2 tokens"),
        (AT_ONCE, "in 2 all text came at once, with the finish reason or just before it"),
        (UNSEEN, "in 2 no event had text"),
        (LUMPS, "2 ended before the moment to leave, or with several tokens at once"),
        (IN_TIME, "2 ended before the moment to leave"),
        (WHOLE, "2 ended before the moment to leave"),
    ],
)
def test_a_run_that_nobody_could_leave_is_invalid_for_the_true_reason(
    run: RunBuilder, row: dict[str, Any], why: str
) -> None:
    for name in ("a", "b"):
        run.request(name, **SENT | row)
    run.request("stays", **SENT | {"tokens": [20, 40]})
    (said, *_) = remarks(run, level="invalid")
    assert said.startswith(
        "none of the 2 requests that were to be abandoned could be: they ended as 2 completed; "
    )
    assert why in said
    assert ("ignore_eos" in said) == (row is SHORT)


def test_one_that_left_makes_the_others_a_warning(run: RunBuilder) -> None:
    run.abandon("left", t0=50, tokens=[20, 40], planned_abandon=2)
    run.request("a", **SENT | AT_ONCE)
    assert not remarks(run, level="invalid")
    (said,) = remarks(run, "answered before", "warning")
    assert said.startswith("1 of 2 requests that were to be abandoned were answered before, and")
    assert "in 1 all text came at once" in said


@pytest.mark.parametrize("outcome", ["cut_off", "completed"])
def test_who_was_cut_off_and_who_meant_to_stay_break_no_plan(run: RunBuilder, outcome: str) -> None:
    planned = None if outcome == "completed" else 5
    run.request("a", sent=0, tokens=[20], outcome=outcome, end=99, planned_abandon=planned)
    assert not remarks(run, level="invalid")
    assert remarks(run, "the run says nothing about cancellation", "warning")


def test_usage_without_any_text_is_named_once_for_all_streams(run: RunBuilder) -> None:
    unseen = SENT | UNSEEN | {"planned_abandon": None}
    run.request("a", **unseen)
    run.request("b", **unseen)
    (said,) = remarks(run, level="invalid")
    assert "no text was seen in any event, but the usage of 2 answers counts 60 tokens" in said
    run.request("c", **SENT | {"tokens": [20, 40], "completion_tokens": 2})
    assert not remarks(run, level="invalid")
    (said,) = remarks(run, "no event had text", "warning")
    assert said.startswith("in 2 of 3 completed streams no event had text, but their usage counts")


def test_the_gate_does_not_pass_it(run: RunBuilder, tmp_path: Path) -> None:
    run.manifest.workload = as_plain_data(load_workload("demo"))
    run.request("a", **SENT | SHORT)
    run.frames()
    summary = write_summary(RunFolder(tmp_path))
    (why,) = why_plan_failed(run.frames().requests)
    assert summary.plan_failed == why
    limits = parse_limits(["ttft_s.p50 < 1"], source="", arms=())
    judged = judge(read_run(tmp_path), limits, run="run", fewest_abandons=0)
    assert judged.verdict is Verdict.CANNOT_DECIDE
    assert judged.checks[0].reason == why
