"""Does memory hold a simulation? Rows go out to files, so what grows is the requests in flight.

An estimate for refusing what cannot end well, not a figure to report: it counts all answers at full
length, and a replica's step at a full batch.
"""

from collections.abc import Iterator
from itertools import islice
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

import psutil

from harness.errors import ConfigError
from harness.simulate.asking import Asking
from harness.simulate.plan import Plan
from harness.workload.abandon import RequestSpec
from harness.workload.arrivals import OpenArrivals, RateArrivals
from harness.workload.observed_latency import ObservedLatency
from harness.workload.schedule import planned_arrivals

# Measured with tracemalloc, and rounded up.
PROCESS_BYTES: Final = 350_000_000  # with the rows that wait for their row group
BLOCK_BYTES: Final = 300  # with its hash in the prefix index
REQUEST_BYTES: Final = 4_000
TOKEN_BYTES: Final = 16

_CGROUP: Final = Path("/sys/fs/cgroup")
_DRAWN: Final = 200  # requests whose lengths are looked at


class Lengths(NamedTuple):
    """Means of a cell's requests."""

    prompt_tokens: float
    answer_tokens: float


def check_memory(bytes_per_cell: int, processes: int, available: int) -> None:
    """Raises ConfigError."""
    fewer = f", or fewer than {processes} processes" if processes > 1 else ""
    at_once = bytes_per_cell * processes
    if at_once > available:
        raise ConfigError(
            f"the simulation would need about {_gib(at_once)} of memory, and {_gib(available)} are "
            f"free: ask for a lower rate, a limit of streams, fewer simulated replicas{fewer}"
        )


def cell_bytes(plan: Plan) -> int:
    """All cells have as many replicas, and as many requests as may be expected."""
    lengths = _lengths(plan)
    tokens = lengths.prompt_tokens + lengths.answer_tokens
    return (
        PROCESS_BYTES
        + plan.replicas_of_cell * plan.engine.num_blocks * BLOCK_BYTES
        + ceil(_most_live(plan, lengths) * (REQUEST_BYTES + TOKEN_BYTES * tokens))
    )


def _lengths(plan: Plan) -> Lengths:
    """The lengths of the first cell's first requests."""
    specs = list(islice(_first_requests(plan), _DRAWN))
    if not specs:
        return Lengths(0.0, 0.0)
    prompts = fmean(one.prompt_tokens for one in specs)
    return Lengths(prompts, fmean(one.max_tokens for one in specs))


def _first_requests(plan: Plan) -> Iterator[RequestSpec]:
    asking, seen = Asking(plan, 0), ObservedLatency()
    if plan.arrivals is None:
        for user in asking.users():
            yield asking.of_user(user, 0, number=0, seen=seen).spec
        return
    for arrival in asking.arrivals(plan.arrivals):
        yield asking.on_arrival(arrival, seen=seen).spec


def _most_live(plan: Plan, lengths: Lengths) -> int:
    """An open loop has the batch, and all that comes beyond what the replicas can answer."""
    arrivals, config = plan.arrivals, plan.engine
    if arrivals is None:
        return len(Asking(plan, 0).users())
    num_requests = _expected(plan, arrivals)
    slots = plan.replicas_of_cell * config.max_num_seqs
    cost = config.step_cost
    step_s = cost.fixed_s + config.max_num_seqs * cost.decode_token_s
    needed_s = num_requests * lengths.answer_tokens * step_s / slots
    backlog_share = max(0.0, 1 - plan.load_s / needed_s) if needed_s else 0.0
    live = min(num_requests, slots + ceil(backlog_share * num_requests))
    return live if plan.max_streams is None else min(live, plan.max_streams)


def _expected(plan: Plan, arrivals: OpenArrivals) -> int:
    """Requests of a cell."""
    if isinstance(arrivals, RateArrivals):
        num = arrivals.expected
    else:
        seed = plan.workload.run.seed
        num = sum(1 for _ in planned_arrivals(arrivals, plan.load, seed=seed))
    return ceil(num * plan.cluster.share / plan.num_cells)


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
