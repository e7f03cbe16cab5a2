"""The end of `walkaway run`: what it says last, and how it ends."""

from pathlib import Path

import pytest

from harness.commands.run_and_show import show_finished
from harness.errors import PlanError, TargetError, UndecidedError, WalkawayError
from harness.records import Remark, Summary
from harness.run.pipeline import FinishedRun
from harness.store.run_folder import RunFolder
from tests.made_up.run import save_judged

BUSY = Remark(level="invalid", text="the load process with pid 7 could not keep up")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return RunFolder(save_judged(tmp_path_factory.mktemp("finished") / "run"))


def end(
    folder: RunFolder,
    *remarks: Remark,
    failure: WalkawayError | None = None,
    report: Path | None = None,
    as_json: bool = False,
) -> None:
    summary = folder.read_summary()
    assert isinstance(summary, Summary)
    summary.validity = list(remarks)
    finished = FinishedRun(folder=folder, summary=summary, failure=failure, report=report)
    show_finished(finished, is_interrupted=False, as_json=as_json, shows_all=False)


def test_a_report_is_named_only_if_it_was_drawn(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    end(folder, report=folder.report)
    *_, report, stops = capsys.readouterr().out.splitlines()
    assert report == f"report: {folder.report}"
    assert stops == "The server stops: none of 1 abandoned requests ran on."
    with pytest.raises(TargetError, match=r"^the disk is full\nwhat was collected is in "):
        end(folder, failure=TargetError("the disk is full"))
    assert "report" not in capsys.readouterr().out
    with pytest.raises(RuntimeError, match=r"could not be drawn, see .*report\.log"):
        end(folder)


def test_an_invalid_run_does_not_end_well(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    warning = Remark(level="warning", text="few requests")
    end(folder, warning, report=folder.report)
    with pytest.raises(UndecidedError) as raised:
        end(folder, BUSY, warning, report=folder.report)
    ends = "the run is invalid, and no gate passes it: "
    assert str(raised.value) == f"{ends}the line `invalid` above says why"
    assert raised.value.exit_code == 4
    assert BUSY.text in " ".join(capsys.readouterr().out.split())
    with pytest.raises(UndecidedError, match=f"^{ends}{BUSY.text}$"):
        end(folder, BUSY, report=folder.report, as_json=True)
    with pytest.raises(TargetError):
        end(folder, BUSY, failure=TargetError("the server died"), report=folder.report)


def test_a_plan_that_failed_is_told_once(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    why = Remark(level="invalid", text="none of the 9 requests could be abandoned")
    with pytest.raises(PlanError, match=r"^this run shows nothing: the line `invalid` above says"):
        end(folder, why, failure=PlanError(why.text), report=folder.report)
    assert capsys.readouterr().out.count(why.text) == 1
    with pytest.raises(PlanError, match=f"^{why.text}\n"):
        end(folder, BUSY, failure=PlanError(why.text), report=folder.report)
