"""Positive controls: an engine that is wrong on purpose, by an amount that is known.

Each fault must move the figure that it is about by what was set. A few faults are tried in
`make test`, all of them in `make test-all`.
"""

import pytest

from reference_engine.faults import fault_names
from tools.truth.fault_cases import (
    CASES,
    SHOWN_BY_CONFORM,
    TABLE,
    Case,
    FaultRuns,
    is_within,
    more,
)

pytestmark = pytest.mark.e2e

SOON = ("delay-abort", "leak-blocks")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> FaultRuns:
    return FaultRuns(tmp_path_factory.mktemp("controls"))


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
        pytest.param(case, id=case.fault, marks=() if case.fault in SOON else pytest.mark.table)
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
    assert sorted([case.fault for case in CASES] + [*SHOWN_BY_CONFORM]) == sorted(fault_names())
    page = TABLE.read_text()
    assert page.endswith(more())
    _, *rows = [line for line in page.removesuffix(more()).splitlines() if line.startswith("| ")]
    assert len(rows) == len(CASES)
    for case, row in zip(CASES, rows, strict=True):
        assert row.startswith(case.names)
