"""The schedule of an open loop: when requests arrive, and what each asks for. The harness and each
load process draw one schedule from one plan.

A replayed prompt is multiplied by `prompt_factor`, rounded up, and brought within the limits of
`load.prompt_tokens` (cut at its end, so that prefixes stay shared); the answer is cut to
`load.stay_tokens`. A request without prompt or answer is left out and counted: BurstGPT records
failures so.
"""

import math
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from harness.errors import ConfigError, in_words
from harness.workload.abandon import RequestSpec
from harness.workload.arrivals import OpenArrivals, RateArrivals, TraceArrivals
from harness.workload.load import AbandonLoad
from harness.workload.observed_latency import ObservedLatency
from harness.workload.traces import PAGE_TOKENS, Recorded, TimeUnit, read_trace

_ROUNDING: Final = 1e-6  # of a product that should be whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """The `number`-th arrival, from 0, over all load processes. `replayed`: only of a trace."""

    number: int
    offset_s: float
    replayed: Recorded | None = None

    def draw_request(self, load: AbandonLoad, *, seed: int, seen: ObservedLatency) -> RequestSpec:
        asked = self.replayed
        if asked is None:
            return load.draw_request(seed=seed, user=self.number, seen=seen)
        lengths = {
            "prompt_tokens": [asked.prompt_tokens, asked.prompt_tokens],
            "stay_tokens": asked.answer_tokens,
        }
        as_recorded = load.model_copy(update=lengths)
        known = seen.with_answers_of(asked.answer_tokens)
        spec = as_recorded.draw_request(seed=seed, user=self.number, seen=known)
        planned = spec.planned_abandon
        if planned is None:
            return spec
        is_too_short_to_race = spec.plan == "last_token" and planned < 1
        if planned < spec.n * asked.answer_tokens and not is_too_short_to_race:
            return spec
        return replace(
            spec,
            plan="never",
            planned_abandon=None,
            way=None,
            pause="think",
            max_tokens=asked.answer_tokens,
        )


def planned_arrivals(arrivals: OpenArrivals, load: AbandonLoad, *, seed: int) -> Iterator[Arrival]:
    if isinstance(arrivals, RateArrivals):
        rng = random.Random(f"{seed}/arrivals")
        for number, offset_s in enumerate(arrivals.offsets_s(rng)):
            yield Arrival(number=number, offset_s=offset_s)
        return
    assert isinstance(arrivals, TraceArrivals)
    with open_trace(arrivals.file, arrivals.time_unit) as recorded:
        for number, (offset_s, asked) in enumerate(replayed(recorded, arrivals, load)):
            yield Arrival(number=number, offset_s=offset_s, replayed=asked)


@contextmanager
def open_trace(file: str, time_unit: TimeUnit | None = None) -> Iterator[Iterator[Recorded]]:
    path = Path(file)
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            yield read_trace(lines, name=file, time_unit=time_unit)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file}: the trace cannot be read: {in_words(error)}; `arrivals.file` "
            "names a recorded trace"
        ) from error


def window(requests: Iterable[Recorded], trace: TraceArrivals) -> Iterator[tuple[float, Recorded]]:
    begin_s: float | None = None
    for request in requests:
        if begin_s is None:
            begin_s = request.at_s + trace.from_s
        since_s = request.at_s - begin_s
        if trace.seconds is not None and since_s >= trace.seconds:
            return
        if since_s >= 0:
            yield since_s / trace.speed, request


def replayed(
    requests: Iterable[Recorded], trace: TraceArrivals, load: AbandonLoad
) -> Iterator[tuple[float, Recorded]]:
    for offset_s, request in window(requests, trace):
        if request.is_whole:
            yield offset_s, _fitted(request, trace, load)


def _fitted(request: Recorded, trace: TraceArrivals, load: AbandonLoad) -> Recorded:
    shortest, longest = load.prompt_tokens
    return replace(
        request,
        prompt_tokens=min(max(_scaled(request, trace), shortest), longest),
        answer_tokens=min(request.answer_tokens, load.stay_tokens),
        page_tokens=PAGE_TOKENS * _factor(trace),
    )


def _scaled(request: Recorded, trace: TraceArrivals) -> int:
    return math.ceil(request.prompt_tokens * _factor(trace) - _ROUNDING)


def _factor(trace: TraceArrivals) -> float:
    assert isinstance(trace.prompt_factor, float)  # "fit" was resolved before the load
    return trace.prompt_factor


@dataclass(slots=True, kw_only=True)
class ReplayTally:
    """The effect of a replay on its part of a trace, in requests and in tokens (after
    `prompt_factor`)."""

    requests: int = 0
    left_out: int = 0
    prompts_cut: int = 0
    answers_cut: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cut: int = 0
    answer_tokens: int = 0
    answer_tokens_cut: int = 0
    has_pages: bool = False


def tally(requests: Iterable[Recorded], trace: TraceArrivals, load: AbandonLoad) -> ReplayTally:
    found = ReplayTally()
    for _, request in window(requests, trace):
        if not request.is_whole:
            found.left_out += 1
            continue
        asked, prompt = _fitted(request, trace, load), _scaled(request, trace)
        prompt_cut = max(0, prompt - asked.prompt_tokens)
        answer_cut = request.answer_tokens - asked.answer_tokens
        found.requests += 1
        found.prompts_cut += prompt_cut > 0
        found.answers_cut += answer_cut > 0
        found.prompt_tokens += prompt
        found.prompt_tokens_cut += prompt_cut
        found.answer_tokens += request.answer_tokens
        found.answer_tokens_cut += answer_cut
        found.has_pages |= bool(request.pages)
    return found


def longest_prompt(requests: Iterable[Recorded], trace: TraceArrivals) -> int:
    part = (request for _, request in window(requests, trace) if request.is_whole)
    return max((request.prompt_tokens for request in part), default=0)
