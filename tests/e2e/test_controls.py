"""Positive controls: an engine that is wrong on purpose, by an amount that is known.

Each fault must move the figure that it is about, by what was set, and leave the others where the
clean run has them. A few faults are tried in `make test`, all of them in `make test-all`.
"""

from statistics import median
from typing import Any

import pytest

from reference_engine.faults import fault_names
from tests.e2e.running import Log, Run
from tests.truth.fault_cases import (
    ABANDONS,
    CASES,
    DELAY_S,
    LEAKED,
    STEP_S,
    TABLE,
    Case,
    FaultRuns,
    is_within,
)

pytestmark = pytest.mark.e2e

SOON = ("delay-abort", "leak-blocks")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> FaultRuns:
    """Runs of the engine with a fault (none: ""), each made when it is first asked for."""
    return FaultRuns(tmp_path_factory.mktemp("controls"))


def assert_sound(run: Run, *, blocks: int = 0) -> None:
    """Enough was abandoned, and so many leaked blocks are all that is wrong."""
    rate, latency = run.metrics["ghost_rate"], run.metrics["cancel_latency_s"]
    assert run.summary["outcomes"]["abandoned"] == rate["n"] >= ABANDONS
    assert rate["mean"] == latency["n_censored"] == run.metrics["leaked_slots"]["mean"] == 0
    assert run.metrics["leaked_blocks"]["mean"] == blocks


def assert_as_in(clean: Run, run: Run, *figures: str) -> None:
    """The medians, but for a step or a token."""
    for name in figures:
        allowed = STEP_S if name.endswith("_s") else 1
        assert moved_by(clean, run, name) == pytest.approx(0, abs=allowed), name


def moved_by(clean: Run, run: Run, name: str) -> float:
    return float(run.metrics[name]["p50"] - clean.metrics[name]["p50"])


def test_without_a_fault_nothing_is_wrong(runs: FaultRuns) -> None:
    clean = runs.good("")
    assert_sound(clean)
    assert clean.metrics["cancel_latency_s"]["p50"] < 3 * STEP_S
    assert clean.metrics["wasted_after_close_tokens"]["p50"] < 2


def test_the_gauge_of_running_requests_keeps_up_with_the_step_log(runs: FaultRuns) -> None:
    steps = sorted(runs.good("").rows("steps"), key=lambda row: row["started_ns"])
    pages = runs.good("").rows("server_metrics")
    shown = [(p["value"], p["t_ns"]) for p in pages if p["name"] == "vllm:num_requests_running"]
    known = [(value, running_at(steps, t_ns)) for value, t_ns in shown]
    under_load = [abs(value - true) for value, true in known if true is not None]
    assert median(under_load) <= 2


def running_at(steps: list[dict[str, Any]], t_ns: int) -> int | None:
    """As the step log says; None where no step was running then, nor two before it."""
    here = [row for row in steps if row["started_ns"] <= t_ns]
    if len(here) < 3 or t_ns > here[-1]["ended_ns"]:
        return None
    running: int = here[-1]["num_running"]
    return running


def test_delay_abort_moves_the_latency_by_the_delay(runs: FaultRuns) -> None:
    clean, run = runs.good(""), runs.good(f"delay-abort={DELAY_S}")
    assert_sound(run)
    for name in ("cancel_latency_s", "signal_s"):
        assert moved_by(clean, run, name) == pytest.approx(DELAY_S, abs=STEP_S)
    log = Log(run)
    steps_until_heard = median(
        log.steps_between(events["disconnected"]["t_ns"], events["abort_received"]["t_ns"])
        for events in log.left_with("abort_received")
    )
    moved = moved_by(clean, run, "cancel_latency_steps")
    assert moved == pytest.approx(steps_until_heard, abs=1.5)
    assert_as_in(clean, run, "detect_s", "wait_s", "free_s")


def test_leak_blocks_is_counted_block_by_block(runs: FaultRuns) -> None:
    clean, run = runs.good(""), runs.good(f"leak-blocks={LEAKED}")
    aborted = [e for e in Log(run).events.values() if e["finished"]["reason"] == "abort"]
    held = [events["removed"]["num_blocks"] for events in aborted]
    assert set(held) <= {0, *range(LEAKED, 100)}, "each must have held enough, or none"
    num_leaky = sum(blocks >= LEAKED for blocks in held)
    assert num_leaky > ABANDONS / 2
    assert_sound(run, blocks=LEAKED * num_leaky)
    assert_as_in(clean, run, "detect_s", "signal_s", "wait_s", "free_s", "cancel_latency_s")
    assert_as_in(clean, run, "cancel_latency_steps", "wasted_after_close_tokens")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["", "abort-parent-only"])
def test_the_counter_tells_what_two_answers_wasted(runs: FaultRuns, fault: str) -> None:
    run = runs.with_two_answers(fault)
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
    runs: FaultRuns, case: Case
) -> None:
    assert is_within(case.read(runs, ""), case.clean)
    assert is_within(case.read(runs, case.argument), case.faulty)
    assert case.clean[1] < case.faulty[0] or case.faulty[1] < case.clean[0]


def test_every_fault_has_a_case_and_a_row_in_the_documents() -> None:
    """The figures of the rows come from `make faults-table`."""
    assert sorted(case.fault for case in CASES) == sorted(fault_names())
    _, *rows = [line for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    assert len(rows) == len(CASES)
    for case, row in zip(CASES, rows, strict=True):
        assert row.startswith(case.names)
