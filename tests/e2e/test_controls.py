"""Positive controls: an engine that is wrong on purpose, by an amount that is known.

Each fault must move the figure that it is about, by what was set, and leave the others where the
clean run has them. A few faults are tried in `make test`, all of them in `make test-all`.
"""

from collections.abc import Callable
from statistics import median
from typing import Any

import pytest
from scipy import stats

from reference_engine.faults import fault_names
from tests.e2e.running import Log, Run
from tests.truth.fault_cases import (
    ABANDONS,
    CASES,
    DELAY_S,
    LEAKED,
    LOST_SHARE,
    STEP_S,
    TABLE,
    Case,
    FaultRuns,
    is_within,
)

pytestmark = pytest.mark.e2e

Runs = Callable[[str], Run]
SOON = ("delay-abort", "leak-blocks")


@pytest.fixture(scope="module")
def fault_runs(tmp_path_factory: pytest.TempPathFactory) -> FaultRuns:
    return FaultRuns(tmp_path_factory.mktemp("controls"))


@pytest.fixture(scope="module")
def runs(fault_runs: FaultRuns) -> Runs:
    """A run of the engine with a fault (none: ""), made when it is first asked for."""
    return fault_runs.good


@pytest.fixture
def clean(runs: Runs) -> Run:
    return runs("")


def assert_not_vacuous(run: Run) -> None:
    assert run.summary["outcomes"]["abandoned"] >= ABANDONS
    assert run.metrics["ghost_rate"]["n"] == run.summary["outcomes"]["abandoned"]


def assert_nothing_leaked(run: Run) -> None:
    assert run.metrics["leaked_slots"]["mean"] == 0
    assert run.metrics["leaked_blocks"]["mean"] == 0


def assert_no_ghosts(run: Run) -> None:
    assert run.metrics["ghost_rate"]["mean"] == 0
    assert run.metrics["cancel_latency_s"]["n_censored"] == 0


def assert_stages_as_in(clean: Run, run: Run, *stages: str) -> None:
    for stage in stages:
        assert run.metrics[stage]["p50"] == pytest.approx(clean.metrics[stage]["p50"], abs=STEP_S)


def assert_latency_as_in(clean: Run, run: Run) -> None:
    before, now = clean.metrics, run.metrics
    assert_stages_as_in(clean, run, "detect_s", "signal_s", "wait_s", "free_s", "cancel_latency_s")
    steps = "cancel_latency_steps"
    assert now[steps]["p50"] == pytest.approx(before[steps]["p50"], abs=1)


def assert_waste_as_in(clean: Run, run: Run) -> None:
    wasted = "wasted_after_close_tokens"
    assert run.metrics[wasted]["p50"] == pytest.approx(clean.metrics[wasted]["p50"], abs=1)


def test_without_a_fault_nothing_is_wrong(clean: Run) -> None:
    assert_not_vacuous(clean)
    assert_no_ghosts(clean)
    assert_nothing_leaked(clean)
    assert clean.metrics["cancel_latency_s"]["p50"] < 3 * STEP_S
    assert clean.metrics["wasted_after_close_tokens"]["p50"] < 2


def test_the_gauge_of_running_requests_keeps_up_with_the_step_log(clean: Run) -> None:
    steps = sorted(clean.rows("steps"), key=lambda row: row["started_ns"])
    pages = [r for r in clean.rows("server_metrics") if r["name"] == "vllm:num_requests_running"]
    told = [(page["value"], running_at(steps, page["t_ns"])) for page in pages]
    under_load = [abs(shown - true) for shown, true in told if true is not None]
    assert median(under_load) <= 2


def running_at(steps: list[dict[str, Any]], t_ns: int) -> int | None:
    """As the step log says; None where no step was running then, nor two before it."""
    here = [number for number, row in enumerate(steps) if row["started_ns"] <= t_ns]
    if len(here) < 3 or t_ns > steps[here[-1]]["ended_ns"]:
        return None
    running: int = steps[here[-1]]["num_running"]
    return running


@pytest.mark.slow
def test_ignore_disconnect_makes_everybody_a_ghost(fault_runs: FaultRuns) -> None:
    run = fault_runs.with_short_answers("ignore-disconnect")
    assert_not_vacuous(run)
    assert run.metrics["ghost_rate"]["mean"] == 1.0
    latency = run.metrics["cancel_latency_s"]
    assert latency["n_censored"] == latency["n"]
    log, settled_ns = Log(run), run.manifest["window"]["settled_ns"]
    watched_s = max(settled_ns - t0 for t0 in log.left_ns.values()) / 1e9
    longest_s = min(watched_s, run.manifest["settle_s"])
    assert latency["lower_bounds"]["p50"] == pytest.approx(longest_s)
    # No worker heard of it, so all ran to their natural end: the unread tokens are the waste.
    assert not log.left_with("abort_received")
    left = [row for row in run.rows("requests") if row["outcome"] == "abandoned"]
    unread = sum(row["max_tokens"] - row["tokens_read"] for row in left)
    assert run.metrics["wasted_tokens"]["mean"] == pytest.approx(unread / len(left))
    assert_stages_as_in(fault_runs.with_short_answers(""), run, "detect_s")
    assert_nothing_leaked(run)


