"""Recorded traffic, replayed: when requests came and how long they were; pure.

How long a replayed request is, in this order:

1. a prompt is multiplied by `prompt_factor` (and so are its pages), and rounded up;
2. a prompt is made at least as long as the lower, at most as long as the upper limit of
   `prompt_tokens`: what is beyond is cut from its end, so that what prompts share stays shared;
3. an answer is cut to `answer_tokens`.

A request without prompt or answer is left out and counted: BurstGPT has failures so, and how long
their answers would have been nobody knows.
"""

import csv
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import Final

import msgspec

from harness.errors import ConfigError

PAGE_TOKENS: Final = 512
_LARGEST: Final = 10**12
_AZURE: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURST_GPT: Final = ("Timestamp", "Request tokens", "Response tokens")

TimeOf = Callable[[str, str, str], float]  # from a value, its place and its field, for the error


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One line of a trace. `at_s` is in seconds from anywhere; `pages` are its hash ids."""

    at_s: float
    prompt_tokens: int
    answer_tokens: int
    pages: tuple[int, ...] = ()

    @property
    def is_whole(self) -> bool:
        return self.prompt_tokens > 0 and self.answer_tokens > 0


def read_trace(lines: Iterable[str], *, name: str) -> Iterator[Recorded]:
    """The requests of a trace in any of the formats, as they come.

    Raises ConfigError, with file, line and field, for what is none of them and for a request that
    came before the one above it.
    """
    rest = iter(lines)
    skipped = 0
    for first in rest:
        if first.strip():
            break
        skipped += 1
    else:
        raise ConfigError(f"{name}: the file is empty: there is no trace in it")
    whole = chain([first], rest)
    if first.lstrip().startswith("{"):
        yield from _in_order(_mooncake(whole, name, skipped), name)
        return
    try:
        header = next(csv.reader([first], skipinitialspace=True))
    except csv.Error as error:
        raise ConfigError(f"{name}:{skipped + 1}: {error}") from error
    if set(_AZURE) <= set(header):
        yield from _in_order(_table(whole, _AZURE, _date, name, skipped), name)
    elif set(_BURST_GPT) <= set(header):
        yield from _in_order(_table(whole, _BURST_GPT, _finite, name, skipped), name)
    else:
        raise ConfigError(
            f"{name}:{skipped + 1}: neither Mooncake's JSON lines nor a CSV with the columns of "
            f"Azure's trace ({', '.join(_AZURE)}) or of BurstGPT's ({', '.join(_BURST_GPT)}): "
            f"{first.strip()[:80]!r}"
        )


def _in_order(requests: Iterable[tuple[int, Recorded]], name: str) -> Iterator[Recorded]:
    latest_s = -math.inf
    for line, request in requests:
        if request.at_s < latest_s:
            raise ConfigError(
                f"{name}:{line}: this request came {latest_s - request.at_s:g} s before the one "
                "above it; sort the file by time"
            )
        latest_s = request.at_s
        yield request


# The formats, each as (line number, request)...


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def _mooncake(lines: Iterable[str], name: str, skipped: int) -> Iterator[tuple[int, Recorded]]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    for number, line in enumerate(lines, start=skipped + 1):
        if not line.strip():
            continue
        try:
            found = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{name}:{number}: {error}") from error
        place = f"{name}:{number}"
        yield (
            number,
            Recorded(
                at_s=_finite(found.timestamp, place, "timestamp") / 1e3,
                prompt_tokens=_tokens(found.input_length, place, "input_length"),
                answer_tokens=_tokens(found.output_length, place, "output_length"),
                pages=found.hash_ids,
            ),
        )


def _table(
    lines: Iterable[str], columns: tuple[str, str, str], time_of: TimeOf, name: str, skipped: int
) -> Iterator[tuple[int, Recorded]]:
    """A CSV of which these columns tell the time, the prompt and the answer."""
    time, prompt, answer = columns
    for number, row in _csv_rows(lines, columns, name, skipped):
        place = f"{name}:{number}"
        yield (
            number,
            Recorded(
                at_s=time_of(row[time], place, time),
                prompt_tokens=_tokens(row[prompt], place, prompt),
                answer_tokens=_tokens(row[answer], place, answer),
            ),
        )


def _csv_rows(
    lines: Iterable[str], wanted: tuple[str, ...], name: str, skipped: int
) -> Iterator[tuple[int, dict[str, str]]]:
    """The wanted columns of each row that is not empty, with its line number."""
    reader = csv.DictReader(lines, restkey="", restval="", skipinitialspace=True)
    try:
        for row in reader:
            number = skipped + reader.line_num
            if row.get(""):
                raise ConfigError(f"{name}:{number}: more fields than the header has columns")
            yield number, {column: row[column].strip() for column in wanted}
    except csv.Error as error:  # of a line that the reader has not counted yet
        raise ConfigError(f"{name}:{skipped + reader.line_num + 1}: {error}") from error


def _date(text: str, place: str, field: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f"{place}: `{field}` is {text!r}, not a date and a time") from error
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _finite(value: float | str, place: str, field: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(f"{place}: `{field}` is {value!r}, not a time")
    return number


def _tokens(value: int | str, place: str, field: str) -> int:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not (0 <= number <= _LARGEST and number.is_integer()):
        raise ConfigError(f"{place}: `{field}` is {value!r}, not a number of tokens")
    return int(number)


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
