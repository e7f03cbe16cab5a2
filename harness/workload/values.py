"""The kinds of value that workload and target files hold, each with its limits."""

import re
from math import isfinite
from typing import Annotated, Final

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
Scalar = int | float | str | bool
Seed = Annotated[int, Field(ge=0, le=LARGEST_INT)]
Seconds = Annotated[float, Field(ge=0, le=LONGEST_S)]
Share = Annotated[float, Field(ge=0, le=1)]
Duration = Annotated[float, Field(gt=0, le=LONGEST_S)]
Milliseconds = Annotated[float, Field(ge=0, le=60_000)]
# Below 10 ms, reading the page would itself be a load.
ScrapeInterval = Annotated[float, Field(ge=0.01, le=LONGEST_S)]


def _parse_token_range(value: object) -> list[int]:
    match value:
        case [int(low), int(high)] if 1 <= low <= high <= MOST_TOKENS:
            return [low, high]
        case _:
            raise ValueError(
                f"must be [lowest, highest] with 1 <= lowest <= highest <= {MOST_TOKENS}, "
                f"not {value}"
            )


def _parse_think(value: object) -> str | float:
    match value:
        case "step" | "none":
            return str(value)
        case bool():
            pass
        case int() | float() if 0 <= value <= LONGEST_S:
            return float(value)
    raise ValueError(
        f'must be "step", "none" or a number of seconds from 0 to {LONGEST_S}, not {value!r}'
    )


def _parse_scalar(value: object) -> Scalar:
    match value:
        case str() | bool():
            return value
        case int() if abs(value) <= LARGEST_INT:
            return value
        case float() if isfinite(value):
            return value
    raise ValueError(f"must be a number, text in quotes, true or false, not {value!r}")


def _check_path(value: str) -> str:
    if not re.fullmatch(r"/[!-~]*", value):
        raise ValueError(f'must begin with "/" and hold no spaces, not {value!r}')
    return value


def _check_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", value):
        raise ValueError(
            f"must be made of letters, digits, dots, dashes and underscores, not {value!r}"
        )
    return value


TokenRange = Annotated[list[int], PlainValidator(_parse_token_range)]
Think = Annotated[str | float, PlainValidator(_parse_think)]
ExtraValue = Annotated[Scalar, PlainValidator(_parse_scalar)]
UrlPath = Annotated[str, AfterValidator(_check_path)]
Name = Annotated[str, AfterValidator(_check_name)]


class Section(BaseModel):
    """A table of a TOML file: unknown keys are refused, and values are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
