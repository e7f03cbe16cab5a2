"""Recorded traffic: when requests came and how long they were, in three formats. Pure."""

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

TimeOf = Callable[[str, str, str], float]  # of a value; its place and its field are for the error


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One line of a trace. `at_s` counts seconds from any origin; `pages` are its hash ids."""

    at_s: float
    prompt_tokens: int
    answer_tokens: int
    pages: tuple[int, ...] = ()

    @property
    def is_whole(self) -> bool:
        return self.prompt_tokens > 0 and self.answer_tokens > 0


def read_trace(lines: Iterable[str], *, name: str) -> Iterator[Recorded]:
    """The requests of a trace in any of the formats, lazily.

    Raises ConfigError, with file, line and field, for another format and for a request that came
    before the one above it.
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


# The formats, each as (line number, request)


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
    """A CSV; `columns` are those of the time, the prompt and the answer."""
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
    except csv.Error as error:  # the reader has not counted this line yet
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
