"""All cells of a simulation: one after another here, or over processes; `ray_cluster` has a third
way.

`run_cell` depends on nothing around it, so a cell's rows are equal byte by byte wherever it runs.
To stop, ask: each cell looks now and then whether it is to continue. If not, it ends there and
closes its files; a cell that has not begun leaves nothing.
"""

import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event as ProcessEvent
from pathlib import Path
from queue import Empty
from threading import Event
from time import monotonic
from typing import Final

from harness.errors import TargetError
from harness.simulate.cell import Cell
from harness.simulate.plan import read_plan
from harness.simulate.progress import Board, Reached, reached
from harness.simulate.rows import CellFacts, CellFiles

LOOKS_EVERY_S: Final = 0.2

ReportReached = Callable[[Reached], bool]  # returns whether to continue


class _Stopped(Exception):  # noqa: N818
    """A cell has been asked to end."""


def cell_folder(folder: Path, number: int) -> Path:
    return folder / f"cell-{number}"


def run_cell(folder: Path, number: int, report: ReportReached) -> CellFacts:
    """Reads the plan in the folder, and writes the cell's rows next to it. Raises ConfigError."""
    plan = read_plan(folder)
    files = CellFiles(cell_folder(folder, number), keeps_tokens=plan.cluster.keep == "rows")
    try:
        return _run(Cell(plan, number, files), report)
    except Exception:
        files.discard()
        raise


def _run(cell: Cell, report: ReportReached) -> CellFacts:
    def look(_: int, facts: CellFacts) -> None:
        if not report(reached(facts)):
            raise _Stopped

    try:
        cell.run(look)
    except _Stopped:
        return cell.cut_short()
    return cell.facts(is_complete=True)


def here(folder: Path, cells: Sequence[int], board: Board, stop: Event) -> list[CellFacts]:
    def report(one: Reached) -> bool:
        board.take(one)
        return not stop.is_set()

    finished = []
    for number in cells:
        if stop.is_set():
            break
        finished.append(run_cell(folder, number, report))
        board.done(finished[-1])
    return finished


def over_processes(
    folder: Path, cells: Sequence[int], board: Board, stop: Event, *, processes: int
) -> list[CellFacts]:
    """Raises TargetError if one of the processes is killed."""
    context = multiprocessing.get_context("spawn")
    reports: Queue[Reached] = context.Queue()
    halt = context.Event()
    with ProcessPoolExecutor(
        processes, context, initializer=_Process.begin, initargs=(reports, halt)
    ) as pool:
        futures = [pool.submit(_Process.run_cell, folder, number) for number in cells]
        try:
            return gathered(futures, board, stop, lambda: _all_of(reports), halt.set)
        except BrokenProcessPool as error:
            raise TargetError(
                "a process of the simulation was killed; if memory ran out, take fewer processes "
                "or keep = thin"
            ) from error


def gathered(
    futures: Sequence[Future[CellFacts]],
    board: Board,
    stop: Event,
    new_reports: Callable[[], Iterable[Reached]],
    halt: Callable[[], None],
) -> list[CellFacts]:
    """The facts of the cells. If one fails, the others are halted, and its error is raised."""
    waiting = set(futures)
    is_halted = False
    while waiting:
        wait(waiting, timeout=LOOKS_EVERY_S)
        for seen in new_reports():
            board.take(seen)
        done = {one for one in waiting if one.done() and not one.cancelled()}
        has_failed = any(one.exception() for one in done)
        for one in done:
            if not one.exception():
                board.done(one.result())
        if (stop.is_set() or has_failed) and not is_halted:
            is_halted = True
            halt()
            for one in waiting:
                one.cancel()
        waiting = {one for one in waiting - done if not one.cancelled()}
    return [one.result() for one in futures if not one.cancelled()]


class _Process:
    """The state of a process of the pool."""

    reports: "Queue[Reached]"
    halt: ProcessEvent

    @classmethod
    def begin(cls, reports: "Queue[Reached]", halt: ProcessEvent) -> None:
        gc.freeze()  # as in __main__
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and asks to stop
        cls.reports, cls.halt = reports, halt
        threading.Thread(target=cls._end_with_parent, daemon=True).start()

    @staticmethod
    def _end_with_parent() -> None:
        """A process of a pool whose parent was killed waits for work that never comes."""
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    @classmethod
    def run_cell(cls, folder: Path, number: int) -> CellFacts:
        return run_cell(folder, number, rarely(cls._report, monotonic))

    @classmethod
    def _report(cls, one: Reached) -> bool:
        cls.reports.put(one)
        return not cls.halt.is_set()


def rarely(report: ReportReached, clock_s: Callable[[], float]) -> ReportReached:
    """Passes a report on after each LOOKS_EVERY_S; in between the answer is to continue."""
    next_s = clock_s()

    def report_rarely(one: Reached) -> bool:
        nonlocal next_s
        now_s = clock_s()
        if now_s < next_s:
            return True
        next_s = now_s + LOOKS_EVERY_S
        return report(one)

    return report_rarely


def _all_of(reports: "Queue[Reached]") -> Iterable[Reached]:
    try:
        while True:
            yield reports.get_nowait()
    except Empty:
        return
