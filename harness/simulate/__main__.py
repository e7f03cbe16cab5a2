"""`python -m harness.simulate FOLDER`: carries out the folder's plan, in virtual time.

Progress goes to standard output, a line of JSON each (`progress.ProgressLine`); the rows of cell k
to FOLDER/cell-k. Ctrl-C ends it early: what was simulated so far is kept, and `cell.json` says how
far that is. A second one ends it at once.
"""

import argparse
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from time import monotonic
from types import FrameType

from harness.errors import ConfigError, StorageError, WalkawayError, in_words
from harness.simulate.cluster import here, over_processes
from harness.simulate.memory import available_bytes, cell_bytes, check_memory
from harness.simulate.plan import Plan, read_plan
from harness.simulate.progress import Board
from harness.simulate.ray_cluster import over_ray
from harness.simulate.rows import CellFacts

_Run = Callable[[Path, Sequence[int], Board, Event], list[CellFacts]]


def main() -> int:
    args = _parser().parse_args()
    gc.freeze()  # else each full collection walks through all that was imported
    stop = Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stopper(stop))
    if args.exit_with_stdin:
        threading.Thread(target=_exit_with_stdin, daemon=True).start()
    try:
        return simulate(args, stop)
    except WalkawayError as error:
        return _say(error, error.exit_code)
    except OSError as error:
        why = f"{args.folder}: the rows could not be written: {in_words(error)}"
        return _say(why, StorageError.exit_code)
    except KeyboardInterrupt:
        return 130


def simulate(args: argparse.Namespace, stop: Event) -> int:
    folder: Path = args.folder
    plan = read_plan(folder)
    if any(folder.glob("cell-*")):
        raise ConfigError(f"{folder} has the rows of an earlier simulation: take another folder")
    cells, needed = range(plan.num_cells), cell_bytes(plan)
    processes = min(args.processes, len(cells))
    if args.ray is None:
        check_memory(needed, processes, available_bytes())
    board = _board(plan)
    facts = _way(args.ray, processes, needed)(folder, cells, board, stop)
    board.show()
    is_whole = len(facts) == len(cells) and all(one.complete for one in facts)
    return 0 if is_whole else 130


def _way(ray: str | None, processes: int, needed: int) -> _Run:
    if ray is not None:
        return lambda *all_of_it: over_ray(*all_of_it, address=ray, needed_bytes=needed)
    if processes == 1:
        return here
    return lambda *all_of_it: over_processes(*all_of_it, processes=processes)


def _board(plan: Plan) -> Board:
    def write(line: str) -> None:
        sys.stdout.write(line)
        sys.stdout.flush()

    return Board(plan.num_cells, plan.load_s + plan.settle_s, write=write, clock_s=monotonic)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m harness.simulate",
        description="Carries out the plan in a folder, in virtual time.",
    )
    parser.add_argument("folder", type=Path, help="has simulation.json")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--processes", type=_processes, default=1, metavar="N", help="at most one a cell"
    )
    where.add_argument("--ray", metavar="ADDRESS", help="a Ray cluster; local: start one here")
    parser.add_argument(
        "--exit-with-stdin", action="store_true", help="end at once when standard input ends"
    )
    return parser


def _exit_with_stdin() -> None:
    """The other processes of the simulation see it go, and end too."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(130)


def _processes(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise argparse.ArgumentTypeError(f"a number from 1 to 1024, not {text!r}")
    return int(text)


def _stopper(stop: Event) -> Callable[[int, FrameType | None], None]:
    def ask(number: int, _: FrameType | None) -> None:
        stop.set()
        signal.signal(number, signal.default_int_handler)

    return ask


def _say(error: object, code: int) -> int:
    print(f"walkaway simulate: {error}", file=sys.stderr)  # noqa: T201
    return code


if __name__ == "__main__":
    sys.exit(main())
