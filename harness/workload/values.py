"""The kinds of value that workload and target files hold, each with its limits."""

import re
from math import isfinite
from typing import Annotated, Any, Final, TypeGuard

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator

# Far beyond what one machine can use, and small enough to refuse a typing mistake at once instead
# of filling the memory or waiting for ever.
MOST_TOKENS: Final = 10_000_000
MOST_BLOCKS: Final = 1_000_000
MOST_SLOTS: Final = 10_000
MOST_STREAMS: Final = 1_000_000
MOST_RATE: Final = 1_000_000
LONGEST_S: Final = 7 * 86_400
LARGEST_INT: Final = 2**63 - 1

Count = Annotated[int, Field(ge=1, le=LARGEST_INT)]
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Slots = Annotated[int, Field(ge=1, le=MOST_SLOTS)]
Streams = Annotated[int, Field(ge=1, le=MOST_STREAMS)]
Blocks = Annotated[int, Field(ge=1, le=MOST_BLOCKS)]
Seed = Annotated[int, Field(ge=0, le=LARGEST_INT)]
Seconds = Annotated[float, Field(ge=0, le=LONGEST_S)]
Share = Annotated[float, Field(ge=0, le=1)]
Duration = Annotated[float, Field(gt=0, le=LONGEST_S)]
Milliseconds = Annotated[float, Field(ge=0, le=60_000)]
# Below 10 ms, reading the page would itself be a load.
ScrapeInterval = Annotated[float, Field(ge=0.01, le=LONGEST_S)]


def is_number(value: object) -> TypeGuard[int | float]:
    return type(value) in (int, float)


def number_or(*words: str, least: float, most: float, said: str) -> PlainValidator:
    def parse(value: object) -> Any:
        if value in words:
            return value
        if is_number(value) and least <= value <= most:
            return float(value)
        quoted = ", ".join(f'"{word}"' for word in words)
        raise ValueError(f"must be {quoted} or {said}, not {value!r}")

    return PlainValidator(parse)


def _text_like(pattern: str, said: str) -> AfterValidator:
    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"must {said}, not {value!r}")
        return value

    return AfterValidator(check)


def _parse_token_range(value: object) -> list[int]:
    match value:
        case [int(low), int(high)] if 1 <= low <= high <= MOST_TOKENS:
            return [low, high]
    raise ValueError(
        f"must be [lowest, highest] with 1 <= lowest <= highest <= {MOST_TOKENS}, not {value}"
    )


def _parse_scalar(value: object) -> int | float | str | bool:
    match value:
        case str() | bool():
            return value
        case int() | float() if isfinite(value) and (
            isinstance(value, float) or abs(value) <= LARGEST_INT
        ):
            return value
    raise ValueError(f"must be a number, text in quotes, true or false, not {value!r}")


def _parse_size(value: object) -> int | str:
    match value:
        case int() if not isinstance(value, bool) and 1 <= value <= LARGEST_INT:
            return value
        case str() if re.fullmatch(r"[0-9]{1,15}(\.[0-9]+)?[kMGT]i?B", value):
            return value
    raise ValueError(f'must be a number of bytes, or a size such as "8GB", not {value!r}')


def _range_parser(highest: float, what: str) -> PlainValidator:
    def parse(value: object) -> list[float]:
        low, high = value if isinstance(value, list) and len(value) == 2 else (value, value)
        if is_number(low) and is_number(high) and 0 <= low <= high <= highest:
            return [float(low), float(high)]
        raise ValueError(
            f"must be {what} from 0 to {highest:g}, or [lowest, highest], not {value!r}"
        )

    return PlainValidator(parse)


def _parse_counts(value: object) -> list[int]:
    counts = value if isinstance(value, list) else [value]
    good = [n for n in counts if type(n) is int and 0 <= n <= MOST_TOKENS]
    if not counts or len(good) != len(counts):
        raise ValueError(
            f"must be a number of tokens from 0 to {MOST_TOKENS}, or a list of them, not {value!r}"
        )
    return good


Size = Annotated[int | str, PlainValidator(_parse_size)]
TokenRange = Annotated[list[int], PlainValidator(_parse_token_range)]
Counts = Annotated[list[int], PlainValidator(_parse_counts)]
Shares = Annotated[list[float], _range_parser(1, "a share")]
SecondsRange = Annotated[list[float], _range_parser(LONGEST_S, "seconds")]
Think = Annotated[
    str | float,
    number_or(
        *("step", "none"),
        least=0,
        most=LONGEST_S,
        said=f"a number of seconds from 0 to {LONGEST_S}",
    ),
]
ExtraValue = Annotated[int | float | str | bool, PlainValidator(_parse_scalar)]
UrlPath = Annotated[str, _text_like(r"/[!-~]*", 'begin with "/" and hold no spaces')]
Device = Annotated[
    str,
    _text_like(r"auto|cpu|cuda(:[0-9]{1,3})?", 'be "auto", "cpu", "cuda" or "cuda:N"'),
]
Name = Annotated[
    str,
    _text_like(
        r"[A-Za-z0-9][A-Za-z0-9._-]*",
        "be made of letters, digits, dots, dashes and underscores",
    ),
]


class TomlTable(BaseModel):
    """A table of a TOML file: unknown keys are refused, and values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