def test_delay_abort_moves_the_latency_by_the_delay(runs: Runs, clean: Run) -> None:
    run = runs(f"delay-abort={DELAY_S}")
    assert_not_vacuous(run)
    moved = run.metrics["cancel_latency_s"]["p50"] - clean.metrics["cancel_latency_s"]["p50"]
    assert moved == pytest.approx(DELAY_S, abs=STEP_S)
    moved = run.metrics["signal_s"]["p50"] - clean.metrics["signal_s"]["p50"]
    assert moved == pytest.approx(DELAY_S, abs=STEP_S)
    steps = "cancel_latency_steps"
    moved = run.metrics[steps]["p50"] - clean.metrics[steps]["p50"]
    assert moved == pytest.approx(steps_until_told(run), abs=1.5)
    assert_stages_as_in(clean, run, "detect_s", "wait_s", "free_s")
    assert_no_ghosts(run)
    assert_nothing_leaked(run)


def steps_until_told(run: Run) -> float:
    """How many steps typically ended between the frontend's seeing it and the worker's hearing."""
    log = Log(run)
    return median(
        log.steps_between(events["disconnected"]["t_ns"], events["abort_received"]["t_ns"])
        for events in log.left_with("abort_received")
    )


@pytest.mark.slow
def test_lose_abort_is_counted_as_ghosts_one_by_one(fault_runs: FaultRuns) -> None:
    run = fault_runs.with_short_answers(f"lose-abort={LOST_SHARE}")
    assert_not_vacuous(run)
    heard = Log(run).left_with("abort_received")
    lost = sum(events["finished"]["reason"] != "abort" for events in heard)
    rate = run.metrics["ghost_rate"]
    assert rate["mean"] * rate["n"] == pytest.approx(lost)
    fewest, most = stats.binom.interval(0.999, rate["n"], LOST_SHARE)
    assert fewest <= lost <= most
    assert run.metrics["cancel_latency_s"]["n_censored"] == lost
    clean = fault_runs.with_short_answers("")
    assert_stages_as_in(clean, run, "detect_s", "signal_s", "free_s")
    assert_nothing_leaked(run)


def test_leak_blocks_is_counted_block_by_block(runs: Runs, clean: Run) -> None:
    run = runs(f"leak-blocks={LEAKED}")
    assert_not_vacuous(run)
    aborted = [e for e in Log(run).events.values() if e["finished"]["reason"] == "abort"]
    held = [events["removed"]["num_blocks"] for events in aborted]
    assert set(held) <= {0, *range(LEAKED, 100)}, "each must have held enough, or none"
    assert sum(blocks >= LEAKED for blocks in held) > ABANDONS / 2
    missing = LEAKED * sum(blocks >= LEAKED for blocks in held)
    assert run.metrics["leaked_blocks"]["mean"] == missing
    assert run.metrics["leaked_slots"]["mean"] == 0
    assert_no_ghosts(run)
    assert_latency_as_in(clean, run)
    assert_waste_as_in(clean, run)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["", "abort-parent-only"])
def test_the_counter_tells_what_two_answers_wasted(fault_runs: FaultRuns, fault: str) -> None:
    run = fault_runs.with_two_answers(fault)
    ends = [event for event in run.rows("lifecycle") if event["event"] == "finished"]
    read = sum(row["tokens_read"] for row in run.rows("requests"))
    counted = run.metrics["wasted_tokens"]["others"]["counter"]
    assert counted["others"]["total_tokens"] == sum(e["num_generated"] for e in ends) - read
    assert counted["mean"] * counted["n"] == pytest.approx(counted["others"]["total_tokens"])


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.fault, marks=() if case.fault in SOON else pytest.mark.slow)
        for case in CASES
    ],
)
def test_each_fault_moves_its_figure_and_the_clean_engine_does_not(
    fault_runs: FaultRuns, case: Case
) -> None:
    clean, faulty = case.read(fault_runs, ""), case.read(fault_runs, case.argument)
    assert is_within(clean, case.clean)
    assert is_within(faulty, case.faulty)
    assert case.clean[1] < case.faulty[0] or case.faulty[1] < case.clean[0]


def test_every_fault_has_a_case() -> None:
    assert sorted(case.fault for case in CASES) == sorted(fault_names())


def test_the_table_in_the_documents_has_a_row_for_each_case() -> None:
    """Its figures come from `make faults-table`."""
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + len(CASES)
    for case, line in zip(CASES, lines[1:], strict=True):
        assert line.startswith(case.names)
