"""All runs of a workload with arms, one after the other, and their pooled figures.

Each run is like any other, in its own folder. A failed run loses only its own figures. An
interruption ends the rest; the runs so far are pooled.
"""

import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Protocol

from harness.compare.pool import ArmRound, all_requests, analyse_round, pool
from harness.errors import (
    ConfigError,
    InterruptedRunError,
    PlanError,
    StorageError,
    TargetError,
    WalkawayError,
)
from harness.records import ArmsSummary
from harness.run.collection import save_killed
from harness.run.pipeline import (
    OF_THE_DISK,
    FinishedRun,
    ReportProcess,
    execute,
    finish,
    why_not_saved,
    write_summary,
)
from harness.run.process import Interruption
from harness.run.progress import Pace, PrefixedProgress, Progress
from harness.run.run_config import ResolvedRun
from harness.run.run_state import begin_manifest, choose_folder
from harness.store.manifest import status_after
from harness.store.remains import MANIFEST, OF_THE_MANIFEST, stand_in
from harness.store.run_folder import OtherVersionError, RunFolder


class ExecuteOne(Protocol):
    def __call__(
        self,
        resolved: ResolvedRun,
        /,
        *,
        progress: Progress,
        interruption: Interruption,
        draws: bool,
    ) -> FinishedRun: ...


def execute_rounds(
    resolved: ResolvedRun,
    *,
    progress: Progress,
    interruption: Interruption,
    execute: ExecuteOne = execute,
) -> FinishedRun:
    """Do all runs, each by `execute`. Raises ConfigError or TargetError if nothing was measured.

    `failure` of the result is the interruption, else the first of a run that broke off, else the
    first of one that shows nothing.
    """
    folder = RunFolder.claim(choose_folder(resolved))
    try:
        manifest = begin_manifest(resolved, run_id=folder.name)
        folder.rounds.mkdir()
        folder.write_manifest(manifest)
        failures = list(_run_all(resolved, folder, progress, interruption, execute))
        failure = min(failures, key=_gravity, default=None)
        was_interrupted = isinstance(failure, InterruptedRunError)
        if failure is not None and not was_interrupted and not any(folder.rounds.iterdir()):
            shutil.rmtree(folder.path)
            raise failure
        manifest.status = status_after(failure)
        manifest.hardware |= _hardware_found(folder)
        folder.write_manifest(manifest)
        progress.phase("comparing the arms")
        summary = write_pooled_summary(folder)
        if summary is None:
            return FinishedRun(folder=folder, summary=None, failure=failure)
        progress.phase("drawing the report")
        with ReportProcess(folder) as report:
            return finish(folder, summary, failure, report)
    except KeyboardInterrupt as error:  # the second Ctrl-C
        raise InterruptedRunError(f"interrupted; what was saved is in {folder.path}") from error
    except OSError as error:
        if error.errno not in OF_THE_DISK:
            raise
        raise StorageError(why_not_saved(error.errno, folder)) from error
    finally:
        progress.close()


def _gravity(failure: WalkawayError) -> int:
    """The gravest first."""
    match failure:
        case InterruptedRunError():
            return 0
        case PlanError():
            return 2
        case _:
            return 1


def _run_all(
    resolved: ResolvedRun,
    folder: RunFolder,
    progress: Progress,
    interruption: Interruption,
    execute: ExecuteOne,
) -> Iterator[WalkawayError]:
    """Yields the failure of each run that failed, with the run's name."""
    last = resolved.arm_runs[-1].round
    pace = Pace("run", len(resolved.arm_runs), clock_s=time.monotonic)
    for run in resolved.arm_runs:
        if interruption.requested:
            yield InterruptedRunError("interrupted")
            return
        progress.phase(f"{pace}")
        which = f"round {run.round} of {last}, arm {run.arm}"
        part = PrefixedProgress(progress, which)
        failure: WalkawayError | None
        try:
            of_arm = resolved.for_arm(run, out=folder.rounds / run.folder_name)
            done = execute(of_arm, progress=part, interruption=interruption, draws=False)
            failure = done.failure
        except (ConfigError, TargetError, InterruptedRunError) as error:
            failure = error
        pace.step()
        if failure is not None:
            part.phase(str(failure).partition("\n")[0])
            yield type(failure)(f"{which}: {failure}")


