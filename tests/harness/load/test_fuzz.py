"""Any bytes at all, cut anywhere: an answer ends in a row, and the row in a file.

The whole way of a stream is gone, from the bytes of a receive to a row that was read from parquet;
and the decoder of events is held against one that is slow and plain.
"""

import json
import re
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.load.client import StreamReader
from harness.load.dialect import refusal_message
from harness.load.rows import ShardReader, ShardWriter
from harness.load.sse import EndlessEventError, SSEDecoder
from harness.load.stream import StreamMachine
from harness.records import RequestRow, Role, WireClose
from harness.store.run_folder import RunFolder, RunRows
from harness.workload.abandon import RequestSpec

RECEIVED_AT_ONCE = 65_536  # bytes

# What can stand in the JSON in place of the right value.
NUMBERS = [-1, 2**31 - 1, 2**31, 5_000_000_000, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**40]
DEEP = b"[" * 2000 + b"]" * 2000
ODD_NUMBERS = [str(number).encode() for number in NUMBERS] + [b"1.5", b"1e999", b"9" * 5000, DEEP]
ODD_TEXTS = [
    *(b'"caf\xe9"', b'"\xff"', b'{"\xff":1}', rb'"\ud800"', rb'"\u0000"', b'"%b"' % (b"x" * 301)),
    *(b"", b'"', b"}", b"[]", b"{}", b"null", b"NaN", DEEP),
]
texts = st.text(max_size=9)
anything = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
odd_values = st.one_of(
    st.sampled_from(ODD_NUMBERS + ODD_TEXTS),
    anything.map(lambda value: json.dumps(value).encode()),
    st.integers(900, 1100).map(lambda depth: b"[" * depth + b"]" * depth),
    st.binary(max_size=4),
)

ACCOUNT = b'"usage":{"prompt_tokens":%(prompt)b,"completion_tokens":%(count)b}'
FORMS = [
    b'{"choices":[{"index":%(index)b,"text":%(text)b,"finish_reason":%(finish)b}],'
    + ACCOUNT
    + b"}",
    b'{"choices":[{"text":%(text)b},{"index":%(index)b,"text":%(text)b}],' + ACCOUNT + b"}",
    b'{"choices":[{"delta":{"content":%(text)b},"finish_reason":%(finish)b}],' + ACCOUNT + b"}",
    b'{"choices":[{"message":{"reasoning_content":%(text)b}}],"usage":null}',
    b'{"choices":[{"finish_reason":"abort"}],"cancellation_info":{"reason":%(text)b}}',
    b'{"choices":[],' + ACCOUNT + b',"other":%(text)b}',
    b'{"error":{"message":%(text)b,"code":%(count)b}}',
    b"%(text)b",
]
FIELDS = {
    b"index": st.integers(0, 3).map(lambda n: b"%d" % n),
    b"prompt": st.just(b"8"),
    b"count": (st.integers(0, 40) | st.integers(0, 12_000)).map(lambda n: b"%d" % n),
    b"text": st.sampled_from([b'""', b'" a"', '"\u00e9\u2028"'.encode(), b'"client_timeout"']),
    b"finish": st.sampled_from([b"null", b"null", b'"length"', b'"abort"']),
}


def event_of(form: bytes, fields: dict[bytes, bytes], odd: dict[bytes, bytes]) -> bytes:
    return form % (fields | odd)


def one_of_them(name: bytes, values: Sequence[bytes]) -> st.SearchStrategy[dict[bytes, bytes]]:
    return st.sampled_from(values).map(lambda value: {name: value})


even = st.builds(event_of, st.sampled_from(FORMS[:4]), st.fixed_dictionaries(FIELDS), st.just({}))
odd_fields = st.one_of(
    one_of_them(b"count", ODD_NUMBERS),
    one_of_them(b"prompt", ODD_NUMBERS),
    one_of_them(b"index", ODD_NUMBERS),
    one_of_them(b"text", ODD_TEXTS),
    one_of_them(b"finish", ODD_TEXTS),
    st.dictionaries(st.sampled_from(sorted(FIELDS)), odd_values, min_size=1),
)
odd = st.builds(event_of, st.sampled_from(FORMS), st.fixed_dictionaries(FIELDS), odd_fields)
line_ends = st.sampled_from([b"\n", b"\r", b"\r\n"])


