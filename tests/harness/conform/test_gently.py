"""The gentle watch as a conformance run: what its figures make of the one case."""

from collections.abc import Iterator

import pytest

from harness.conform.config import ConformConfig, chosen_cases
from harness.conform.gentle_case import GENTLE_ID, GENTLE_S, gentle_case
from harness.conform.gently import aftermath_of, follow, judged
from harness.errors import ConfigError, TargetError
from harness.experiments.gentle_plan import Gentle
from harness.experiments.outcome import CannotDecideError
from harness.experiments.visitors import BusyError
from harness.intervals import Interval
from harness.store.conform_result import Aftermath, CaseResult, Failure, Verdict

CASE = gentle_case(60.0)
KNOWN = Gentle(
    way="gauge",
    stops=True,
    why="",
    seconds=60.0,
    moments=20,
    leaves=40,
    latency_s=0.226,
    latency_ci95=Interval(0.221, 0.231),
    floor_s=0.03,
    ghost_rate=0.01,
    ghost_ci95=Interval(-0.05, 0.07),
    most_streams=2,
)


def test_a_server_that_stops_passes_with_its_figures() -> None:
    result = judged(CASE, KNOWN, "cancel")
    assert (result.verdict, result.stops, result.way) == (Verdict.PASS, True, "gauge")
    assert result.left == result.left_in_all == 40
    assert result.reason == KNOWN.sentence
    assert result.evidence["latency_ms"] == 226
    assert result.evidence["ghost_rate_high95"] == 0.07


def test_one_that_does_not_stop_fails_unless_it_declares_that() -> None:
    never = KNOWN._replace(stops=False, ghost_rate=1.0, ghost_ci95=Interval(0.8, 1.2))
    result = judged(CASE, never, "cancel")
    assert (result.verdict, result.kind, result.stops) == (Verdict.FAIL, Failure.NEVER, False)
    declared = judged(CASE, never, "drain")
    assert declared.verdict is Verdict.PASS
    assert declared.stops is False
    assert declared.reason.startswith("as it declares (`drain`)")


def test_what_is_held_after_the_end_of_an_answer_is_no_drain() -> None:
    loses = KNOWN._replace(stops=False, why="the memory never comes back", loses=True)
    result = judged(CASE, loses, "drain")
    assert (result.verdict, result.kind, result.stops) == (Verdict.FAIL, Failure.NEVER, False)
    assert result.reason.startswith("it declares `drain`, but it does not stop: the memory never")


def test_one_that_stops_but_surely_forgets_one_stream_in_thirty_fails() -> None:
    shown = KNOWN._replace(ghost_rate=0.08, ghost_ci95=Interval(0.046, 0.125))
    forgets = shown._replace(ghosts_at_least=0.03)
    result = judged(CASE, forgets, "cancel")
    assert (result.verdict, result.kind, result.stops) == (Verdict.FAIL, Failure.NEVER, True)
    assert result.reason.startswith("it forgets more than 0.3 % of the streams that leave;")
    assert judged(CASE, forgets, "drain").verdict is Verdict.PASS
    for unsure in (-0.02, 0.003, None):
        one = shown._replace(ghosts_at_least=unsure)
        assert judged(CASE, one, "cancel").verdict is Verdict.PASS


def test_what_is_not_known_yet_is_undecided() -> None:
    result = judged(CASE, KNOWN._replace(stops=None, why="too few leaves yet"), "cancel")
    assert (result.verdict, result.stops) == (Verdict.CANNOT_DECIDE, None)
    assert "too few leaves yet" in result.reason


def test_each_look_is_decided_once_and_what_ends_a_watch_early_loses_nothing() -> None:
    def looks() -> Iterator[Gentle]:
        for moments in (7, 8, 8, 9):
            yield KNOWN._replace(moments=moments, stops=True if moments > 7 else None, why="few")
        raise CannotDecideError("no stream of ours could run")

    shown: dict[str, list[CaseResult]] = {"decided": [], "so far": []}
    follow(
        CASE, "cancel", looks(), lambda: Aftermath.CLEAN, *(one.append for one in shown.values())
    )
    assert [one.evidence["moments"] for one in shown["so far"]] == [7, 8, 9]
    first, last = shown["decided"]
    assert (first.evidence["moments"], first.aftermath) == (8, None)
    assert (last.verdict, last.evidence["moments"]) == (Verdict.PASS, 9)
    assert last.aftermath is Aftermath.CLEAN
    assert last.reason.endswith("; it ended early: no stream of ours could run")


def test_a_server_that_is_dead_afterwards_does_not_pass() -> None:
    shown: list[CaseResult] = []
    last = KNOWN._replace(is_final=True)
    follow(CASE, "cancel", iter([last]), lambda: Aftermath.DEAD, shown.append, shown.append)
    assert [one.verdict for one in shown] == [Verdict.CANNOT_DECIDE]
    assert "; afterwards it answered no short request" in shown[0].reason


def test_a_watch_that_saw_nothing_says_why() -> None:
    def looks() -> Iterator[Gentle]:
        yield from ()
        raise CannotDecideError("the server shows no step")

    shown: list[CaseResult] = []
    follow(CASE, "cancel", looks(), lambda: Aftermath.DEAD, shown.append, shown.append)
    (one,) = shown
    assert (one.verdict, one.reason) == (Verdict.CANNOT_DECIDE, "the server shows no step")
    assert one.aftermath is Aftermath.DEAD


@pytest.mark.parametrize(
    ("error", "aftermath"),
    [
        (None, Aftermath.CLEAN),
        (CannotDecideError("its tokens come in one piece"), Aftermath.CLEAN),
        (BusyError("HTTP 429"), Aftermath.REFUSING),
        (TargetError("no answer"), Aftermath.DEAD),
    ],
)
def test_only_a_server_that_does_not_answer_is_dead(
    error: Exception | None, aftermath: Aftermath
) -> None:
    def ask() -> None:
        if error is not None:
            raise error

    assert aftermath_of(ask) is aftermath


def test_it_is_a_run_of_its_own() -> None:
    assert [case.id for case in chosen_cases(ConformConfig(gentle=True))] == [GENTLE_ID]
    assert ConformConfig(gentle=True).gentle_s == GENTLE_S
    assert ConformConfig(gentle=True, max_seconds=9.0).gentle_s == 9.0
    flags = ConformConfig(gentle=True).flags(model="m", slots=None)
    assert flags[-1] == "--gentle"
    assert "--max-seconds" in flags
    again = ConformConfig(gentle=True, wanted=[GENTLE_ID])
    assert [case.id for case in chosen_cases(again)] == [GENTLE_ID]
    with pytest.raises(ConfigError, match="leave out queue/"):
        chosen_cases(ConformConfig(gentle=True, wanted=["queue/"]))
    with pytest.raises(ConfigError, match="leave out --quick"):
        chosen_cases(ConformConfig(gentle=True, quick=True))