def _hardware_found(folder: RunFolder) -> dict[str, Any]:
    """The hardware with the GPUs, which the collector of a run finds. Empty if no run was saved."""
    for path in folder.runs():
        with suppress(ConfigError):
            found: dict[str, Any] = RunFolder(path).read_manifest()["hardware"]
            return found
    return {}


def write_pooled_summary(folder: RunFolder) -> ArmsSummary | None:
    """Compute the folder's `summary.json` and `requests.parquet` from its runs' files.

    None if no run made a request. Runs that were not saved are left out, with a remark.
    """
    rounds = list(_analysed(folder))
    if not rounds:
        return None
    summary = pool(rounds, folder.read_manifest())
    folder.write_all_requests(all_requests(rounds))
    return folder.write_summary(summary)


def complete_summary(folder: RunFolder) -> None:
    """Judge a run that was cut short, or whose summary is damaged, by whatever rows it has left; of
    a workload with arms, by its runs that were saved.

    Raises ConfigError if no request was made.
    """
    if folder.has_arms:
        _complete_manifest_of_arms(folder)
        is_judged = write_pooled_summary(folder) is not None
    else:
        complete_rows(folder)
        is_judged = not folder.frames().requests.empty
        if is_judged:
            write_summary(folder)
    if not is_judged:
        raise ConfigError(f"{folder.path}: no request was made in this run: nothing to report")


def complete_rows(folder: RunFolder) -> None:
    """Save the rows that are still in shards. Where there are none, tables that are missing or
    damaged become empty ones, and a manifest becomes one that knows nothing, which warnings name;
    what is damaged is kept under another name."""
    unread = folder.unread_tables()
    why_no_manifest = _why_no_manifest(folder)
    if not unread and why_no_manifest is None:
        return
    if unread and any(folder.shards.glob("requests-*.ndjson")):
        save_killed(folder)
        return
    if "requests" in unread:
        raise ConfigError(_why_no_rows(folder, unread["requests"]))
    if why_no_manifest is None:
        manifest = folder.load_manifest()
    else:
        manifest = stand_in(folder.name)
        manifest.warnings.append(f"{folder.put_aside(MANIFEST)}: {OF_THE_MANIFEST}")
    manifest.status = "interrupted"  # it is not whole, and no gate may pass it
    for name in unread:
        manifest.warnings.append(f"{folder.empty_table(name)}: what it held is in no figure")
    folder.write_manifest(manifest)


def _why_no_manifest(folder: RunFolder) -> str | None:
    """Why, in words; None: it can be read. Raises OtherVersionError."""
    try:
        folder.load_manifest()
    except OtherVersionError:
        raise
    except ConfigError as error:
        return str(error)
    return None


def _why_no_rows(folder: RunFolder, why: str) -> str:
    if (folder.path / "requests.parquet").exists():
        return f"{why}; without the rows of its requests there is nothing to report"
    again = folder.repeat_command
    return (
        f"{folder.path}: was killed before a row of its load was written: there is nothing to "
        f"report; run it again{again and f': {again}'}"
    )


def _complete_manifest_of_arms(folder: RunFolder) -> None:
    """Replaces one that is missing or damaged by that of a run, with the arms that were run."""
    if _why_no_manifest(folder) is None:
        return
    runs = [one for path in folder.runs() if _why_no_manifest(one := RunFolder(path)) is None]
    if not runs:
        raise ConfigError(
            f"{folder.path}: neither its manifest.json can be read nor one in its rounds/: name "
            "one of the folders in rounds/ to report its rows"
        )
    manifest = runs[0].load_manifest()
    names = [one.path.name.partition("-") for one in runs]
    manifest.run_id, manifest.status = folder.name, "interrupted"
    manifest.workload["arms"] = [{"name": arm} for arm in dict.fromkeys(arm for *_, arm in names)]
    manifest.workload["run"] |= {"rounds": max(int(number) for number, *_ in names)}
    folder.put_aside(MANIFEST)
    folder.write_manifest(manifest)


def _analysed(folder: RunFolder) -> Iterator[ArmRound]:
    for path in folder.runs():
        try:
            frames = RunFolder(path).frames()
        except ConfigError:
            continue
        if frames.requests.empty:
            continue
        number, _, arm = path.name.partition("-")
        yield analyse_round(frames, round_number=int(number), arm=arm)
