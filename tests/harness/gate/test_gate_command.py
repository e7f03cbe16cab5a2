"""`walkaway gate` on whole folders: exit codes, wrong usage, and that nothing is overwritten."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness.commands.gate import GateOrder, gate_and_show, print_judgement
from harness.gate.judge import Check, Judgement, Verdict
from tests.harness.gate.gating import gate, refusal, said
from tests.harness.gate.test_gate_files import judgement
from tests.made_up import gated

pytestmark = pytest.mark.usefixtures("elsewhere")

LEAK = {"leaked_blocks": gated.count(7)}


def test_the_exit_code_is_the_verdict(tmp_path: Path) -> None:
    good = gated.save(tmp_path / "good")
    assert gate(good) == 0
    assert gate(gated.save(tmp_path / "bad", gated.summary(LEAK))) == 3
    assert gate(good, "slot_recovery_s.p50 < 1") == 4


def test_the_limits_of_the_workload_hold_where_no_file_is_named(tmp_path: Path) -> None:
    run = gated.save(tmp_path / "run", gated.summary(LEAK))
    assert gate_and_show(GateOrder(run=run), as_json=False, quiet=True) == 3


def test_json_tells_each_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gate(gated.save(tmp_path / "bad", gated.summary(LEAK)))
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
    assert "nothing to judge it by" in refusal(GateOrder(run=run))


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


# On a terminal.


def shown(one: Judgement, saved: str | None = None, width: int = 80) -> list[str]:
    console = Console(width=width, force_terminal=False)
    with console.capture() as captured:
        print_judgement(console, one, saved)
    return captured.get().splitlines()


def test_the_terminal_shows_the_gravest_first_and_what_would_decide() -> None:
    lines = shown(judgement(), saved="not saved as the baseline: only a run that passes is")
    assert lines[0].startswith("gate: fail  gate in")
    verdicts = [line[:13].strip() for line in lines[3:6]]
    assert verdicts == ["fail", "cannot decide", ""]
    assert any("would decide: 368 more" in line for line in lines)
    assert lines[-1].startswith("not saved")
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize(
    "name",
    ["leaked_slots.max == 0", "new / baseline: cancel_latency_prefill_steps.mean <= 1.12345678"],
)
def test_no_word_is_lost_beyond_the_edge(name: str, width: int) -> None:
    reason = "not measurable: the server shows no gauge of requests that run, " * 3
    to_decide = "a server with `max_num_seqs` known, or the workload `gate_black_box`"
    said = {"reason": f"{reason}nor any other", "to_decide": to_decide, "measured": "12 of 500"}
    one = Check(name=name, verdict=Verdict.CANNOT_DECIDE, **said)
    lines = shown(judgement([one]), width=width)
    assert all(len(line) <= width for line in lines)
    printed = Counter(" ".join(lines).split())
    asked = Counter(" ".join([*said.values(), name, "would decide:"]).split())
    assert not asked - printed
