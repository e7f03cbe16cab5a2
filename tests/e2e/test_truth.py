"""The harness against a server whose behaviour is scripted: each figure is what happened."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from tests.truth.black_box import Line, alarms, hold_to_truth, look_at_users, user_lines
from tests.truth.comparison import complaints
from tests.truth.known import Observed, Work, observe, seconds
from tests.truth.scripted_engine import Script
from tests.truth.settings import draw, draw_clean

pytestmark = pytest.mark.e2e

STEP_S = 0.02
ABANDONS = 45

# Every kind of wrong at once; ghosts have so much left to say that they are there at the end.
WRONG = Script(
    step_s=STEP_S, slots=5, linger_steps=2, free_delay_s=0.05, ghost_every=20, leak_blocks=1
)
# A server that stops at once, but forgets one in six, which runs to its natural end.
FORGETFUL = Script(step_s=STEP_S, slots=3, ghost_every=6)

WORKLOAD = """
question = "Is what the harness says what the server did?"
[run]
seed = 5
users = 7
max_seconds = 30
timeout_s = 20
[load]
kind = "abandon"
abandon_after_tokens = [0, 1, 3, 8]
stay_share = 0.2
think = "step"
prompt_tokens = [10, 60]
answer_tokens = {answer_tokens}
stay_tokens = 20
stop_after_abandons = {abandons}
[settle]
seconds = {settle_s}
steps = 0
"""


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    workload = WORKLOAD.format(abandons=ABANDONS, answer_tokens=2000, settle_s=2.0)
    return observe(tmp_path_factory.mktemp("wrong"), WRONG, workload, engine="reference")


def complaints_of(seen: Observed) -> list[str]:
    run = seen.run
    return complaints(run.summary, run.manifest, run.rows("requests"), seen.truth)


def test_a_server_that_is_wrong_in_every_way_is_told_as_it_was(wrong: Observed) -> None:
    assert complaints_of(wrong) == []


@pytest.mark.slow
def test_a_forgetful_server_is_told_as_it_was(tmp_path: Path) -> None:
    """Ghosts end by themselves before the harness looks."""
    workload = WORKLOAD.format(abandons=ABANDONS, answer_tokens=40, settle_s=10)
    seen = observe(tmp_path, FORGETFUL, workload, engine="reference")
    assert complaints_of(seen) == []
    metrics, left = seen.run.metrics, seen.run.summary["outcomes"]["abandoned"]
    assert metrics["ghost_rate"]["mean"] * left == left // 6
    assert metrics["removed_at_first_boundary"]["mean"] == 1
    assert metrics["leaked_slots"]["mean"] == metrics["leaked_blocks"]["mean"] == 0


def test_the_run_is_not_vacuous(wrong: Observed) -> None:
    outcomes = wrong.run.summary["outcomes"]
    assert outcomes["abandoned"] >= ABANDONS
    assert outcomes["completed"] >= 5
    left = [row for row in wrong.run.rows("requests") if row["outcome"] == "abandoned"]
    assert {row["planned_abandon"] for row in left} == {0, 1, 3, 8}
    waited = [work for work in wrong.truth["requests"] if work["slot_from"] is not None]
    assert len(waited) >= 10
    assert any(work["admitted_ns"] is None for work in wrong.truth["requests"])


def test_the_script_shows_in_the_figures(wrong: Observed) -> None:
    """Both accounts agree, and they agree on what was ordered."""
    metrics = wrong.run.metrics
    ghosts = [work for work in wrong.truth["requests"] if work["is_ghost"]]
    aborted = [w for w in wrong.truth["requests"] if w["finish_reason"] == "abort"]
    leaked = sum(work["admitted_ns"] is not None for work in aborted)
    assert metrics["ghost_rate"]["mean"] == len(ghosts) / wrong.run.summary["outcomes"]["abandoned"]
    assert metrics["leaked_slots"]["mean"] == len(ghosts) == 2
    assert metrics["leaked_blocks"]["mean"] > leaked
    assert 2 * STEP_S <= metrics["wait_s"]["p50"] <= 3.5 * STEP_S
    assert 0.05 <= metrics["free_s"]["p50"] <= 0.05 + 1.5 * STEP_S
    assert metrics["removed_at_first_boundary"]["mean"] == 0


def move(work: Work, key: str, seconds: float) -> None:
    if work[key] is not None:
        work[key] += int(seconds * 1e9)


def deny_ghost(work: Work) -> None:
    if work["is_ghost"]:
        work.update(finish_reason="abort", removed_ns=work["closed_ns"], freed_ns=work["closed_ns"])


def send_late(work: Work) -> None:
    if work["sent_times_ns"]:
        work["sent_times_ns"][0] += 10**9


def send_early(work: Work) -> None:
    work["sent_times_ns"] = [t - 10**8 for t in work["sent_times_ns"]]


def stretch(work: Work) -> None:
    work["sent_times_ns"] = [t + i * 10**9 for i, t in enumerate(work["sent_times_ns"])]


# How each request has to be changed for the figure to look wrong.
LIES: dict[str, Callable[[Work], object]] = {
    "detect_s": lambda work: move(work, "closed_ns", 0.01),
    "cancel_latency_s": lambda work: move(work, "freed_ns", 0.001),
    "wait_s": lambda work: move(work, "removed_ns", -0.001),
    "wasted_tokens": lambda work: work["token_times_ns"] and work["token_times_ns"].pop(),
    "leaked_blocks": lambda work: work.update(leaked_blocks=0),
    "ghost_rate": deny_ghost,
    "ttft_s": send_late,
    "itl_s": stretch,
    "slot_refill_s": lambda work: work.update(slot_from=None),
    "arrival": lambda work: move(work, "arrived_ns", 0.1),
    "close": lambda work: move(work, "closed_ns", 0.1),
    "token": send_early,
    "window": lambda work: move(work, "arrived_ns", -1.0),
}


@pytest.mark.parametrize("name", LIES)
def test_a_false_account_would_be_noticed(wrong: Observed, name: str) -> None:
    truth = copy.deepcopy(wrong.truth)
    for work in truth["requests"]:
        LIES[name](work)
    found = complaints_of(replace(wrong, truth=truth))
    assert any(text.startswith((f"{name}.", f"{name}:")) for text in found)


# Which stamp the clients of one plan only would set too early, and what would look late then.
EARLY_STAMPS = [
    *(("sent_ns", planned_abandon, "arrival") for planned_abandon in (0, 1, 3, 8, None)),
    *(("abandoned_ns", planned_abandon, "close") for planned_abandon in (0, 1, 3, 8)),
]


@pytest.mark.parametrize(("stamp", "planned_abandon", "late"), EARLY_STAMPS)
def test_stamps_of_one_plan_that_are_too_early_would_be_noticed(
    wrong: Observed, stamp: str, planned_abandon: int | None, late: str
) -> None:
    run, rows = wrong.run, wrong.run.rows("requests")
    for row in rows:
        if row["planned_abandon"] == planned_abandon:
            move(row, stamp, -0.1)
    found = complaints(run.summary, run.manifest, rows, wrong.truth)
    assert any(text.startswith(f"{late}:") for text in found)


def test_a_figure_that_nobody_checks_would_be_noticed(wrong: Observed) -> None:
    run = wrong.run
    summary = run.summary
    summary["metrics"]["something_new_s"] = summary["metrics"]["detect_s"]
    del summary["metrics"]["ghost_rate"]
    found = complaints(summary, run.manifest, run.rows("requests"), wrong.truth)
    assert found == ["ghost_rate: is missing", "something_new_s: not checked"]


# Slot recovery by probe, a black box, against a server that knows when it gave the slot away...

SLOTS, TRIALS, LINGER_STEPS, FREE_DELAY_S = 3, 5, 2, 0.05
RECOVERY = f"""
question = "Is what a probe says what the server did?"
[run]
seed = 3
users = 1
max_seconds = 40
timeout_s = 20
[load]
kind = "slot_recovery"
trials = {TRIALS}
prompt_tokens = [10, 20]
answer_tokens = 1000
control_answer_tokens = 60
probe_tokens = 2
abandon_after_tokens = 5
"""
Probe = tuple[dict[str, Any], Work]


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    script = Script(
        step_s=STEP_S, slots=SLOTS, linger_steps=LINGER_STEPS, free_delay_s=FREE_DELAY_S
    )
    return observe(tmp_path_factory.mktemp("recovery"), script, RECOVERY, engine="reference")


def probes_of(trials: Observed, arm: str) -> list[Probe]:
    """The probes' rows and works."""
    rows = [r for r in trials.run.rows("requests") if (r["role"], r["arm"]) == ("probe", arm)]
    return [(row, trials.works[row["request_id"]]) for row in rows]


