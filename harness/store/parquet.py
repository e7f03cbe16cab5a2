"""A run's parquet files: one table for each kind of row, its schema derived from the record."""

import types
from collections.abc import Container, Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple, Union, get_args, get_origin, get_type_hints

import msgspec
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from harness.errors import ConfigError, in_words
from harness.records import Role, StepRow

ROWS_AT_ONCE: Final = 10_000

# These hold an entry for each token, and stay arrow arrays in memory, without Python objects.
TOKEN_LISTS: Final = {
    "token_times_ns": pa.list_(pa.int64()),
    "event_tokens": pa.list_(pa.int32()),
}

# Step maps are stored as aligned lists: parquet's own map type reads back as a list of pairs.
STEP_LISTS: Final = [
    pa.field("request_ids", pa.list_(pa.string()), nullable=False),
    pa.field("scheduled_tokens", pa.list_(pa.int32()), nullable=False),
    pa.field("sampled_tokens", pa.list_(pa.int32()), nullable=False),
]


class TableWriter:
    """The file is called `.part` until it is closed."""

    def __init__(self, path: Path, record: type[msgspec.Struct]) -> None:
        self._path, self._part = path, path.with_suffix(".part")
        self._record, self._schema = record, schema_of(record)
        self._writer = pq.ParquetWriter(self._part, self._schema, write_page_checksum=True)

    def write(self, rows: Sequence[msgspec.Struct]) -> None:
        """A row group."""
        columns = zip(_columns(self._record, rows), self._schema, strict=True)
        arrays = [pa.array(column, type=field.type) for column, field in columns]
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema))

    def close(self) -> None:
        self._writer.close()
        self._part.replace(self._path)


def write_table(path: Path, record: type[msgspec.Struct], rows: Iterable[msgspec.Struct]) -> None:
    writer, some_left = TableWriter(path, record), iter(rows)
    while some := list(islice(some_left, ROWS_AT_ONCE)):
        writer.write(some)
    writer.close()


def read_frame(
    path: Path, record: type[msgspec.Struct], *, without: Container[str] = ()
) -> pd.DataFrame:
    """Read column by column: a large run takes little more memory than its frame. A column that is
    newer than the run holds the record's default.

    Raises ConfigError for a file that is missing or damaged.
    """
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            fields = [field for field in file.schema_arrow if field.name not in without]
            columns = {field.name: _read_column(file, field) for field in fields}
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{path}: cannot be read: {in_words(error)}") from error
    frame = pd.DataFrame(columns)
    for one in msgspec.structs.fields(record):
        if one.name not in frame and one.default is not msgspec.NODEFAULT:
            frame[one.name] = one.default
    if lacking := [one for one in _required(record) if one not in frame and one not in without]:
        raise ConfigError(f"{path}: is not as walkaway writes it: it has no column {lacking[0]}")
    return frame


def empty_frame(record: type[msgspec.Struct], *, without: Container[str] = ()) -> pd.DataFrame:
    """What `read_frame` returns for a table without rows."""
    names = [field for field in schema_of(record) if field.name not in without]
    return pd.DataFrame({field.name: _as_series(field, []) for field in names})


def _required(record: type[msgspec.Struct]) -> list[str]:
    of = {one.name: one.required for one in msgspec.structs.fields(record)}
    return [name for name in schema_of(record).names if of.get(name, True)]


def verified_batches(path: Path) -> Iterator[pa.RecordBatch]:
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as opened:
            for batch in opened.iter_batches(ROWS_AT_ONCE):
                batch.validate(full=True)
                yield batch
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"{path} cannot be read: {in_words(error)}") from error


class Sent(NamedTuple):
    """A user's request: in an open loop `user` is its number in the schedule."""

    user: int
    intended_start_ns: int
    ended_ns: int


def read_sent(path: Path) -> list[Sent]:
    is_users = [("role", "=", Role.USER.value)]
    table = pq.read_table(path, columns=list(Sent._fields), filters=is_users)
    columns = [table[name].to_pylist() for name in Sent._fields]
    return [Sent(*row) for row in zip(*columns, strict=True)]


def why_no_table(path: Path, record: type[msgspec.Struct]) -> str | None:
    """Why it is no table, in words; None: all its values can be read."""
    try:
        read_frame(path, record)
    except ConfigError as error:
        return str(error)
    return None


def may_have_rows(path: Path) -> bool:
    """True also for an unreadable file."""
    try:
        return bool(pq.read_metadata(path).num_rows)
    except (OSError, pa.ArrowException):
        return True


def schema_of(record: type[msgspec.Struct]) -> pa.Schema:
    """The parquet schema of a record; a field is nullable only if the record allows None."""
    hints = get_type_hints(record)
    fields = [
        _field(name, hints[name])
        for name in record.__struct_fields__
        if not (record is StepRow and name in ("scheduled", "sampled"))
    ]
    return pa.schema([*fields, *STEP_LISTS] if record is StepRow else fields)


def _field(name: str, hint: Any) -> pa.Field:
    if get_origin(hint) in (Union, types.UnionType):
        (inner,) = [part for part in get_args(hint) if part is not type(None)]
        return pa.field(name, _arrow_type(inner), nullable=True)
    return pa.field(name, _arrow_type(hint), nullable=False)


def _arrow_type(hint: Any) -> pa.DataType:
    if get_origin(hint) is list:
        return pa.list_(_arrow_type(get_args(hint)[0]))
    if issubclass(hint, str):
        return pa.string()
    return {int: pa.int64(), float: pa.float64(), bool: pa.bool_()}[hint]


def _read_column(file: pq.ParquetFile, field: pa.Field) -> pd.Series:
    groups = range(file.num_row_groups)
    return _as_series(field, [file.read_row_group(n, columns=[field.name])[0] for n in groups])


def _as_series(field: pa.Field, parts: Sequence[pa.ChunkedArray]) -> pd.Series:
    kind = TOKEN_LISTS.get(field.name, field.type)
    chunks = [chunk for part in parts for chunk in part.cast(kind).chunks]
    whole = pa.chunked_array(chunks, type=kind)
    if field.name in TOKEN_LISTS:
        return pd.Series(pd.arrays.ArrowExtensionArray(whole))
    column: pd.Series = whole.to_pandas(types_mapper=_as_nullable if field.nullable else None)
    return column


def _as_nullable(kind: pa.DataType) -> Any:
    return pd.Int64Dtype() if pa.types.is_int64(kind) else None


def _columns(record: type[msgspec.Struct], rows: Sequence[Any]) -> list[list[Any]]:
    plain = [field.name for field in schema_of(record) if field not in STEP_LISTS]
    columns = [[_plain(getattr(row, name)) for row in rows] for name in plain]
    if record is StepRow:
        columns.append([list(row.scheduled) for row in rows])
        columns.append([list(row.scheduled.values()) for row in rows])
        columns.append([[row.sampled.get(r, 0) for r in row.scheduled] for row in rows])
    return columns


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, StrEnum) else value
