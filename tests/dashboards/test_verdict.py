"""The verdict: good and not good are told apart, and what is not known is not judged."""

from typing import Any

import pytest

from dashboards.verdict import Mark, of_limits, without_limits
from harness.gate.judge import Check, Judgement
from harness.gate.judge import Verdict as GateVerdict
from harness.records import Metric

LEFT = {"abandoned": 100}


def metric(unit: str, **figures: Any) -> Metric:
    return Metric(unit=unit, n=100, method=figures.pop("method", "exact"), **figures)


GOOD = {
    "ghost_rate": metric("ratio", mean=0.0),
    "leaked_slots": metric("slots", mean=0.0),
    "cancel_latency_s": metric("s", p50=0.01, p99=0.02),
    "cancel_latency_steps": metric("steps", p50=1.0, p99=2.0),
    "wasted_after_close_tokens": metric("tokens", mean=1.0),
}


def test_a_server_that_stops_all_and_loses_nothing_is_good() -> None:
    verdict = without_limits(LEFT, GOOD)
    assert (verdict.mark, verdict.word) == (Mark.GOOD, "good")
    ((mark, text),) = verdict.lines
    assert mark == "good"
    assert text == (
        "all 100 abandoned requests were stopped; no slot is missing; let go after 1 step in the "
        "median, 2 at p99; 1 token generated after each leaving"
    )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"ghost_rate": metric("ratio", mean=0.03)}, "3 of 100 abandoned requests went on"),
        ({"leaked_slots": metric("slots", mean=1.0)}, "missing afterwards: 1 slot"),
        ({"cancel_latency_steps": metric("steps", p50=3.0, p99=4.0)}, "let go after 3 steps"),
        (
            {"cancel_latency_steps": metric("steps", p50=1.0, lower_bounds={"p99": 90.0})},
            "> 90 at p99",
        ),
        ({"wasted_after_close_tokens": metric("tokens", mean=40.0)}, "40 tokens generated"),
        ({"canary_mismatch_rate": metric("ratio", mean=0.5)}, "50 % of the others' answers"),
        (
            {
                "slot_recovery_s": metric("s", p50=0.9),
                "probe_ttft_unloaded_s": metric("s", p50=0.01),
                "probe_ttft_control_s": metric("s", p50=1.0),
            },
            "the slot worked for the next after 900 ms",
        ),
    ],
)
def test_one_thing_that_is_wrong_is_enough(changed: dict[str, Metric], said: str) -> None:
    verdict = without_limits(LEFT, GOOD | changed)
    assert verdict.mark is Mark.BAD
    mark, text = verdict.lines[0]
    assert mark == "not good"
    assert said in text
    assert verdict.lines[1][0] == "good"


def test_what_is_not_known_keeps_good_from_being_said_without_a_word() -> None:
    verdict = without_limits(LEFT, {"ghost_rate": GOOD["ghost_rate"]})
    assert (verdict.mark, verdict.word) == (Mark.GOOD, "good, as far as it shows")
    assert [mark for mark, _ in verdict.lines] == ["good", "not judged"]


def test_a_wedged_server_is_not_good() -> None:
    assert without_limits(LEFT, GOOD, is_wedged=True).mark is Mark.BAD


def test_what_a_server_hides_is_not_judged() -> None:
    seen = {
        "ghost_rate": metric("ratio", mean=0.0, bound="lower", method="gauge"),
        "cancel_latency_s": metric("s", mean=0.02, method="gauge"),
    }
    verdict = without_limits(LEFT, seen)
    assert (verdict.mark, verdict.word) == (Mark.UNKNOWN, "no verdict")
    ((mark, text),) = verdict.lines
    assert mark == "not judged"
    assert "who went on and ended is not seen" in text
    assert "how long a step is, is not known" in text


def test_a_run_that_broke_off_is_not_judged() -> None:
    verdict = without_limits(LEFT, GOOD, status="target_failed")
    assert (verdict.mark, verdict.word) == (Mark.UNKNOWN, "no verdict")
    assert verdict.lines == (("not judged", "the run did not come to its end: target failed"),)


def test_that_a_request_failed_is_not_good() -> None:
    verdict = without_limits({**LEFT, "completed": 11, "failed": 12}, GOOD)
    assert verdict.word == "not good"
    assert verdict.lines[0] == ("not good", "12 of 123 requests failed")


def test_who_was_not_watched_long_enough_was_not_seen_stopped() -> None:
    verdict = without_limits(LEFT, GOOD, unsure=2)
    assert verdict.word == "good, as far as it shows"
    said = "100 of 102 abandoned requests were stopped, of 2 it is not known"
    assert ("not judged", said) in verdict.lines


@pytest.mark.parametrize(
    ("outcomes", "invalid", "why"),
    [
        ({"completed": 9}, [], "nobody left early"),
        (LEFT, ["the load could not keep up"], "the figures of this run mean nothing"),
    ],
)
def test_a_run_that_shows_nothing_is_not_called_good(
    outcomes: dict[str, int], invalid: list[str], why: str
) -> None:
    verdict = without_limits(outcomes, GOOD, invalid=invalid)
    assert verdict.mark is Mark.UNKNOWN
    assert why in verdict.lines[0][1]


def check(verdict: GateVerdict, name: str) -> Check:
    return Check(name=name, verdict=verdict, measured="0.2", reason="because")


def test_with_limits_the_word_is_the_gates() -> None:
    judgement = Judgement(
        run="r",
        workload="w",
        verdict=GateVerdict.FAIL,
        checks=[
            check(GateVerdict.PASS, "a < 1"),
            check(GateVerdict.CANNOT_DECIDE, "b < 1"),
            check(GateVerdict.FAIL, "c < 1"),
        ],
    )
    verdict = of_limits(judgement)
    assert (verdict.mark, verdict.word) == (Mark.BAD, "fail")
    assert verdict.lines == (
        ("fail", "c < 1: 0.2, because"),
        ("cannot decide", "b < 1: 0.2, because"),
        ("pass", "1 of 3 checks"),
    )