def assert_agrees(metric: dict[str, Any], read: list[float], known: list[float]) -> None:
    """Mean and median are those of the times read: each after the server sent it, and typically
    within a step."""
    assert metric["n"] == len(known) == TRIALS
    assert metric["n_censored"] == 0
    assert metric["mean"] == pytest.approx(fmean(read))
    assert metric["p50"] == pytest.approx(median(read))
    assert_soon([told - sent for told, sent in zip(read, known, strict=True)])


def assert_soon(lags_s: list[float]) -> None:
    """Never before it happened, and typically within a step."""
    assert min(lags_s) >= 0
    assert median(lags_s) <= STEP_S


def test_every_probe_was_queued_behind_full_slots(trials: Observed) -> None:
    """Else the trial would not have measured what it says."""
    for arm in ("abandon", "control"):
        for _, probe in probes_of(trials, arm):
            others = [work for work in trials.works.values() if work is not probe]
            running = [
                work
                for work in others
                if work["admitted_ns"] is not None
                and work["admitted_ns"] < probe["arrived_ns"] < work["freed_ns"]
            ]
            assert len(running) == SLOTS


def test_recovery_is_from_leaving_to_the_first_token_sent_to_the_probe(trials: Observed) -> None:
    rows = trials.run.rows("requests")
    leavers = {row["trial"]: row for row in rows if row["outcome"] == "abandoned"}
    closes, read, known = [], [], []
    for row, probe in probes_of(trials, "abandon"):
        abandoned = leavers[row["trial"]]
        t0, leaver = abandoned["abandoned_ns"], trials.works[abandoned["request_id"]]
        assert row["reference_ns"] == t0
        assert probe["slot_from"] == leaver["client_id"]
        closes.append(seconds(t0, leaver["closed_ns"]))
        read.append(seconds(t0, row["first_token_ns"]))
        known.append(seconds(t0, probe["sent_times_ns"][0]))
    assert_soon(closes)
    assert_agrees(trials.run.metrics["slot_recovery_s"], read, known)


