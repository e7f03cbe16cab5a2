"""The schedule of an open loop, from its plan: who arrives when, and asks for what.

The same for whoever asks: the harness, which counts the arrivals, and each load process, which
sends its share of them. A trace is read as it is needed, a line at a time.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from harness.errors import ConfigError
from harness.workload.abandon import Expectation, Intent, RequestPlan, plan_request
from harness.workload.arrivals import RateArrivals, offsets_s
from harness.workload.plan import AbandonLoad
from harness.workload.traces import Asked, Recorded, TraceReplay, read_trace, replayed


class _KnownAnswer(Expectation):
    """What was seen, but the length of the answer is known."""

    def __init__(self, seen: Expectation, tokens: int) -> None:
        super().__init__()
        self._seen = seen
        self._tokens = tokens

    def ttft_ns(self) -> int | None:
        return self._seen.ttft_ns()

    def answer_tokens(self, max_tokens: int) -> int:
        return min(self._tokens, max_tokens)


def plan_replayed(
    load: AbandonLoad, asked: Asked, *, seed: int, number: int, seen: Expectation
) -> RequestPlan:
    """The `number`-th request of the trace, and whether and when its user leaves."""
    as_recorded = msgspec.structs.replace(
        load,
        prompt_tokens=(asked.prompt_tokens, asked.prompt_tokens),
        stay_tokens=asked.answer_tokens,
    )
    known = _KnownAnswer(seen, asked.answer_tokens)
    plan = plan_request(as_recorded, seed=seed, user=number, n=0, seen=known)
    intent, whole = plan.intent, plan.intent.n * asked.answer_tokens
    if intent.planned_abandon is None:
        return plan
    is_too_short_to_race = intent.plan == "last_token" and intent.planned_abandon < 1
    if intent.planned_abandon < whole and not is_too_short_to_race:
        return plan
    return replace(
        plan,
        intent=Intent(delivery=intent.delivery, n=intent.n),
        pause="think",
        max_tokens=asked.answer_tokens,
    )


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
