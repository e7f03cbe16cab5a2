"""`walkaway gate` on whole folders: exit codes, wrong usage, and that nothing is overwritten."""

import json
from pathlib import Path
from typing import Any

import pytest

from harness.commands.gate import GateOrder, gate_and_show
from tests.harness.gate.gating import gate, refusal, said
from tests.made_up import gated

pytestmark = pytest.mark.usefixtures("elsewhere")

LEAK = {"leaked_blocks": gated.count(7)}


def test_the_exit_code_is_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = gated.save(tmp_path / "good"), gated.save(tmp_path / "bad", gated.summary(LEAK))
    assert gate(good) == 0
    assert gate(good, "slot_recovery_s.p50 < 1") == 4
    by_workload = GateOrder(run=bad)  # no file of limits: the workload's hold
    assert gate_and_show(by_workload, as_json=False, quiet=True) == 3
    capsys.readouterr()
    assert gate(bad) == 3
    found = said(capsys)
    assert (found["verdict"], found["workload"]) == ("fail", "gate")
    assert found["checks"][1] == {
        "name": "leaked_blocks.max == 0",
        "verdict": "fail",
        "measured": "7 blocks",
        "reason": "beyond the limit",
        "to_decide": "",
    }


def test_what_is_no_run_is_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "is not a run's folder" in refusal(GateOrder(run=tmp_path / "empty"))
    assert "is not a run's folder" in refusal(GateOrder(run=tmp_path / "none"))


def test_a_gate_without_a_limit_is_wrong_usage(tmp_path: Path) -> None:
    run = gated.save(tmp_path / "run")
    Path("none.txt").write_text("# nothing\n")
    assert "has no limit" in refusal(GateOrder(run=run, limits=Path("none.txt")))
    assert "cannot be read" in refusal(GateOrder(run=run, limits=Path("missing.txt")))
    manifest = json.loads((run / "manifest.json").read_text())
    del manifest["workload"]["gate"]
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert "no limit to judge it by" in refusal(GateOrder(run=run))


def test_no_report_is_overwritten_but_an_empty_one_is_filled(tmp_path: Path) -> None:
    run = gated.save(tmp_path / "run")
    file = Path("summary.md")
    file.touch()  # as CI hands over its step summary
    assert gate(run, markdown=file) == 0
    kept = file.read_text()
    assert "--force replaces it" in refusal(GateOrder(run=run, markdown=file))
    assert "--force replaces it" in refusal(GateOrder(run=run, junit=file))
    assert file.read_text() == kept
    assert gate(run, markdown=file, may_overwrite=True) == 0
    assert "cannot be written" in refusal(GateOrder(run=run, junit=Path("none") / "gate.xml"))


def test_what_cannot_be_written_is_wrong_usage(tmp_path: Path) -> None:
    run = gated.save_rounds(tmp_path / "run", 1.0, 1.0, 1.0)
    limits = Path("limits.txt")
    limits.write_text("cancel_latency_steps.p99 <= 2")
    for flag in ("junit", "markdown"):
        named: dict[str, Any] = {flag: Path("/proc/none.xml")}
        assert "/proc/none.xml: cannot be written" in refusal(
            GateOrder(run=run, limits=limits, **named)
        )
    file = Path("file")
    file.touch()
    order = GateOrder(run=run, limits=limits, baseline=file / "x.json", saves_baseline=True)
    assert "file/x.json: cannot be written" in refusal(order)


@pytest.mark.parametrize("flags", [("junit", "markdown"), ("junit", "baseline")])
def test_no_file_is_named_twice(flags: tuple[str, str], tmp_path: Path) -> None:
    run = gated.save(tmp_path / "run")
    first, second = flags
    order: dict[str, Any] = {first: Path("same"), second: tmp_path / "same"}
    said = refusal(GateOrder(run=run, **order, saves_baseline=True))
    assert f"is named by --{first} and by --{second}" in said
    assert not Path("same").exists()
