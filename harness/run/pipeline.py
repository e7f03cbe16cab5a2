"""One run, from its configuration to its report.

The measurement may end early, by a dead server or a user's interruption. All collected rows are
written in any case, and a run with any load is judged like any other; `FinishedRun.failure` says
how it ended.
"""

import errno
import os
import secrets
import shutil
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import msgspec

from harness.errors import ConfigError, InterruptedRunError, TargetError, WalkawayError
from harness.load.fd_limit import check_streams
from harness.records import ArmsSummary, Summary
from harness.run.load_process import LoadProcess
from harness.run.measurement import Load, Measurement
from harness.run.process import Child, python_module
from harness.run.progress import Interruption, Progress
from harness.run.run_config import ResolvedRun, repeat_command
from harness.run.settle import settle_seconds
from harness.run.shards import LoadTally, Sent, find_hopeless, find_unsent
from harness.store.manifest import Manifest, find_hardware, find_versions, status_after, utc_now
from harness.store.run_folder import RunFolder, name_run
from harness.workload.plan import read_plan
from harness.workload.workload import as_plain_data

RESULTS = Path("results")
REPORT_S = 120.0
NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


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

    def prepare(self) -> None:
        """Start the process; it waits for its command."""
        command = python_module("dashboards", "-")
        self._child = Child("report", command, self._folder.log("report"), quit_s=0)

    def draw(self) -> Path | None:
        """The report's file; None if it could not be drawn (its log says why)."""
        if self._child is None:
            self.prepare()
        assert self._child is not None
        file = self._folder.report
        self._child.say(msgspec.json.encode(["report", str(self._folder.path), "-o", str(file)]))
        return file if self._child.wait(REPORT_S) == 0 else None


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
    *,
    progress: Progress,
    interruption: Interruption,
    load: Load | None = None,
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
    if repeat is not None:
        manifest.repeat = repeat()
    try:
        folder.write_manifest(manifest)
        with ExitStack() as children:
            run = Measurement(
                resolved, folder, manifest, progress, interruption, load=load or LoadProcess()
            )
            report = children.enter_context(ReportProcess(folder)) if draws else None
            failure = measure_all(run, folder, children, report)
            if isinstance(failure, TargetError) and discard_if_unreached(folder, manifest):
                raise failure
            if repeat is not None:
                manifest.repeat = repeat()
            return conclude(run, folder, failure, report)
    except ConfigError as error:
        if discard_if_empty(folder, manifest):
            raise
        raise ConfigError(f"{error}\nwhat was collected is in {folder.path}") from error
    except TargetError:
        raise
    except KeyboardInterrupt as error:
        raise InterruptedRunError(f"interrupted; what was saved is in {folder.path}") from error
    except Exception as error:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            raise TargetError(why_not_saved(error.errno, folder)) from error
        folder.traceback.write_text(traceback.format_exc())
        error.add_note(f"the traceback is in {folder.traceback}")
        raise
    finally:
        progress.close()


def why_not_saved(number: int, folder: RunFolder) -> str:
    why = (
        f"the run could not be saved: {os.strerror(number)}; make room. What was written so "
        f"far is in {folder.path}"
    )
    if not any(folder.shards.glob("process-*")):
        return why
    return f"{why}: `walkaway collect {folder.shards} --out NEW_FOLDER` makes a run of it"


def choose_folder(resolved: ResolvedRun) -> Path:
    run_id = name_run(utc_now(), resolved.workload.name, secrets.token_hex(2))
    return resolved.config.out or RESULTS / run_id


def discard_if_empty(folder: RunFolder, manifest: Manifest) -> bool:
    """Remove the folder of a run without a load: it was new or empty before."""
    if manifest.window.load_started_ns is not None:
        return False
    shutil.rmtree(folder.path)
    return True


def discard_if_unreached(folder: RunFolder, manifest: Manifest) -> bool:
    """Remove the folder if no server was reached, unless it holds the bundled engine's log."""
    return not folder.log("engine").exists() and discard_if_empty(folder, manifest)


def begin_manifest(resolved: ResolvedRun, *, run_id: str) -> Manifest:
    return Manifest(
        run_id=run_id,
        created_at=utc_now().isoformat(timespec="seconds"),
        command=resolved.config.command,
        repeat=repeat_command(resolved.config.command, seed=resolved.workload.run.seed),
        seed=resolved.workload.run.seed,
        versions=find_versions(),
        hardware=find_hardware([]),
        workload=as_plain_data(resolved.workload),
        settle_s=settle_seconds(resolved.target, resolved.workload.settle, None),
        scrape_interval_s=resolved.scrape_interval_s,
    )


