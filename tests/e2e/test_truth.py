"""The harness against a server whose behaviour is scripted: each figure is what happened."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tools.truth.black_box import (
    Line,
    alarms,
    hold_to_truth,
    look_at_users,
    user_lines,
)
from tools.truth.expected import complaints
from tools.truth.known import Observed, Work, observe
from tools.truth.scripted_engine import Script
from tools.truth.settings import ABANDONS_WITH_GHOSTS, Setting, draw, draw_clean

pytestmark = pytest.mark.e2e

STEP_S = 0.02

# Every fault at once; ghosts have enough left to say to be still there at the end.
WRONG = Script(
    step_s=STEP_S, slots=5, linger_steps=2, free_delay_s=0.05, ghost_every=20, leak_blocks=1
)
# A server that stops at once, but forgets one in six, which runs to its natural end.
FORGETFUL = Script(step_s=STEP_S, slots=3, ghost_every=6)

SETTLE = """
[settle]
seconds = {}
steps = 0
"""


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    workload = Setting(number=5, script=WRONG).abandon_workload() + SETTLE.format(2)
    return observe(tmp_path_factory.mktemp("wrong"), WRONG, workload, engine="reference")


def complaints_of(seen: Observed) -> list[str]:
    run = seen.run
    return complaints(run.summary, run.manifest, run.rows("requests"), seen.truth)


def test_a_server_that_is_wrong_in_every_way_is_told_as_it_was(wrong: Observed) -> None:
    assert complaints_of(wrong) == []


@pytest.mark.slow
def test_a_forgetful_server_is_told_as_it_was(tmp_path: Path) -> None:
    """Ghosts end by themselves before the harness looks."""
    setting = Setting(number=5, script=FORGETFUL)
    workload = setting.abandon_workload(answer_tokens=40) + SETTLE.format(10)
    seen = observe(tmp_path, FORGETFUL, workload, engine="reference")
    assert complaints_of(seen) == []
    metrics, left = seen.run.metrics, seen.run.summary["outcomes"]["abandoned"]
    assert metrics["ghost_rate"]["mean"] * left == left // 6
    assert metrics["removed_at_first_boundary"]["mean"] == 1
    assert metrics["leaked_slots"]["mean"] == metrics["leaked_blocks"]["mean"] == 0


def test_the_script_shows_in_the_figures(wrong: Observed) -> None:
    metrics, outcomes, works = wrong.run.metrics, wrong.run.summary["outcomes"], wrong.works
    assert outcomes["abandoned"] >= ABANDONS_WITH_GHOSTS
    assert outcomes["completed"] >= 5
    left = [row for row in wrong.run.rows("requests") if row["outcome"] == "abandoned"]
    assert {row["planned_abandon"] for row in left} == {0, 1, 3, 8}
    assert sum(work["slot_from"] is not None for work in works.values()) >= 10
    assert any(work["admitted_ns"] is None for work in works.values())
    ghosts = sum(work["is_ghost"] for work in works.values())
    aborted = [work for work in works.values() if work["finish_reason"] == "abort"]
    assert metrics["ghost_rate"]["mean"] == ghosts / outcomes["abandoned"]
    assert metrics["leaked_slots"]["mean"] == ghosts == 2
    assert metrics["leaked_blocks"]["mean"] > sum(w["admitted_ns"] is not None for w in aborted)
    assert metrics["wait_s"]["p50"] >= 2 * STEP_S
    assert metrics["free_s"]["p50"] >= 0.05
    assert metrics["removed_at_first_boundary"]["mean"] == 0


def move(work: Work, key: str, seconds: float) -> None:
    if work[key] is not None:
        work[key] += int(seconds * 1e9)


def deny_ghost(work: Work) -> None:
    if work["is_ghost"]:
        work.update(finish_reason="abort", removed_ns=work["closed_ns"], freed_ns=work["closed_ns"])


def resend(work: Work, *, later_ns: Callable[[int], int]) -> None:
    work["sent_times_ns"] = [t + later_ns(i) for i, t in enumerate(work["sent_times_ns"])]


# How each request has to be changed for the figure to look wrong.
LIES: dict[str, Callable[[Work], object]] = {
    "detect_s": lambda work: move(work, "closed_ns", 0.01),
    "cancel_latency_s": lambda work: move(work, "freed_ns", 0.001),
    "wait_s": lambda work: move(work, "removed_ns", -0.001),
    "wasted_tokens": lambda work: work["token_times_ns"] and work["token_times_ns"].pop(),
    "leaked_blocks": lambda work: work.update(leaked_blocks=0),
    "ghost_rate": deny_ghost,
    "ttft_s": lambda work: resend(work, later_ns=lambda i: 0 if i else 10**9),
    "itl_s": lambda work: resend(work, later_ns=lambda i: i * 10**9),
    "slot_refill_s": lambda work: work.update(slot_from=None),
    "arrival": lambda work: move(work, "arrived_ns", 0.1),
    "close": lambda work: move(work, "closed_ns", 0.1),
    "token": lambda work: resend(work, later_ns=lambda i: -(10**8)),
    "window": lambda work: move(work, "arrived_ns", -1.0),
}


@pytest.mark.parametrize("name", LIES)
def test_a_false_account_would_be_noticed(wrong: Observed, name: str) -> None:
    truth = copy.deepcopy(wrong.truth)
    for work in truth["requests"]:
        LIES[name](work)
    found = complaints_of(replace(wrong, truth=truth))
    assert any(text.startswith((f"{name}.", f"{name}:")) for text in found)


def test_a_figure_that_nobody_checks_would_be_noticed(wrong: Observed) -> None:
    run = wrong.run
    summary = run.summary
    summary["metrics"]["something_new_s"] = summary["metrics"]["detect_s"]
    del summary["metrics"]["ghost_rate"]
    found = complaints(summary, run.manifest, run.rows("requests"), wrong.truth)
    assert found == ["ghost_rate: is missing", "something_new_s: not checked"]


# A few of the settings of `make truth`. Tests on the same cores would keep the harness from reading
# the metrics page every 20 ms.

GHOSTS, LEAKS, DELAYS = 6, 2, 8


def misses(lines: Iterable[Line]) -> list[Line]:
    return [line for line in lines if not line.is_right]


@pytest.mark.alone
@pytest.mark.timeout(240)  # three runs at most, each of which may take a minute
@pytest.mark.parametrize("number", [GHOSTS, LEAKS, DELAYS])
def test_a_setting_is_told_as_it_is(number: int, tmp_path: Path) -> None:
    lines = hold_to_truth(draw(number), tmp_path)
    assert len(lines) >= 5
    assert misses(lines) == []


@pytest.mark.alone
@pytest.mark.timeout(240)
def test_a_server_with_nothing_wrong_raises_no_alarm_and_anything_wrong_would(
    tmp_path: Path,
) -> None:
    seen = look_at_users(draw_clean(1), tmp_path)
    summary, truth = seen.run.summary, copy.deepcopy(seen.truth)
    assert alarms(summary) == []
    assert misses(user_lines(seen)) == []
    for name in ("ghost_rate", "leaked_slots", "leaked_blocks"):
        wrong: dict[str, Any] = copy.deepcopy(summary)
        wrong["metrics"][name]["mean"] = 1.0
        raised = alarms(wrong)
        assert raised[0] == f"{name} is 1.0"
        assert len(raised) == 2  # the report's sentence says so, too
    assert alarms({**summary, "wedged": True}) == ["wedged is True"]
    for work in truth["requests"]:
        work["token_times_ns"] = work["token_times_ns"] * 2
        work["freed_ns"] += int(1e9)
        work["removed_ns"] += int(1e9)
        work["leaked_blocks"] = 1
    found = {line.what for line in misses(user_lines(replace(seen, truth=truth)))}
    assert found >= {"wasted tokens, in all", "leaked blocks", "cancel latency by gauge"}
