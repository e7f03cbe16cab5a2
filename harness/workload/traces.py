"""Recorded traffic: when requests came and how long they were, in three formats. Pure.

Mooncake's times are milliseconds, and other traces of its format are in seconds. Nothing in a file
says which. Read in the wrong unit it would be replayed a thousand times too fast or too slow, so a
file that may be either is refused without a `time_unit`.
"""

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, islice
from typing import Final, Literal

import msgspec

from harness.errors import ConfigError

TimeUnit = Literal["ms", "s"]

PAGE_TOKENS: Final = 512
UNITS_A_SECOND: Final[dict[TimeUnit, float]] = {"ms": 1e3, "s": 1.0}
# Requests a second, read as milliseconds. Fewer in a file of seconds are one in 20 s or more.
MOST_CERTAIN_RATE: Final = 50.0
_LOOKED_AT: Final = 1000  # lines
_LARGEST: Final = 10**12
_AZURE: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURST_GPT: Final = ("Timestamp", "Request tokens", "Response tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One line of a trace. `at_s` counts seconds from any origin; `pages` are its hash ids, each of
    `page_tokens` at the beginning of the prompt."""

    at_s: float
    prompt_tokens: int
    answer_tokens: int
    pages: tuple[int, ...] = ()
    page_tokens: float = PAGE_TOKENS

    @property
    def is_whole(self) -> bool:
        return self.prompt_tokens > 0 and self.answer_tokens > 0


def read_trace(
    lines: Iterable[str], *, name: str, time_unit: TimeUnit | None = None
) -> Iterator[Recorded]:
    """Lazily. Raises ConfigError, with file, line and field, for another format, for times whose
    unit is not certain, and for a request that came before the one above it."""
    numbered = enumerate(lines, start=1)
    number, first = next(((n, line) for n, line in numbered if line.strip()), (0, ""))
    if not first:
        raise ConfigError(f"{name}: the file is empty: there is no trace in it")
    whole = chain([(number, first)], numbered)
    read = _mooncake if first.lstrip().startswith("{") else _table
    latest_s = -math.inf
    for place, request in read(whole, name, time_unit):
        if request.at_s < latest_s:
            raise ConfigError(
                f"{place}: this request came {latest_s - request.at_s:g} s before the one above "
                "it; sort the file by time"
            )
        latest_s = request.at_s
        yield request


# The formats, each as (place, request)


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def _mooncake(
    lines: Iterable[tuple[int, str]], name: str, time_unit: TimeUnit | None
) -> Iterator[tuple[str, Recorded]]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    numbered = iter(lines)
    first = list(islice(numbered, _LOOKED_AT))
    if time_unit is None and (why := why_not_ms(_times(line for _, line in first))) is not None:
        raise ConfigError(
            f"{name}: are its timestamps milliseconds, as in Mooncake's traces, or seconds? {why}; "
            'say which: `arrivals.time_unit` is "ms" or "s"'
        )
    a_second = UNITS_A_SECOND[time_unit or "ms"]
    for number, line in chain(first, numbered):
        if not line.strip():
            continue
        place = f"{name}:{number}"
        try:
            found = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{place}: {error}") from error
        yield (
            place,
            Recorded(
                at_s=_finite(found.timestamp, place, "timestamp") / a_second,
                prompt_tokens=_tokens(found.input_length, place, "input_length"),
                answer_tokens=_tokens(found.output_length, place, "output_length"),
                pages=found.hash_ids,
            ),
        )


def _times(lines: Iterable[str]) -> list[float]:
    """The times of the lines up to the first that is no request."""
    decoder, times = msgspec.json.Decoder(_MooncakeLine), []
    for line in filter(str.strip, lines):
        try:
            times.append(decoder.decode(line).timestamp)
        except msgspec.DecodeError:
            break
    return times


def why_not_ms(times: Sequence[float]) -> str | None:
    """What speaks against milliseconds; None: nothing does."""
    span = times[-1] - times[0] if times else 0.0
    if not 0 < span < math.inf:
        return None
    if not all(time.is_integer() for time in times):
        return "some have a fraction"
    rate = (len(times) - 1) / span * UNITS_A_SECOND["ms"]
    if rate > MOST_CERTAIN_RATE:
        return f"in milliseconds, {rate:,.0f} requests would come a second"
    return None


def _table(
    lines: Iterable[tuple[int, str]], name: str, time_unit: TimeUnit | None
) -> Iterator[tuple[str, Recorded]]:
    latest = 0

    def texts() -> Iterator[str]:
        nonlocal latest
        for number, text in lines:
            latest = number
            yield text

    rows = csv.DictReader(texts(), restkey="", restval="", skipinitialspace=True)
    try:
        header = list(rows.fieldnames or ())
        fitting = [one for one in _TIME_OF if set(one) <= set(header)]
        if not fitting:
            raise ConfigError(
                f"{name}:{latest}: neither Mooncake's JSON lines nor a CSV with the columns of "
                f"Azure's trace ({', '.join(_AZURE)}) or of BurstGPT's ({', '.join(_BURST_GPT)}): "
                f"{','.join(header)[:80]!r}"
            )
        time, prompt, answer = fitting[0]
        time_of, a_second = _TIME_OF[fitting[0]], UNITS_A_SECOND[time_unit or "s"]
        if time_unit is not None and time_of is _date:
            raise ConfigError(f"{name}: its times are dates: `arrivals.time_unit` is not for them")
        for row in rows:
            place = f"{name}:{latest}"
            if row.get(""):
                raise ConfigError(f"{place}: more fields than the header has columns")
            yield (
                place,
                Recorded(
                    at_s=time_of(row[time].strip(), place, time) / a_second,
                    prompt_tokens=_tokens(row[prompt].strip(), place, prompt),
                    answer_tokens=_tokens(row[answer].strip(), place, answer),
                ),
            )
    except csv.Error as error:
        raise ConfigError(f"{name}:{latest}: {error}") from error


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


# The reader of times by a table's columns; it takes a value, and its place and field for errors.
_TIME_OF: Final[dict[tuple[str, str, str], Callable[[str, str, str], float]]] = {
    _AZURE: _date,
    _BURST_GPT: _finite,
}
