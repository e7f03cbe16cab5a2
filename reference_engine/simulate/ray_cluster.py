"""Cells over a Ray cluster, whose nodes have the packages that walkaway needs, and no common disk.

A task gets this package, the plan and its cell's planned rows, and sends its files back in pieces.
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
import pyarrow as pa
import pyarrow.parquet as pq

import reference_engine
from reference_engine.simulate.cluster import (
    SimulationError,
    cell_folder,
    gathered,
    rarely,
    run_cell,
)
from reference_engine.simulate.memory import check_fits
from reference_engine.simulate.plan import PLAN_ERRORS, PLANNED, SIMULATION
from reference_engine.simulate.progress import Board, Reached
from reference_engine.simulate.rows import FACTS, CellFacts

PIECE_BYTES: Final = 16 * 1024 * 1024
CONNECT_S: Final = 5.0


class RayMissingError(Exception):
    """Ray is not installed."""


class _Desk:
    """An actor: cells tell it how far they are, and hear from it whether to go on."""

    def __init__(self) -> None:
        self._told: list[Reached] = []
        self._is_halted = False

    def tell(self, one: Reached) -> bool:
        self._told.append(one)
        return not self._is_halted

    def take(self) -> list[Reached]:
        told, self._told = self._told, []
        return told

    def halt(self) -> None:
        self._is_halted = True


def over_ray(
    folder: Path,
    cells: Sequence[int],
    board: Board,
    stop: Event,
    *,
    address: str,
    needed_bytes: Sequence[int],
) -> list[CellFacts]:
    """Raises RayMissingError, SimulationError if the cluster cannot be reached, and PlanError if no
    node has the memory that a cell needs. Ray starts a cell where so much is free."""
    ray = _connected(address)
    try:
        nodes = (one["Resources"].get("memory", 0) for one in ray.nodes() if one["Alive"])
        check_fits(max(needed_bytes), available=int(max(nodes, default=0)))
        desk = ray.remote(num_cpus=0)(_Desk).remote()
        task = ray.remote(num_cpus=1, max_retries=0, num_returns="streaming")(_files_of)

        def fetch(number: int) -> CellFacts:
            rows = _planned_of(folder, number)
            on_it = task.options(memory=needed_bytes[number])
            pieces = on_it.remote((folder / SIMULATION).read_bytes(), rows, number, desk)
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
        if isinstance(error.cause, PLAN_ERRORS):
            raise error.cause from error
        raise SimulationError(f"a task of the Ray cluster {address} failed: {error}") from error
    except ray.exceptions.RayError as error:
        raise SimulationError(f"a task of the Ray cluster {address} failed: {error}") from error
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
        raise RayMissingError(
            "--ray needs Ray, which is not installed: pip install 'walkaway[scale]'"
        ) from error
    try:
        _check_reachable(address)
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would report to its makers
        package = str(Path(reference_engine.__file__).parent)
        ray.init(
            address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"py_modules": [package]},
            **place,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise SimulationError(
            f"the Ray cluster {address} cannot be reached ({error}); is `ray start --head` running "
            "there, and does RAY_AUTH_TOKEN hold its token, if it has one?"
        ) from error
    return ray


def _check_reachable(address: str) -> None:
    """Ray itself would try for a long time."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), CONNECT_S).close()


def _planned_of(folder: Path, number: int) -> bytes:
    table = pq.read_table(folder / PLANNED, filters=[("cell", "=", number)])
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer)
    planned: bytes = buffer.getvalue().to_pybytes()
    return planned


def _files_of(plan: bytes, planned: bytes, number: int, desk: Any) -> Iterator[tuple[str, bytes]]:
    """On a node of the cluster: the cell's files in pieces, the facts last."""
    import ray

    def tell(one: Reached) -> bool:
        goes_on: bool = ray.get(desk.tell.remote(one))
        return goes_on

    with TemporaryDirectory(prefix="walkaway-") as name:
        folder = Path(name)
        (folder / SIMULATION).write_bytes(plan)
        (folder / PLANNED).write_bytes(planned)
        run_cell(folder, number, rarely(tell, monotonic))
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
