"""Which of several failures is that of a workload with arms."""

from pathlib import Path
from typing import Any

import pytest

from harness.errors import InterruptedRunError, PlanError, TargetError, WalkawayError
from harness.run.pipeline import FinishedRun
from harness.run.process import Interruption
from harness.run.progress import Progress
from harness.run.rounds import execute_rounds
from harness.run.run_config import ResolvedRun, RunConfig, resolve_run
from harness.run.run_state import begin_manifest
from harness.store.run_folder import RunFolder

ARMS = 'arms=[{name="a"},{name="b"},{name="c"}]'


@pytest.mark.parametrize(
    ("failures", "gravest", "status"),
    [
        ([None, PlanError("nobody left"), None], PlanError, "complete"),
        ([PlanError("nobody left"), TargetError("gone"), None], TargetError, "target_failed"),
        (
            [TargetError("gone"), InterruptedRunError("^C"), None],
            InterruptedRunError,
            "interrupted",
        ),
        ([None, None, None], None, "complete"),
    ],
)
def test_the_gravest_failure_counts_and_the_first_of_its_kind(
    tmp_path: Path,
    failures: list[WalkawayError | None],
    gravest: type[WalkawayError] | None,
    status: str,
) -> None:
    left = iter(failures)

    def execute(resolved: ResolvedRun, /, **_: Any) -> FinishedRun:
        assert resolved.config.out is not None
        folder = RunFolder.create(resolved.config.out)
        folder.write_manifest(begin_manifest(resolved, run_id=folder.name))
        return FinishedRun(folder=folder, summary=None, failure=next(left))

    config = RunConfig(workload="demo", settings=[ARMS, "run.rounds=1"], out=tmp_path / "run")
    finished = execute_rounds(
        resolve_run(config), progress=Progress(), interruption=Interruption(), execute=execute
    )
    assert (None if finished.failure is None else type(finished.failure)) == gravest
    assert finished.folder.read_manifest()["status"] == status
