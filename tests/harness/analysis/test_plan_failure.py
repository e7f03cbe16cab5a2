"""Users that cannot leave, and tokens that nobody sees: the run is invalid, and says why."""

from pathlib import Path
from typing import Any

import pytest

from harness.analysis.plan_failure import plan_failure, without_advice
from harness.gate.judge import GateVerdict, judge
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
EMPTY = {"tokens": [], "finish_reason": "length", "planned_abandon": 5, "max_tokens": 200}
IN_TIME = {"tokens": [20, 40], "completion_tokens": 2, "planned_abandon": 0}
WHOLE = IN_TIME | {"tokens": [40], "delivery": Delivery.UNARY}


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (SHORT, "2 had no more tokens than the plan wanted read (at most 2; finish reasons `stop`"),
        (SHORT, "does the target know `ignore_eos`?"),
        (CUT, "finish reasons `length`: 2); the server itself ends answers at 2 tokens"),
        (EMPTY, "2 had no token at all (finish reasons `length`: 2)"),
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
    assert "at 0 tokens" not in said
    advice = without_advice(said)[1]
    assert advice == (
        "let users leave after seconds in place of tokens, half of a typical answer: "
        "`--request-cancellation-rate 67 --request-cancellation-delay 0.05`"
    )


BUSY = {"outcome": "rejected", "tokens": [], "error": "HTTP 429: slow down", "planned_abandon": 5}
BROKEN = BUSY | {"outcome": "failed", "error": "HTTP 500: port 1234 broke"}


@pytest.mark.parametrize(
    ("rows", "why", "advice"),
    [
        (
            [BUSY] * 3,
            "all 3 requests were refused, and none was answered; 3 of them: HTTP 429: slow down",
            "send fewer requests at once: `--set run.users=1`",
        ),
        (
            [BROKEN, BROKEN, BUSY],
            "all 3 requests failed, and none was answered; 2 of them: HTTP 500: port 1234 broke",
            "send fewer requests at once: `--set run.users=1`",
        ),
        (
            [BROKEN | {"error": "no server listens: is it running?"}],
            "all 1 requests failed, and none was answered; 1 of them: no server listens: is it "
            "running?",
            "mend what the server's words name, then run again",
        ),
        (
            [BROKEN, BUSY | {"outcome": "cut_off", "error": None}],
            "1 of 2 requests failed, and none was answered; 1 of them: HTTP 500: port 1234 broke",
            "mend what the server's words name, then run again",
        ),
    ],
)
def test_a_run_without_an_answer_says_who_refused_and_in_what_words(
    run: RunBuilder, rows: list[dict[str, Any]], why: str, advice: str
) -> None:
    for user, row in enumerate(rows):
        run.request(f"{user}", **SENT | {"user": user} | row)
    (said, *others) = remarks(run, level="invalid")
    assert not others
    assert without_advice(said) == (why, advice)
    assert plan_failure(run.frames().requests) == said
    assert "?. " not in said
    invalid = rows[0]["error"]
    others = remarks(run, "ended with", "warning")
    assert not [text for text in others if invalid in text], "it is said above"
    assert len(others) == len({row["error"] for row in rows[1:]} - {None, invalid})


LEFT_AT_ONCE: dict[str, Any] = SENT | {"outcome": "abandoned", "tokens": [], "planned_abandon": 0}


@pytest.mark.parametrize("planned", [5, None, 0])
def test_who_left_before_the_first_token_saw_no_answer(
    run: RunBuilder, planned: int | None
) -> None:
    run.request("left", **LEFT_AT_ONCE)
    run.request("a", **SENT | BROKEN | {"planned_abandon": planned})
    said = plan_failure(run.frames().requests)
    if planned == 0:
        assert said is None, "nobody was to see an answer, and one of two left as planned"
        return
    why = "1 of 2 requests failed, and none was answered; 1 of them: HTTP 500: port 1234 broke"
    assert without_advice(said or "") == (why, "mend what the server's words name, then run again")


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
    why, advice = without_advice(summary.plan_failed or "")
    assert plan_failure(run.frames().requests) == summary.plan_failed
    limits = parse_limits(["ttft_s.p50 < 1"], source="", arms=())
    judged = judge(read_run(tmp_path), limits, run="run", fewest_abandons=0)
    assert judged.verdict is GateVerdict.CANNOT_DECIDE
    assert (judged.checks[0].reason, judged.checks[0].to_decide) == (why, advice)
    assert "--request-cancellation-delay" in advice
