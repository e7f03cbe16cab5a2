"""The schedule of an open loop, from its plan: who arrives when, and asks for what.

The same for whoever asks: the harness, which counts the arrivals, and each load process, which
sends its share of them. A trace is read as it is needed, a line at a time.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.errors import ConfigError
from harness.load.abandon import RequestPlan, plan_request
from harness.load.arrivals import RateArrivals, offsets_s
from harness.load.expectation import Expectation
from harness.load.overlay import plan_replayed
from harness.load.plan import AbandonLoad
from harness.load.trace_formats import Recorded, read_trace
from harness.load.traces import Asked, TraceReplay, replayed


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """The `number`-th arrival, from 0, over all load processes. `asked`: where a trace says it."""

    number: int
    offset_s: float
    asked: Asked | None = None


def planned_arrivals(schedule: RateArrivals | TraceReplay, *, seed: int) -> Iterator[Arrival]:
    """All arrivals in order. Raises ConfigError for a trace that cannot be read."""
    if isinstance(schedule, RateArrivals):
        rng = random.Random(f"{seed}/arrivals")
        for number, offset_s in enumerate(offsets_s(schedule, rng)):
            yield Arrival(number=number, offset_s=offset_s)
        return
    with open_trace(schedule.file) as recorded:
        for number, (offset_s, asked) in enumerate(replayed(recorded, schedule)):
            yield Arrival(number=number, offset_s=offset_s, asked=asked)


def plan_arrival(
    load: AbandonLoad, arrival: Arrival, *, seed: int, seen: Expectation
) -> RequestPlan:
    """What who arrives asks for, and whether and when they leave."""
    if arrival.asked is None:
        return plan_request(load, seed=seed, user=arrival.number, n=0, seen=seen)
    return plan_replayed(load, arrival.asked, seed=seed, number=arrival.number, seen=seen)


@contextmanager
def open_trace(file: str) -> Iterator[Iterator[Recorded]]:
    """The requests of a trace file, read as they are asked for. Raises ConfigError."""
    path = Path(file)
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            yield read_trace(lines, name=file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: the trace cannot be read: {error}") from error
