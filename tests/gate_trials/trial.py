"""One trial: a whole run of the bundled engine, without a report."""

import json
from pathlib import Path
from typing import Final

from harness.run.pipeline import execute
from harness.run.process import Interruption
from harness.run.progress import Progress
from harness.run.rounds import execute_rounds
from harness.run.run_config import RunConfig, resolve_run
from tests.gate_trials.cases import Case

MOST_TRIES: Final = 4


def measure(case: Case, seed: int, folder: Path) -> None:
    """Run the case into `folder`, unless that was done already. Raises how it failed.

    A run that is invalid, because the machine was too busy with something else, is put aside and
    made again; the last one counts, whatever it is.
    """
    for number in range(1, MOST_TRIES + 1):
        if not (folder / "summary.json").is_file():
            _run(case, seed, folder)
        if number == MOST_TRIES or not _is_invalid(folder):
            return
        folder.rename(_aside(folder, number))


def times_made_again(folder: Path) -> int:
    return sum(_aside(folder, number).exists() for number in range(1, MOST_TRIES + 1))


def _aside(folder: Path, number: int) -> Path:
    return folder.with_name(f"{folder.name}-invalid-{number}")


def _is_invalid(folder: Path) -> bool:
    said = json.loads((folder / "summary.json").read_text())["validity"]
    return any(one["level"] == "invalid" for one in said)


def _run(case: Case, seed: int, folder: Path) -> None:
    order = RunConfig(
        workload=case.workload, settings=[*case.settings, f"run.seed={seed}"], out=folder
    )
    resolved = resolve_run(order)
    run = execute_rounds if resolved.arm_runs else execute
    finished = run(resolved, progress=Progress(), interruption=Interruption())
    if finished.failure is not None:
        raise finished.failure
