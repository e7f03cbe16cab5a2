"""Recorded traffic, replayed: when requests came and how long they were; pure.

How long a replayed request is, in this order:

1. a prompt is multiplied by `prompt_factor` (and so are its pages), and rounded up;
2. a prompt is made at least as long as the lower, at most as long as the upper limit of
   `prompt_tokens`: what is beyond is cut from its end, so that what prompts share stays shared;
3. an answer is cut to `answer_tokens`.

A request without prompt or answer is left out and counted: BurstGPT has failures so, and how long
their answers would have been nobody knows.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec

from harness.load.trace_formats import PAGE_TOKENS, Recorded

_ROUNDING: Final = 1e-6  # of a product that should be whole


class TraceReplay(msgspec.Struct, kw_only=True, tag="trace", tag_field="kind"):
    """Which part of which trace, how fast, and how long its requests may be.

    Taken is what came from `from_s` on, for `seconds` (null: to the end), counted from the first
    request of the file; it is replayed `speed` times as fast. The rest: see the top of this module.
    """

    file: str
    from_s: float
    seconds: float | None
    speed: float
    prompt_factor: float
    prompt_tokens: tuple[int, int]
    answer_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a replayed request asks for: its lengths, and the pages of so many tokens each that its
    prompt begins with."""

    prompt_tokens: int
    answer_tokens: int
    pages: tuple[int, ...] = ()
    page_tokens: float = PAGE_TOKENS


@dataclass(slots=True, kw_only=True)
class Tally:
    """What a replay makes of its part of a trace, in requests and in tokens (of the trace, after
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


def window(requests: Iterable[Recorded], replay: TraceReplay) -> Iterator[tuple[float, Recorded]]:
    """The part to replay, each with its offset in the replay (s)."""
    begin_s: float | None = None
    for request in requests:
        if begin_s is None:
            begin_s = request.at_s + replay.from_s
        since_s = request.at_s - begin_s
        if replay.seconds is not None and since_s >= replay.seconds:
            return
        if since_s >= 0:
            yield since_s / replay.speed, request


def replayed(requests: Iterable[Recorded], replay: TraceReplay) -> Iterator[tuple[float, Asked]]:
    """Each request to send: its offset (s) and what it asks for."""
    for offset_s, request in window(requests, replay):
        if request.is_whole:
            yield offset_s, fitted(request, replay)


def fitted(request: Recorded, replay: TraceReplay) -> Asked:
    """The lengths by the rule at the top of this module."""
    shortest, longest = replay.prompt_tokens
    return Asked(
        prompt_tokens=min(max(_scaled(request, replay), shortest), longest),
        answer_tokens=min(request.answer_tokens, replay.answer_tokens),
        pages=request.pages,
        page_tokens=PAGE_TOKENS * replay.prompt_factor,
    )


def tally(requests: Iterable[Recorded], replay: TraceReplay) -> Tally:
    """Count what `replayed` gives, and what it changes."""
    found = Tally()
    for _, request in window(requests, replay):
        if not request.is_whole:
            found.left_out += 1
            continue
        asked, prompt = fitted(request, replay), _scaled(request, replay)
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


def longest_prompt(requests: Iterable[Recorded], replay: TraceReplay) -> int:
    """Tokens of the longest prompt in the part to replay, as it was recorded; 0 without any."""
    part = (request for _, request in window(requests, replay) if request.is_whole)
    return max((request.prompt_tokens for request in part), default=0)


def _scaled(request: Recorded, replay: TraceReplay) -> int:
    return math.ceil(request.prompt_tokens * replay.prompt_factor - _ROUNDING)