def measure_all(
    run: Measurement, folder: RunFolder, children: ExitStack, report: ReportProcess | None
) -> WalkawayError | None:
    """Measure the load and the probe phase, if any. Returns a failure.

    The report's process is started after the last load, as its imports would disturb a load.
    """
    prepare = (lambda: None) if report is None else report.prepare
    try:
        if run.resolved.probe_phase is None:
            return measure(run, folder, children, when_loaded=prepare)
        failure = measure(run, folder, children)
        return failure or measure_probes(run, folder, children, when_loaded=prepare)
    finally:
        if run.server is not None and run.server.engine is not None:
            run.server.engine.ask_to_quit()  # it ends while the run is judged


def measure_probes(
    run: Measurement, folder: RunFolder, children: ExitStack, *, when_loaded: Callable[[], None]
) -> WalkawayError | None:
    """Probe the server that `run` has loaded; the rows go to a folder inside the run's."""
    resolved, probes = run.resolved.probe_phase, RunFolder.create(folder.probe_phase.path)
    assert resolved is not None
    manifest = begin_manifest(resolved, run_id=f"{folder.name}-probe")
    phase = run.follow_with(resolved, probes, manifest, LoadProcess())
    failure = measure(phase, probes, children, when_loaded=when_loaded)
    manifest.status = status_after(failure)
    probes.write_manifest(manifest)
    return failure and type(failure)(f"probe phase: {failure}")


def measure(
    run: Measurement,
    folder: RunFolder,
    children: ExitStack,
    *,
    when_loaded: Callable[[], None] = lambda: None,
) -> WalkawayError | None:
    """Measure, and save all rows in any case. Returns a failure."""
    failure: WalkawayError | None = None
    try:
        run.take(children, when_loaded=when_loaded)
    except (TargetError, InterruptedRunError) as error:
        failure = error
    finally:
        run.progress.phase("writing what was collected")
        tally = save(run, folder)
    manifest = run.manifest
    hopeless = find_hopeless(
        tally.outcomes,
        tally.first_error,
        manifest.load_processes,
        tokens_read=tally.tokens_read,
    )
    return failure or hopeless or find_void(manifest)


def find_void(manifest: Manifest) -> TargetError | None:
    from harness.analysis.recovery import all_are_void

    if not all_are_void(msgspec.to_builtins(manifest)):
        return None
    first = manifest.void_trials[0]
    return TargetError(f"every trial is void; the first, arm {first.arm}: {first.why}")


def save(measurement: Measurement, folder: RunFolder) -> LoadTally:
    tally, manifest = LoadTally(folder.shards), measurement.manifest
    rows = measurement.rows()
    folder.write_rows(replace(rows, requests=tally.requests(), client=tally.samples()))
    manifest.load_processes = tally.processes()
    manifest.void_trials = tally.void_trials()
    if tally.first_sent_ns is not None:  # excludes the start and the end of the processes
        manifest.window.load_started_ns = tally.first_sent_ns
        manifest.window.load_ended_ns = tally.last_ended_ns
    if tally.damaged:
        measurement.notes.warn(f"{tally.damaged} rows of the load were damaged and are left out")
    note_unsent(measurement, folder)
    manifest.notes = measurement.notes.texts()
    manifest.warnings = measurement.notes.warnings()
    folder.write_manifest(manifest)
    folder.remove_shards()
    return tally


def note_unsent(measurement: Measurement, folder: RunFolder) -> None:
    """Note the unsent requests of an open loop, which have no rows."""
    manifest = measurement.manifest
    if manifest.arrivals is None:
        return
    try:
        sent = [Sent(*row) for row in folder.read_sent()]
        if len(sent) < manifest.arrivals.planned:
            manifest.arrivals.unsent = find_unsent(read_plan(folder.load_plan), manifest, sent)
    except ConfigError as error:
        measurement.notes.warn(f"unsent requests are in no figure: {error}")


def conclude(
    run: Measurement, folder: RunFolder, failure: WalkawayError | None, report: ReportProcess | None
) -> FinishedRun:
    manifest = run.manifest
    manifest.status = status_after(failure)
    folder.write_manifest(manifest)
    if manifest.window.load_started_ns is None:
        return FinishedRun(folder=folder, summary=None, failure=failure)
    summary = write_summary(folder)
    drawn = None
    if report is not None:
        run.progress.phase("drawing the report")
        drawn = report.draw()
    return FinishedRun(folder=folder, summary=summary, failure=failure, report=drawn)


def write_summary(folder: RunFolder) -> Summary:
    """Compute `summary.json` from the saved rows. Raises ConfigError without them."""
    from harness.analysis.summary import summarise

    summary = summarise(folder.frames())
    folder.write_summary(summary)
    return summary


def draw_report(folder: RunFolder) -> Path | None:
    with ReportProcess(folder) as report:
        return report.draw()
