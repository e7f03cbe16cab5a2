"""Cells over a Ray cluster, whose nodes have the packages that walkaway needs, and no common disk.

A task gets these packages, the plan and its trace, and sends its cell's files back in pieces.
"""

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from time import monotonic
from typing import Any, Final

import msgspec

import harness
import reference_engine
from harness.errors import ConfigError, TargetError, WalkawayError, in_words
from harness.simulate.cluster import cell_folder, gathered, rarely, run_cell
from harness.simulate.memory import check_memory
from harness.simulate.plan import Plan, read_plan
from harness.simulate.progress import Board, Reached
from harness.simulate.rows import FACTS, CellFacts
from harness.workload.arrivals import TraceArrivals

PIECE_BYTES: Final = 16 * 1024 * 1024
CONNECT_S: Final = 5.0


class _Desk:
    """An actor: cells report to it how far they are, and its answer says whether to continue."""

    def __init__(self) -> None:
        self._reports: list[Reached] = []
        self._is_halted = False

    def report(self, one: Reached) -> bool:
        self._reports.append(one)
        return not self._is_halted

    def take(self) -> list[Reached]:
        reports, self._reports = self._reports, []
        return reports

    def halt(self) -> None:
        self._is_halted = True


def over_ray(
    folder: Path,
    cells: Sequence[int],
    board: Board,
    stop: Event,
    *,
    address: str,
    needed_bytes: int,
) -> list[CellFacts]:
    """Raises TargetError if the cluster cannot be reached, and ConfigError without Ray, or if no
    node has the memory that a cell needs. Ray starts a cell where that much is free."""
    ray = _connected(address)
    try:
        nodes = (one["Resources"].get("memory", 0) for one in ray.nodes() if one["Alive"])
        check_memory(needed_bytes, 1, available=int(max(nodes, default=0)))
        desk = ray.remote(num_cpus=0)(_Desk).remote()
        task = ray.remote(num_cpus=1, max_retries=0, num_returns="streaming")(_files_of)

        plan = read_plan(folder)
        plan_and_trace = ray.put((plan.model_dump_json(), _trace_of(plan)))

        def fetch(number: int) -> CellFacts:
            pieces = task.options(memory=needed_bytes).remote(plan_and_trace, number, desk)
            return _keep(cell_folder(folder, number), map(ray.get, pieces))

        num_cpus = int(ray.cluster_resources().get("CPU", 1))
        with ThreadPoolExecutor(max(1, min(num_cpus, len(cells)))) as pool:
            futures = [pool.submit(fetch, number) for number in cells]
            return gathered(
                futures,
                board,
                stop,
                lambda: ray.get(desk.take.remote()),
                lambda: ray.get(desk.halt.remote()),
            )
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, WalkawayError):
            raise error.cause from error
        raise TargetError(f"a task of the Ray cluster {address} failed: {error}") from error
    except ray.exceptions.RayError as error:
        raise TargetError(f"a task of the Ray cluster {address} failed: {error}") from error
    finally:
        ray.shutdown()


def _connected(address: str) -> Any:
    place: dict[str, Any] = {}
    if address == "local":  # its servers then listen on the loopback interface alone
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        place["_node_ip_address"] = "127.0.0.1"
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "--ray needs Ray, which is not installed: pip install 'walkaway[scale]'"
        ) from error
    try:
        _check_reachable(address)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would report to its makers
        packages = [str(Path(str(one.__file__)).parent) for one in (harness, reference_engine)]
        ray.init(
            address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"py_modules": packages},
            **place,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise TargetError(
            f"the Ray cluster {address} cannot be reached ({in_words(error)}); is `ray start "
            "--head` running there, and does RAY_AUTH_TOKEN hold its token, if it has one?"
        ) from error
    return ray


def _check_reachable(address: str) -> None:
    """Ray itself would try for a long time."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), CONNECT_S).close()


def _trace_of(plan: Plan) -> bytes | None:
    """Another node does not have the file."""
    arrivals = plan.arrivals
    return Path(arrivals.file).read_bytes() if isinstance(arrivals, TraceArrivals) else None


def _written(folder: Path, plan_and_trace: tuple[str, bytes | None]) -> None:
    plan, trace = Plan.model_validate_json(plan_and_trace[0]), plan_and_trace[1]
    if trace is not None:
        file = folder / "trace"
        file.write_bytes(trace)
        workload = plan.workload
        arrivals = workload.arrivals.model_copy(update={"file": str(file)})
        workload = workload.model_copy(update={"arrivals": arrivals})
        plan = plan.model_copy(update={"workload": workload})
    plan.write(folder)


def _files_of(
    plan_and_trace: tuple[str, bytes | None], number: int, desk: Any
) -> Iterator[tuple[str, bytes]]:
    """The cell's files in pieces, the facts last; called on a node of the cluster."""
    import ray

    def report(one: Reached) -> bool:
        continues: bool = ray.get(desk.report.remote(one))
        return continues

    with TemporaryDirectory(prefix="walkaway-") as name:
        folder = Path(name)
        _written(folder, plan_and_trace)
        run_cell(folder, number, rarely(report, monotonic))
        files = sorted(cell_folder(folder, number).iterdir(), key=lambda path: path.name == FACTS)
        for path in files:
            with path.open("rb") as file:
                while piece := file.read(PIECE_BYTES):
                    yield path.name, piece


def _keep(folder: Path, pieces: Iterator[tuple[str, bytes]]) -> CellFacts:
    """Each file has its name only when all have come."""
    names = []
    for name, piece in pieces:
        folder.mkdir(exist_ok=True)
        if name not in names:
            names.append(name)
        with (folder / f"{name}.part").open("ab") as file:
            file.write(piece)
    for name in names:
        (folder / f"{name}.part").replace(folder / name)
    return msgspec.json.decode((folder / FACTS).read_bytes(), type=CellFacts)