def test_recovery_is_what_the_script_makes_it(trials: Observed) -> None:
    """Up to a step to the boundary, the lingering, the delay (up to a boundary), one step."""
    p50 = trials.run.metrics["slot_recovery_s"]["p50"]
    least = LINGER_STEPS * STEP_S + FREE_DELAY_S + STEP_S
    assert least <= p50 <= least + 3 * STEP_S


def test_the_unloaded_probe_is_answered_at_once(trials: Observed) -> None:
    probes = probes_of(trials, "unloaded")
    read = [seconds(row["sent_ns"], row["first_token_ns"]) for row, _ in probes]
    known = [seconds(work["arrived_ns"], work["sent_times_ns"][0]) for _, work in probes]
    assert_agrees(trials.run.metrics["probe_ttft_unloaded_s"], read, known)
    assert STEP_S <= trials.run.metrics["probe_ttft_unloaded_s"]["p50"] <= 2 * STEP_S


def test_in_the_control_the_probe_waits_for_a_natural_end(trials: Observed) -> None:
    read, known = [], []
    for row, probe in probes_of(trials, "control"):
        before = trials.works[probe["slot_from"]]
        assert before["finish_reason"] == "length"
        assert before["closed_ns"] is None
        read.append(seconds(row["reference_ns"], row["first_token_ns"]))
        known.append(seconds(row["reference_ns"], probe["sent_times_ns"][0]))
    assert_agrees(trials.run.metrics["probe_ttft_control_s"], read, known)


# A few of the settings of `make truth`...

GHOSTS, LEAKS, DELAYS = 6, 2, 8


def misses(lines: list[Line]) -> list[Line]:
    return [line for line in lines if not line.is_right]


@pytest.mark.slow
@pytest.mark.timeout(240)  # three runs at most, each of which may take a minute
@pytest.mark.parametrize("number", [GHOSTS, LEAKS, DELAYS])
def test_a_setting_is_told_as_it_is(number: int, tmp_path: Path) -> None:
    lines = hold_to_truth(draw(number), tmp_path)
    assert len(lines) >= 9
    assert misses(lines) == []


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("number", [1, 2])
def test_a_server_with_nothing_wrong_raises_no_alarm(number: int, tmp_path: Path) -> None:
    setting = draw_clean(number)
    seen = look_at_users(setting, tmp_path)
    assert alarms(seen.run.summary) == []
    assert misses(list(user_lines(seen))) == []
    assert_would_be_noticed(seen)


def assert_would_be_noticed(seen: Observed) -> None:
    """Had anything been wrong, it would have been an alarm, and a line that misses."""
    summary = seen.run.summary
    for name in ("ghost_rate", "leaked_slots", "leaked_blocks"):
        wrong: dict[str, Any] = copy.deepcopy(summary)
        wrong["metrics"][name]["mean"] = 1.0
        raised = alarms(wrong)
        assert raised[0] == f"{name} is 1.0"
        assert len(raised) == 2  # the report's sentence says so, too
    assert alarms({**summary, "wedged": True}) == ["wedged is True"]
    truth = copy.deepcopy(seen.truth)
    for work in truth["requests"]:
        work["token_times_ns"] = work["token_times_ns"] * 2
        work["freed_ns"] += int(1e9)
        work["removed_ns"] += int(1e9)
        work["leaked_blocks"] = 1
    lines = user_lines(replace(seen, truth=truth))
    found = {line.what for line in misses(list(lines))}
    assert found >= {
        "wasted tokens, in all",
        "leaked blocks",
        "cancel latency by gauge",
        "cancel latency by counter",
    }
