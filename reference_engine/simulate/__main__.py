"""`python -m reference_engine.simulate FOLDER`: carries out the folder's plan, in virtual time.

Progress goes to standard output, a line of JSON each (`progress.Line`); the rows of cell k to
FOLDER/cell-k. Ctrl-C ends it early: what was simulated so far is kept, and `cell.json` says how far
that is. A second one ends it at once.
"""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from time import monotonic
from types import FrameType

import msgspec

from reference_engine.serve.settings import ServeSettings
from reference_engine.simulate.cluster import SimulationError, here, over_processes
from reference_engine.simulate.memory import available_bytes, check_memory, needed_bytes
from reference_engine.simulate.plan import (
    PLAN_ERRORS,
    SIMULATION,
    PlanError,
    Simulation,
    engine_settings,
    read_simulation,
)
from reference_engine.simulate.progress import Board
from reference_engine.simulate.ray_cluster import RayMissingError, over_ray
from reference_engine.simulate.rows import CellFacts

_Run = Callable[[Path, Sequence[int], Board, Event], list[CellFacts]]


def main() -> int:
    args = _parser().parse_args()
    stop = Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stopper(stop))
    if args.exit_with_stdin:
        threading.Thread(target=_exit_with_stdin, daemon=True).start()
    try:
        return simulate(args, stop)
    except (*PLAN_ERRORS, RayMissingError) as error:
        return _say(error, 2)
    except SimulationError as error:
        return _say(error, 5)
    except OSError as error:
        return _say(f"{args.folder}: the rows could not be written: {error.strerror}", 5)
    except KeyboardInterrupt:
        return 130


def simulate(args: argparse.Namespace, stop: Event) -> int:
    folder: Path = args.folder
    plan = read_simulation(folder)
    settings = engine_settings(plan, os.environ)
    if any(folder.glob("cell-*")):
        raise PlanError(f"{folder} has the rows of an earlier simulation: take another folder")
    cells = range(len(plan.cells))
    needed = needed_bytes(folder, plan, settings.config)
    if args.ray is None:
        check_memory(needed, args.processes, available_bytes())
    _write_engine(folder, plan, settings)
    board = _board(plan)
    facts = _way(args, needed)(folder, cells, board, stop)
    board.show()
    is_whole = len(facts) == len(cells) and all(one.complete for one in facts)
    return 0 if is_whole else 130


def _write_engine(folder: Path, plan: Simulation, settings: ServeSettings) -> None:
    """`engine.json`: what a live engine says at /walkaway/config, as far as there is one here."""
    config = msgspec.to_builtins(settings.config)
    config["faults"] = msgspec.to_builtins(settings.faults)
    config["frontend"] = settings.frontend.shown()
    config["bytes_are_tokens"] = True
    if plan.texts:
        config["teacher"] = SIMULATION
    (folder / "engine.json").write_bytes(msgspec.json.encode(config))


def _way(args: argparse.Namespace, needed: Sequence[int]) -> _Run:
    processes = min(args.processes, len(needed))
    if args.ray is not None:
        return lambda *all_of_it: over_ray(*all_of_it, address=args.ray, needed_bytes=needed)
    if processes == 1:
        return here
    return lambda *all_of_it: over_processes(*all_of_it, processes=processes)


def _board(plan: Simulation) -> Board:
    def write(line: str) -> None:
        sys.stdout.write(line)
        sys.stdout.flush()

    return Board(len(plan.cells), plan.load_s + plan.settle_s, write=write, clock_s=monotonic)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m reference_engine.simulate",
        description="Carries out the plan in a folder, in virtual time.",
    )
    parser.add_argument("folder", type=Path, help="has simulation.json and planned.parquet")
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
