"""Who is accused, how soon, and what a server is held to: `walkaway conform` on the bundled engine
with a fault."""

import subprocess
from pathlib import Path

import pytest

from harness.store.conform_result import Aftermath, ConformResult, Failure, Verdict
from tests.e2e.running import ROOT
from tests.reference_engine.running_engine import RunningEngine
from tools.truth.conform_cases import conform

ENGINE = ("--runner", "simulated", "--sim-fixed-ms", "10", "--max-num-seqs", "4")
REFERENCE = (ROOT / "harness" / "targets" / "reference.toml").read_text()
LEAVES = ("stream/fin-decode", "stream/rst-decode", "unary/leave")


def judged(folder: Path, *asked: str, fault: str, disconnect: str = "cancel") -> ConformResult:
    target = folder / "target.toml"
    text = REFERENCE.replace("settle_s = 2.0", "settle_s = 0.6")
    assert text != REFERENCE
    target.write_text(f'disconnect = "{disconnect}"\n{text}')
    engine = RunningEngine(*ENGINE, "--fault", fault, stderr=subprocess.DEVNULL)
    try:
        flags = ("--target", engine.url, "--engine", str(target), "--tries", "2")
        return conform(folder / "out", *asked, *flags)
    finally:
        engine.stop()  # a fault may have ended it before


@pytest.mark.e2e
def test_a_server_that_never_stops_fails_at_once_and_is_not_called_busy(tmp_path: Path) -> None:
    result = judged(tmp_path, *LEAVES, "wedge/health", fault="ignore-disconnect")
    found = {one.id: one for one in result.cases}
    assert {found[name].kind for name in LEAVES} == {Failure.NEVER}
    assert found["wedge/health"].verdict is Verdict.PASS, "its own ghosts are no wedge"
    assert all("another load" not in one.reason for one in result.cases)
    assert result.sentence.startswith("1 of 4 cases passed and 3 failed: to mend the server, ")


@pytest.mark.e2e
def test_a_death_ends_the_run_at_the_case_that_it_came_of(tmp_path: Path) -> None:
    result = judged(tmp_path, *LEAVES, fault="die-on-abort")
    first, *rest = result.cases
    assert (first.id, first.kind, first.aftermath) == (LEAVES[0], Failure.HARM, Aftermath.DEAD)
    assert "after 1 client had left in this case and 1 in all" in first.reason
    assert {one.verdict for one in rest} == {Verdict.CANNOT_DECIDE}
    assert all(f"since {LEAVES[0]}" in one.reason and not one.repeat for one in rest)
    assert result.exit_code == 3


@pytest.mark.e2e
@pytest.mark.table
def test_a_server_that_answers_nobody_is_wedged_and_its_health_page_lies(tmp_path: Path) -> None:
    result = judged(tmp_path, *LEAVES, "wedge/health", fault="wedge-after=6")
    found = {one.id: one for one in result.cases}
    (guilty,) = (one for one in result.cases if one.kind is Failure.HARM)
    assert guilty.aftermath is Aftermath.WEDGED
    assert "/health says 200" in guilty.reason
    assert guilty.id in LEAVES
    assert found["wedge/health"].kind is Failure.NEVER
    assert f"since {guilty.id}" in found["wedge/health"].reason


@pytest.mark.e2e
def test_a_server_is_held_to_what_it_declares(tmp_path: Path) -> None:
    result = judged(
        tmp_path, "stream/fin-decode", "n/parent", fault="ignore-disconnect", disconnect="drain"
    )
    assert [one.verdict for one in result.cases] == [Verdict.PASS, Verdict.PASS], result.cases
    assert result.target.disconnect == "drain"
    assert all("as it declares (`drain`)" in one.reason for one in result.cases)


@pytest.mark.e2e
def test_a_server_that_declares_to_drain_and_cancels_is_named(tmp_path: Path) -> None:
    (result,) = judged(
        tmp_path, "stream/fin-decode", fault="delay-abort=0.001", disconnect="drain"
    ).cases
    assert result.verdict is Verdict.PASS
    assert "declares `drain`, but the server cancels" in result.reason
