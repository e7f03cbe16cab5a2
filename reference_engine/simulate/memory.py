"""Does memory hold a simulation? Rows go out to files, so what grows is the requests in flight.

An estimate for refusing what cannot end well, not a figure to report: it counts all answers at full
length, and a replica's step at a full batch.
"""

from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from reference_engine.config import EngineConfig
from reference_engine.simulate.plan import PLANNED, PlanError, Simulation

# Measured with tracemalloc, and rounded up.
PROCESS_BYTES: Final = 350_000_000  # with the rows that wait for their row group
BLOCK_BYTES: Final = 300  # with its hash in the prefix index
REQUEST_BYTES: Final = 4_000
TOKEN_BYTES: Final = 16

_CGROUP: Final = Path("/sys/fs/cgroup")
_COLUMNS: Final = ("cell", "user", "offset_s", "prompt_tokens", "max_tokens", "n")


class Asked(NamedTuple):
    """All of a cell's planned requests together; `num_users` is null in an open loop."""

    num_requests: int
    prompt_tokens: int
    answer_tokens: int
    num_users: int | None


def needed_bytes(folder: Path, plan: Simulation, config: EngineConfig) -> list[int]:
    """One figure a cell. Raises PlanError."""
    return [
        PROCESS_BYTES if one is None else cell_bytes(plan, config, number, one)
        for number, one in enumerate(asked_of(folder, len(plan.cells)))
    ]


def check_memory(needed: Sequence[int], processes: int, available: int) -> None:
    """Raises PlanError."""
    fewer = f", or fewer than {processes} processes" if processes > 1 else ""
    check_fits(sum(sorted(needed)[-processes:]), available, fewer)


def check_fits(at_once: int, available: int, fewer: str = "") -> None:
    """Raises PlanError."""
    if at_once > available:
        raise PlanError(
            f"the simulation would need about {_gib(at_once)} of memory, and {_gib(available)} are "
            f"free: ask for a lower rate, a limit of streams, fewer simulated replicas{fewer}"
        )


def cell_bytes(plan: Simulation, config: EngineConfig, number: int, asked: Asked) -> int:
    simulated = plan.cells[number].simulated
    tokens = (asked.prompt_tokens + asked.answer_tokens) / max(1, asked.num_requests)
    live = min(asked.num_requests, _most_live(plan, config, simulated, asked))
    return (
        PROCESS_BYTES
        + simulated * config.num_blocks * BLOCK_BYTES
        + ceil(live * (REQUEST_BYTES + TOKEN_BYTES * tokens))
    )


def _most_live(plan: Simulation, config: EngineConfig, simulated: int, asked: Asked) -> int:
    """In an open loop: the batch, and all that comes beyond what the replicas can answer."""
    if asked.num_users is not None:
        return asked.num_users
    slots = simulated * config.max_num_seqs
    cost = config.step_cost
    step_s = cost.fixed_s + config.max_num_seqs * cost.decode_token_s
    needed_s = asked.answer_tokens * step_s / slots
    backlog_share = max(0.0, 1 - plan.load_s / needed_s) if needed_s else 0.0
    live = slots + ceil(backlog_share * asked.num_requests)
    return live if plan.max_streams is None else min(live, plan.max_streams)


def asked_of(folder: Path, num_cells: int) -> list[Asked | None]:
    """By cell; None for one without requests. Raises PlanError."""
    counts = np.zeros((num_cells, 3), dtype=np.int64)
    most_user = np.full(num_cells, -1)
    is_open = False
    try:
        with pq.ParquetFile(folder / PLANNED) as file:
            for batch in file.iter_batches(columns=_COLUMNS):
                cells, user, offset_s, prompt, answer, n = map(batch.column, _COLUMNS)
                number = cells.to_numpy()
                if len(number) and number.max() >= num_cells:
                    raise PlanError(f"{folder / PLANNED}: there is no cell {number.max()}")
                is_open = is_open or offset_s.null_count < len(offset_s)
                np.maximum.at(most_user, number, user.to_numpy())
                answers = n.to_numpy().astype(np.int64)
                for place, each in enumerate((1, prompt.to_numpy(), answer.to_numpy())):
                    counts[:, place] += _sums(number, answers * each, num_cells)
    except (OSError, pa.ArrowException, KeyError) as error:
        raise PlanError(f"{folder / PLANNED} cannot be read: {error}") from error
    return [
        Asked(int(num), int(prompt), int(answer), None if is_open else int(most) + 1)
        if num
        else None
        for (num, prompt, answer), most in zip(counts, most_user, strict=True)
    ]


def _sums(number: NDArray[np.int32], each: NDArray[np.int64], num_cells: int) -> NDArray[np.int64]:
    return np.bincount(number, each, num_cells).astype(np.int64)


def available_bytes() -> int:
    """Free memory of the machine, or of the control group if that has less."""
    machine: int = psutil.virtual_memory().available
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return machine
    return machine if limit == "max" else min(machine, int(limit) - used)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
