"""One run, from its configuration to its report.

The measurement may end early, by a dead server or a user's interruption. All collected rows are
written in any case, and a run with any load is judged like any other; `FinishedRun.failure` says
how it ended.
"""

import errno
import os
import shutil
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import msgspec

from harness.client.fd_limit import check_streams
from harness.errors import (
    NO_ROOM,
    ConfigError,
    InterruptedRunError,
    PlanError,
    StorageError,
    TargetError,
    WalkawayError,
)
from harness.metrics import PROBES_LEFT_OUT
from harness.records import ArmsSummary, Summary
from harness.run.load_process import LoadProcess
from harness.run.measurement import LoadRunner, Measurement
from harness.run.preflight import UncountedSlotsError
from harness.run.process import Child, Interruption, python_module
from harness.run.progress import Progress
from harness.run.run_config import ResolvedRun
from harness.run.run_state import RESULTS, begin_manifest, choose_folder
from harness.run.shards import LoadTally, find_hopeless, note_missed_arrivals
from harness.store.manifest import Manifest, status_after
from harness.store.output import why_no_room
from harness.store.run_folder import RunFolder
from harness.workload.plan import read_plan

REPORT_S = 120.0
BUG = 1  # the exit code of a process
# Errors of the disk or its folders, not of walkaway.
OF_THE_DISK = NO_ROOM | {
    *(errno.EROFS, errno.EIO, errno.ENOENT, errno.EACCES, errno.EPERM, errno.ESTALE),
    errno.ENAMETOOLONG,
}


