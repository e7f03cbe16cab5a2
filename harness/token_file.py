"""Numbers of tokens as they were observed, from a file: one a line, or a column of CSV or parquet.

Only what can be a number of tokens is accepted, and the first entry that is not is named with its
place: a header that was taken for data, or a column of seconds, should not become a plan.
"""

from pathlib import Path
from typing import Final

import pandas as pd

from harness.errors import ConfigError
from harness.values import MOST_TOKENS

MOST_NUMBERS: Final = 100_000


def read_token_counts(path: Path, column: str | None) -> list[int]:
    """All numbers of the file, in its order. Raises ConfigError."""
    values = _read_lines(path) if column is None else _read_column(path, column)
    if not values:
        raise ConfigError(f"{path}: holds no numbers of tokens")
    if len(values) > MOST_NUMBERS:
        raise ConfigError(f"{path}: holds {len(values)} numbers; at most {MOST_NUMBERS} are taken")
    return [_parse(value, path, place) for place, value in enumerate(values, start=1)]


def _read_lines(path: Path) -> list[str]:
    if path.suffix in (".csv", ".parquet"):
        raise ConfigError(f"{path}: say with `column` which of its columns is meant")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    return [line.strip() for line in text.splitlines() if line.strip()]


def _read_column(path: Path, column: str) -> list[str]:
    try:
        # As text: a number must not change on its way through a float.
        table = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path, dtype=str)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if column not in table.columns:
        names = ", ".join(str(name) for name in table.columns)
        raise ConfigError(f"{path}: has no column {column!r}; it has: {names}")
    return [str(value) for value in table[column]]


def _parse(value: str, path: Path, place: int) -> int:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not number.is_integer() or not 0 <= number <= MOST_TOKENS:
        raise ConfigError(
            f"{path}: entry {place} is {value!r}, not a number of tokens from 0 to {MOST_TOKENS}"
        )
    return int(number)
