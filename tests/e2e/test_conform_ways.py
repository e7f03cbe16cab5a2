"""Clean and defective servers of any number of slots, with a queue or without one, with short steps
and with flushes: `walkaway conform` as it is typed, on scripted servers whose truth is known."""

from pathlib import Path

import pytest

from harness.store.conform_result import CaseResult, Failure, Verdict
from tests.harness.conform.slot_server import Manners, serving
from tests.truth.conform_cases import conform

TARGET = """
description = "A scripted server with slots"
stream_options = { include_usage = true }
bytes_are_tokens = true
slots_from = "workload"
settle_s = 1.0
"""
CASE = "stream/fin-decode"
QUEUE = Manners(step_s=0.01)
REFUSE = Manners(step_s=0.01, full=429)
SHORT = Manners(step_s=0.0016)
FLUSH = Manners(step_s=0.01, flush=16)
MANY = Manners(slots=64, step_s=0.02)


def judged(folder: Path, manners: Manners, case: str = CASE) -> CaseResult:
    target = folder / "target.toml"
    target.write_text(TARGET)
    with serving(manners, folder / "server.log") as url:
        flags = ["--target", url, "--engine", str(target), "--tries", "5"]
        (result,) = conform(folder / "out", case, *flags).cases
    return result


def changed(manners: Manners, **changes: float | bool) -> Manners:
    fields = {name: getattr(manners, name) for name in Manners.__slots__}
    return Manners(**{**fields, **changes})


def table(*values: object) -> object:
    """Left to `make conform-faults`."""
    return pytest.param(*values, marks=pytest.mark.table)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("manners", "way"),
    [
        (QUEUE, "full_slots"),
        (REFUSE, "admission"),
        table(SHORT, "full_slots"),
        table(changed(FLUSH, events=False), "full_slots"),
        table(MANY, "full_slots"),
        table(Manners(slots=0, step_s=0.01, stream_s=0.002), "pace"),
    ],
)
def test_a_good_server_of_any_kind_stops(tmp_path: Path, manners: Manners, way: str) -> None:
    result = judged(tmp_path, manners)
    assert (result.verdict, result.stops, result.way) == (Verdict.PASS, True, way), result.reason


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("manners", "kind"),
    [
        (changed(QUEUE, hold_s=0.3), Failure.LATE),
        (changed(QUEUE, stall_s=0.3), Failure.HARM),
        table(changed(QUEUE, cuts=True), Failure.HARM),
        (changed(REFUSE, hold_s=-1), Failure.NEVER),
        table(changed(SHORT, forgets=True), Failure.NEVER),
        table(changed(FLUSH, forgets=True), Failure.NEVER),
        table(changed(MANY, forgets=True), Failure.NEVER),
    ],
)
def test_a_bad_server_of_any_kind_is_red_for_its_fault(
    tmp_path: Path, manners: Manners, kind: Failure
) -> None:
    result = judged(tmp_path, manners)
    assert (result.verdict, result.kind) == (Verdict.FAIL, kind), result.reason
    if kind is not Failure.HARM:
        assert result.stops is False