class ReportProcess:
    """The dashboards' process, which draws the report of a run.

    It may be started early, as plotly takes a second to import.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._child: Child | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child is not None:
            self._child.stop()

    def prepare(self) -> Child:
        if self._child is None:
            command = python_module("dashboards", "-")
            self._child = Child("report", command, self._folder.log("report"), quit_s=0)
        return self._child

    def draw(self) -> Path | None:
        """The report's file; None after a bug, of which its log has the traceback. Raises
        TargetError, with the reason, if it could not be drawn otherwise."""
        child, file = self.prepare(), self._folder.report
        child.say(msgspec.json.encode(["report", str(self._folder.path), "-o", str(file)]))
        code = child.wait(REPORT_S)
        if code in (0, BUG):
            return file if code == 0 else None
        said = child.lines()[-1:] or [why_no_room(self._folder.path) or "it does not say why"]
        why = f"it took longer than {REPORT_S:g} s" if code is None else said[0]
        raise TargetError(
            f"the report could not be drawn: {why.removeprefix('error: ')}; the run is whole, and "
            f"walkaway report {self._folder.path} draws it again"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """Where a run lies and how it ended.

    `summary` is None for a run that ended before its load began, `report` also if it could not be
    drawn.
    """

    folder: RunFolder
    summary: Summary | ArmsSummary | None
    failure: WalkawayError | None
    report: Path | None = None


def execute(
    resolved: ResolvedRun,
    /,
    *,
    progress: Progress,
    interruption: Interruption,
    load: LoadRunner | None = None,
    repeat: Callable[[], str] | None = None,
    draws: bool = True,
) -> FinishedRun:
    """Do one run, up to its report.

    `load` makes the requests (default: a load process). `repeat` gives the shell line that repeats
    the run, and is called at its start and at its end. Raises ConfigError if nothing was measured,
    and TargetError if no server was reached. Any other exception is a bug: its traceback is saved
    in the run's folder.
    """
    check_streams(resolved.workload.streams_of_each_process)
    folder = RunFolder.create(choose_folder(resolved))
    manifest = begin_manifest(resolved, run_id=folder.name)
    run = Measurement(
        resolved=resolved,
        folder=folder,
        manifest=manifest,
        progress=progress,
        interruption=interruption,
        load=load or LoadProcess(),
    )
    if repeat is not None:
        manifest.repeat = repeat()
    try:
        folder.write_manifest(manifest)
        with ExitStack() as children:
            report = children.enter_context(ReportProcess(folder)) if draws else None
            failure = measure_all(run, children, report)
            is_unreached = isinstance(failure, TargetError) and not folder.log("engine").exists()
            if failure is not None and is_unreached and discard_if_empty(folder, manifest):
                raise failure
            if repeat is not None:
                manifest.repeat = repeat()
            return conclude(run, failure, report)
    except ConfigError as error:
        if discard_if_empty(folder, manifest):
            raise
        raise ConfigError(f"{error}\nwhat was collected is in {folder.path}") from error
    except TargetError:
        raise
    except KeyboardInterrupt as error:
        raise InterruptedRunError(f"interrupted; what was saved is in {folder.path}") from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno in OF_THE_DISK:
            raise StorageError(why_not_saved(error.errno, folder)) from error
        with suppress(OSError):
            folder.traceback.write_text(traceback.format_exc())
            error.add_note(f"the traceback is in {folder.traceback}")
        raise
    finally:
        progress.close()


def why_not_saved(number: int, folder: RunFolder) -> str:
    remedy = "; make room" if number in NO_ROOM else ""
    why = (
        f"the run could not be saved: {os.strerror(number)}{remedy}. All that was written so far "
        f"is in {folder.path}"
    )
    if any(folder.shards.glob("process-*")):
        return f"{why}: `walkaway collect {folder.shards} --out NEW_FOLDER` makes a run of it"
    if folder.may_have_requests():
        return f"{why}: `walkaway report {folder.path}` judges it"
    return why


def discard_if_empty(folder: RunFolder, manifest: Manifest) -> bool:
    if manifest.window.load_started_ns is not None:
        return False
    shutil.rmtree(folder.path)
    if folder.path.parent == RESULTS:
        with suppress(OSError):  # it holds other runs
            RESULTS.rmdir()
    return True


def measure_all(
    run: Measurement, children: ExitStack, report: ReportProcess | None
) -> WalkawayError | None:
    """Measure the load and the probe phase, if any. Returns a failure.

    The report's process is started after the last load, as its imports would disturb a load.
    """

    def prepare() -> None:
        if report is not None:
            report.prepare()

    try:
        if run.resolved.probe_phase is None:
            return measure(run, children, when_loaded=prepare)
        if (failure := measure(run, children)) is not None:
            return failure
        return _measure_probes(run, children, when_loaded=prepare)
    finally:
        if run.server is not None and run.server.engine is not None:
            run.server.engine.ask_to_quit()  # it ends while the run is judged


def _measure_probes(
    run: Measurement, children: ExitStack, *, when_loaded: Callable[[], None]
) -> WalkawayError | None:
    """A server whose slots cannot be found, or that answers nobody after the load, has no probe
    phase, and the run says so."""
    if run.manifest.probing is not None and run.manifest.probing.is_silent:
        _leave_out(run, "the server answered no request after the load", when_loaded)
        return None
    probes = run.probe_phase(LoadProcess())
    try:
        failure: WalkawayError | None = measure(probes, children, when_loaded=when_loaded)
    except ConfigError as error:
        failure = error
    if isinstance(failure, ConfigError | UncountedSlotsError):
        _leave_out(run, str(failure), when_loaded)
        return None
    probes.manifest.status = status_after(failure)
    probes.folder.write_manifest(probes.manifest)
    return failure and type(failure)(f"probe phase: {failure}")


def _leave_out(run: Measurement, why: str, when_loaded: Callable[[], None]) -> None:
    when_loaded()
    shutil.rmtree(run.folder.probe_phase.path, ignore_errors=True)
    run.notes.warn(f"{PROBES_LEFT_OUT}: {why}")
    run.manifest.warnings = run.notes.warnings()


def measure(
    run: Measurement, children: ExitStack, *, when_loaded: Callable[[], None] = lambda: None
) -> WalkawayError | None:
    failure: WalkawayError | None = None
    try:
        run.take(children, when_loaded=when_loaded)
    except (TargetError, InterruptedRunError) as error:
        failure = error
    finally:
        if run.manifest.window.load_started_ns is not None:
            run.progress.phase("writing what was collected")
        tally = save(run)
    return failure or find_hopeless(tally, run.manifest.load_processes)


def save(run: Measurement) -> LoadTally:
    folder, manifest = run.folder, run.manifest
    tally = LoadTally(folder.shards)
    folder.write_rows(replace(run.rows(), requests=tally.requests(), client=tally.samples()))
    manifest.load_processes = tally.processes()
    if tally.first_sent_ns is not None:  # excludes the start and the end of the processes
        manifest.window.load_started_ns = tally.first_sent_ns
        manifest.window.load_ended_ns = tally.last_ended_ns
    if tally.damaged:
        run.notes.warn(f"{tally.damaged} rows of the load were damaged and are left out")
    if manifest.arrivals is not None:
        problem = note_missed_arrivals(manifest, folder, read_plan(folder.load_plan))
        if problem is not None:
            run.notes.warn(problem)
    manifest.notes = run.notes.texts()
    manifest.warnings = run.notes.warnings()
    folder.write_manifest(manifest)
    folder.remove_shards()
    return tally


def conclude(
    run: Measurement, failure: WalkawayError | None, report: ReportProcess | None
) -> FinishedRun:
    folder = run.folder
    run.manifest.status = status_after(failure)
    folder.write_manifest(run.manifest)
    if run.manifest.window.load_started_ns is None:
        return FinishedRun(folder=folder, summary=None, failure=failure)
    summary = write_summary(folder)
    if failure is None and summary.plan_failed is not None:
        failure = PlanError(summary.plan_failed)
    if report is not None:
        run.progress.phase("drawing the report")
    return finish(folder, summary, failure, report)


def finish(
    folder: RunFolder,
    summary: Summary | ArmsSummary,
    failure: WalkawayError | None,
    report: ReportProcess | None,
) -> FinishedRun:
    """Draw the report, if there is to be one. A run without its report has failed."""
    drawn = None
    try:
        drawn = None if report is None else report.draw()
    except TargetError as error:
        failure = failure or error
    return FinishedRun(folder=folder, summary=summary, failure=failure, report=drawn)


def write_summary(folder: RunFolder) -> Summary:
    from harness.analysis.summary import summarise

    return folder.write_summary(summarise(folder.frames()))


def draw_report(folder: RunFolder) -> Path:
    """Raises TargetError, and RuntimeError after a bug."""
    with ReportProcess(folder) as report:
        if (drawn := report.draw()) is None:
            raise RuntimeError(f"the report could not be drawn, see {folder.log('report')}")
        return drawn
