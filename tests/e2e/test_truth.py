"""The harness against a server whose behaviour is scripted: each figure is what happened."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.running import Run, measure, scripted_server
from tests.truth.comparison import complaints

pytestmark = pytest.mark.e2e

STEP_S = 0.02
Work = dict[str, Any]

USERS = 7
ABANDONS = 45

# Every kind of wrong at once; ghosts have so much left to say that they are there at the end.
WRONG = {"slots": 5, "linger_steps": 2, "free_delay_s": 0.05, "ghost_every": 20, "leak_blocks": 1}
# A server that stops at once, but forgets one in six, which runs to its natural end.
FORGETFUL = {"slots": 3, "ghost_every": 6}

WORKLOAD = """
question = "Is what the harness says what the server did?"
[run]
seed = 5
users = {users}
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A run's story and the server's, of the same events."""

    run: Run
    truth: dict[str, Any]

    def complaints(self) -> list[str]:
        run = self.run
        return complaints(run.summary, run.manifest, run.rows("requests"), self.truth)


def tell(
    folder: Path,
    script: Mapping[str, float],
    *,
    answer_tokens: int,
    settle_s: float,
    engine: str = "reference",
) -> Told:
    workload = folder / "truth.toml"
    workload.write_text(
        WORKLOAD.format(
            users=USERS, abandons=ABANDONS, answer_tokens=answer_tokens, settle_s=settle_s
        )
    )
    with scripted_server(step_s=STEP_S, **script) as server:
        run = measure(workload, folder / "run", "--target", server.url, "--engine", engine)
        return Told(run=run, truth=server.truth())


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return tell(tmp_path_factory.mktemp("wrong"), WRONG, answer_tokens=2000, settle_s=2.0)


@pytest.fixture(scope="module")
def forgetful(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return tell(tmp_path_factory.mktemp("forgetful"), FORGETFUL, answer_tokens=40, settle_s=10)


def test_the_run_is_not_vacuous(wrong: Told) -> None:
    outcomes = wrong.run.summary["outcomes"]
    assert outcomes["abandoned"] >= ABANDONS
    assert outcomes["completed"] >= 5
    left = [row for row in wrong.run.rows("requests") if row["outcome"] == "abandoned"]
    assert {row["planned_abandon"] for row in left} == {0, 1, 3, 8}
    waited = [work for work in wrong.truth["requests"] if work["slot_from"] is not None]
    assert len(waited) >= 10
    assert any(work["admitted_ns"] is None for work in wrong.truth["requests"])


def test_a_server_that_is_wrong_in_every_way_is_told_as_it_was(wrong: Told) -> None:
    assert wrong.complaints() == []


def test_a_forgetful_server_is_told_as_it_was(forgetful: Told) -> None:
    assert forgetful.complaints() == []


def test_the_script_shows_in_the_figures(wrong: Told, forgetful: Told) -> None:
    """Not only do both accounts agree: they agree on what was ordered."""
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

    metrics = forgetful.run.metrics
    left = forgetful.run.summary["outcomes"]["abandoned"]
    assert metrics["ghost_rate"]["mean"] * left == left // 6
    assert metrics["removed_at_first_boundary"]["mean"] == 1
    assert metrics["leaked_slots"]["mean"] == metrics["leaked_blocks"]["mean"] == 0


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


# What each request would have to say, for the figure to look wrong.
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
def test_a_false_account_would_be_noticed(wrong: Told, name: str) -> None:
    truth = copy.deepcopy(wrong.truth)
    for work in truth["requests"]:
        LIES[name](work)
    told = Told(run=wrong.run, truth=truth)
    assert any(text.startswith((f"{name}.", f"{name}:")) for text in told.complaints())


# Which stamp the clients of one plan only would set too early, and what would look late then.
EARLY_STAMPS = [
    *(("sent_ns", planned_abandon, "arrival") for planned_abandon in (0, 1, 3, 8, None)),
    *(("abandoned_ns", planned_abandon, "close") for planned_abandon in (0, 1, 3, 8)),
]


@pytest.mark.parametrize(("stamp", "planned_abandon", "late"), EARLY_STAMPS)
def test_stamps_of_one_plan_that_are_too_early_would_be_noticed(
    wrong: Told, stamp: str, planned_abandon: int | None, late: str
) -> None:
    run, rows = wrong.run, wrong.run.rows("requests")
    for row in rows:
        if row["planned_abandon"] == planned_abandon:
            move(row, stamp, -0.1)
    found = complaints(run.summary, run.manifest, rows, wrong.truth)
    assert any(text.startswith(f"{late}:") for text in found)


def test_a_figure_that_nobody_checks_would_be_noticed(wrong: Told) -> None:
    run = wrong.run
    summary = run.summary
    summary["metrics"]["something_new_s"] = summary["metrics"]["detect_s"]
    del summary["metrics"]["ghost_rate"]
    found = complaints(summary, run.manifest, run.rows("requests"), wrong.truth)
    assert found == ["ghost_rate: is missing", "something_new_s: nobody checks it"]


def test_a_black_box_is_told_by_its_counters(tmp_path: Path) -> None:
    """The same server as a kind that shows no more than its metrics page."""
    script = {"slots": 3, "linger_steps": 3}
    told = tell(tmp_path, script, answer_tokens=2000, settle_s=2.0, engine="vllm")
    rows = told.run.rows("requests")
    # Without those by which the harness asked in the end whether the server still serves.
    works = [work for work in told.truth["requests"] if work["client_id"]]
    generated = sum(len(work["token_times_ns"]) for work in works)
    read = sum(row["tokens_read"] for row in rows)
    wasted = told.run.metrics["wasted_tokens"]
    assert (wasted["method"], wasted["bound"]) == ("counter", "lower")
    assert wasted["n"] == sum(row["outcome"] != "completed" for row in rows) >= ABANDONS
    assert wasted["mean"] == pytest.approx((generated - read) / wasted["n"])
    assert generated - read >= 2 * ABANDONS
    assert told.run.metrics["leaked_slots"]["mean"] == 0
    latency, gone = told.run.metrics["cancel_latency_s"], [w for w in works if w["closed_ns"]]
    # Who was stopped while still connecting never came to the server.
    taken = [r for r in rows if r["outcome"] != "completed" and r["wire_close"] != "unopened"]
    assert (latency["method"], latency["n"]) == ("gauge", len(taken))
    held_s = sum(work["freed_ns"] - work["closed_ns"] for work in gone) / 1e9 / latency["n"]
    # One scrape a second meets few of those who linger: the mean may be known only from above.
    low, high = latency["mean_ci95"] or (0.0, latency["upper95"])
    assert low <= held_s <= high
    assert (told.run.metrics["ghost_rate"]["mean"], told.run.summary["wedged"]) == (0, False)
    hidden = {"cancel_latency_steps", "slot_refill_s", "step_s", "leaked_blocks"}
    assert hidden <= told.run.summary["not_measurable"].keys()