def blocks(data: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    return st.builds(lambda data, end: b"data: %b%b%b" % (data, end, end), data, line_ends)


parts = blocks(even) | blocks(odd) | blocks(st.just(b"[DONE]")) | st.binary(max_size=20)
streams = st.builds(
    lambda before, odd, after: b"".join([*before, odd, *after]),
    st.lists(blocks(even), max_size=4),
    blocks(odd),
    st.lists(parts, max_size=3),
)
cuts = st.lists(st.integers(0, 2000), max_size=12)
machines = st.fixed_dictionaries(
    {
        "role": st.sampled_from([Role.USER, Role.CANARY]),
        "n": st.integers(1, 3),
        "max_tokens": st.integers(1, 9),
        "continuous_usage": st.booleans(),
        "usage_per_choice": st.booleans(),
        "leaves_after": st.integers(0, 12),  # receives, of which there may be fewer
    }
)


def pieces(stream: bytes, cuts: Sequence[int]) -> Iterator[bytes]:
    places = [0, *sorted(cut for cut in cuts if cut < len(stream)), len(stream)]
    for start, end in pairwise(places):
        for at in range(start, end, RECEIVED_AT_ONCE):
            yield stream[at : min(at + RECEIVED_AT_ONCE, end)]


def machine_of(how: dict[str, Any]) -> StreamMachine:
    spec = RequestSpec(
        request_id="r1",
        arm="main",
        role=how["role"],
        user=0,
        prompt_tokens=1,
        max_tokens=how["max_tokens"],
        intended_start_ns=1,
        n=how["n"],
    )
    stream = StreamMachine(
        spec,
        sent_ns=2,
        continuous_usage=how["continuous_usage"],
        usage_per_choice=how["usage_per_choice"],
    )
    stream.headers(200)
    return stream


def read_to_the_end(received: Iterator[bytes], how: dict[str, Any]) -> RequestRow:
    """The row of an answer of which all that came, came at one time."""
    stream = machine_of(how)
    reader = StreamReader(stream, None)
    try:
        for chunk in received:
            reader.read(chunk, 3)
    except EndlessEventError as error:
        stream.break_off(4, str(error))
    if stream.outcome is None:
        stream.body_ended(4)
    return stream.row()


def read_on_after_leaving(received: Iterator[bytes], how: dict[str, Any]) -> RequestRow:
    stream = machine_of(how)
    reader = StreamReader(stream, None)
    for number, chunk in enumerate(received):
        if number == how["leaves_after"] and stream.can_leave:
            stream.leave(3, think_ns=0, wire_close=WireClose.FIN)
        reader.read(chunk, time.perf_counter_ns())
    if stream.outcome is None:
        stream.cut(4)
    return stream.row()


def read_in_one_piece(body: bytes, how: dict[str, Any]) -> RequestRow:
    stream = machine_of(how)
    stream.answer(body, 3)
    return stream.row()


def assert_kept(rows: Sequence[RequestRow], folder: RunFolder) -> None:
    """By way of a shard, as a load process and the harness keep rows, and read from their file."""
    (folder.path / "manifest.json").write_text("{}")
    with ShardWriter(folder.shards, RequestRow, 1) as shard:
        for row in rows:
            shard.write(row)
    folder.write_rows(RunRows(requests=ShardReader(folder.shards, RequestRow).read_new()))
    table = pq.read_table(folder.path / "requests.parquet")
    assert table.to_pylist() == [msgspec.to_builtins(row) for row in rows]
    frame = folder.frames().requests
    assert [list(of_one) for of_one in frame["event_tokens"]] == [row.event_tokens for row in rows]


@settings(max_examples=80)
@given(streams, st.tuples(cuts, cuts), machines)
def test_however_it_is_cut_the_row_is_the_same(
    stream: bytes, places: tuple[list[int], list[int]], how: dict[str, Any]
) -> None:
    row = read_to_the_end(pieces(stream, []), how)
    for some in (*places, range(1, min(len(stream), 300))):
        assert read_to_the_end(pieces(stream, some), how) == row


def test_whatever_comes_ends_in_a_row_that_can_be_kept(tmp_path: Path) -> None:
    """All rows in one file: writing one for each answer would take a hundred times as long."""
    rows: list[RequestRow] = []

    @settings(max_examples=200)
    @given(streams, odd, cuts, machines)
    def answer(stream: bytes, body: bytes, some: list[int], how: dict[str, Any]) -> None:
        rows.append(read_to_the_end(pieces(stream, some), how))
        rows.append(read_on_after_leaving(pieces(stream, some), how))
        rows.append(read_in_one_piece(body, how))

    answer()
    assert len({row.outcome for row in rows}) > 2, "nothing much was tried"
    assert_kept(rows, RunFolder.create(tmp_path / "run"))


@settings(max_examples=50)
@given(st.sampled_from([400, 429, 503]), odd)
def test_a_refusal_of_any_kind_is_said_in_short(status: int, body: bytes) -> None:
    assert refusal_message(status, body).startswith(f"HTTP {status}")
    assert len(refusal_message(status, body)) < 400


def plain_events(stream: bytes) -> list[bytes]:
    """What the specification says, word by word, on a stream that is there as a whole."""
    lines = re.split(rb"\r\n|\n|\r", stream.removeprefix(b"\xef\xbb\xbf"))
    events, data = [], b""
    for line in lines[:-1]:  # the last has no end
        name, _, value = line.partition(b":")
        if not line and data:
            events.append(data[:-1])
            data = b""
        elif name == b"data":
            data += value.removeprefix(b" ") + b"\n"
    return events


parts_of_lines = st.sampled_from(
    [b"\n", b"\r", b"\n\n", b"\r\n", b"data", b":", b" ", b"data: ", b"\xef\xbb\xbf", b"id", b"\0"]
)


@settings(max_examples=200)
@given(st.lists(parts_of_lines | st.binary(max_size=3), max_size=30).map(b"".join), cuts)
def test_events_are_what_the_specification_makes_of_them(stream: bytes, cuts: list[int]) -> None:
    for some in (cuts, [], range(1, len(stream))):
        decoder = SSEDecoder()
        chunks = pieces(stream, [cut % (len(stream) + 1) for cut in some])
        assert [e for chunk in chunks for e in decoder.feed(chunk, 0)] == plain_events(stream)
