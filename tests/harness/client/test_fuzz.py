"""Any bytes at all, cut anywhere: an answer ends in a row, and the row in a file.

The whole way of a stream is gone, from the bytes of a receive to a row that was read from parquet;
and the decoder of events is held against one that is slow and plain.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.client.reader import StreamReader
from harness.client.shards import ShardReader, ShardWriter
from harness.client.sse import Event, SSEDecoder
from harness.client.stream import StreamMachine
from harness.records import Outcome, RequestRow, Role, WireClose
from harness.store.run_folder import RunFolder, RunRows
from harness.workload.abandon import RequestSpec
from tests.harness.client.asking import SPEC, cut

FORMS = [
    b'{"choices":[{"index":%(index)b,"text":%(text)b,"finish_reason":%(finish)b}],%(usage)b}',
    b'{"choices":[{"text":%(text)b},{"index":%(index)b,"text":%(text)b}],%(usage)b}',
    b'{"choices":[{"delta":{"content":%(text)b},"finish_reason":%(finish)b}],%(usage)b}',
    b'{"choices":[{"message":{"reasoning_content":%(text)b}}],"usage":null}',
    b'{"choices":[{"finish_reason":"abort"}],"cancellation_info":{"reason":%(text)b}}',
    b'{"choices":[],%(usage)b,"other":%(text)b}',
    b'{"error":{"message":%(text)b,"code":%(count)b}}',
    b'{"choices":[{"delta":{"content":%(text)b,"finish_reason":%(finish)b}}],"x_groq":{%(usage)b}}',
    b'{"choices":[{"delta":{},"message":{"content":%(text)b},"finishReason":%(finish)b}]}',
    b'{"choices":[{"delta":{"content":%(text)b},"error":%(odd)b}],"error":%(odd)b}',
    b'{"message":{"content":%(text)b},"done":%(odd)b,"done_reason":%(finish)b}',
    b'{"base_resp":{"status_code":%(count)b,"status_msg":%(text)b},"code":%(odd)b}',
    b'{"type":%(finish)b,"event":%(text)b,"message":%(odd)b}',
    b'{"detail":%(odd)b,"data":{"error":%(odd)b},"ok":%(odd)b}',
    b"%(text)b",
]
FIELDS = {
    b"index": st.integers(0, 3).map(b"%d".__mod__),
    b"prompt": st.just(b"8"),
    b"count": (st.integers(0, 40) | st.integers(0, 12_000)).map(b"%d".__mod__),
    b"text": st.sampled_from([b'""', b'" a"', '"\u00e9\u2028"'.encode(), b'"client_timeout"']),
    b"finish": st.sampled_from([b"null", b"null", b'"length"', b'"abort"', b'"unknown"']),
    b"odd": st.sampled_from(
        [b"null", b"0", b"false", b"true", b'""', b"{}", b'{"code":0}', b'"oh"', b'["oh"]', b"500"]
    ),
}
NUMBERS = [-1, 2**31 - 1, 2**31, 5_000_000_000, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**40]
DEEP = b"[" * 2000 + b"]" * 2000
odd_values = st.binary(max_size=4) | st.sampled_from(
    [
        *(b"%d" % number for number in NUMBERS),
        *(b"1.5", b"1e999", b"NaN", b"9" * 5000, b'"%b"' % (b"x" * 301)),
        *(b'"caf\xe9"', b'"\xff"', b'{"\xff":1}', rb'"\ud800"', rb'"\u0000"'),
        *(b'"', b"}", b"[]", b"{}", b"null", DEEP),
    ]
)


def event_of(form: bytes, fields: dict[bytes, bytes], odd: dict[bytes, bytes]) -> bytes:
    fields |= odd
    usage = b'"usage":{"prompt_tokens":%(prompt)b,"completion_tokens":%(count)b}' % fields
    return form % (fields | {b"usage": usage})


def blocks(data: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    ends = st.sampled_from([b"\n", b"\r", b"\r\n"])
    return st.builds(lambda data, end: b"data: %b%b%b" % (data, end, end), data, ends)


fields = st.fixed_dictionaries(FIELDS)
odd_fields = st.dictionaries(st.sampled_from(sorted(FIELDS)), odd_values, min_size=1, max_size=2)
even = blocks(st.builds(event_of, st.sampled_from(FORMS[:4]), fields, st.just({})))
odd_events = st.builds(event_of, st.sampled_from(FORMS), fields, odd_fields)
lines = st.sampled_from(
    [
        *(b"engine died\n", b'error: {"message":"oh"}\n', b"error: oh\n\n", b'{"error":"oh"}\n'),
        *(b"note: a\n", b"event: done\n\n", b"event: timeout\n", b"data: [DONE]", b"data: [DON"),
        *(
            b'{\n "error": "oh"\n}\n',
            b"<html>\n",
            b": beat\n",
            b"data: oh no\r\r",
            b"event: end\r\n",
        ),
        *(b'data: "[DONE]"\n\n', b'{"done":true,"message":{}}\n', b"\n", b"plain words\n\n"),
    ]
)
parts = even | blocks(odd_events) | lines | blocks(st.just(b"[DONE]")) | st.binary(max_size=20)
streams = st.builds(
    lambda before, odd, after: b"".join([*before, odd, *after]),
    *(st.lists(even, max_size=4), blocks(odd_events) | lines, st.lists(parts, max_size=3)),
)
COMPLETE = b'data: {"choices":[{"text":"a","finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
cuts = st.lists(st.integers(0, 2000), max_size=12)
specs = st.builds(
    lambda **changes: replace(SPEC, **changes),
    role=st.sampled_from([Role.USER, Role.CANARY]),
    n=st.integers(1, 3),
    max_tokens=st.integers(1, 9),
)
hows = st.fixed_dictionaries({"continuous_usage": st.booleans(), "usage_per_choice": st.booleans()})


def row_of(
    received: Sequence[bytes],
    spec: RequestSpec,
    how: dict[str, Any],
    leaves_after: int | None = None,
) -> RequestRow:
    """The row of an answer of which all that came, came at one time."""
    stream = StreamMachine(spec, sent_ns=2, **how)
    stream.headers(200)
    reader = StreamReader(stream, None)
    for number, chunk in enumerate(received):
        if number == leaves_after and stream.can_leave:
            stream.leave(3, think_ns=0, wire_close=WireClose.FIN)
        reader.read(chunk, 3)
    if stream.outcome in (None, Outcome.ABANDONED):
        reader.read_rest(4)
    if stream.outcome in (None, Outcome.ABANDONED):
        stream.body_ended(4)
    return stream.row()


def row_in_one_piece(body: bytes, how: dict[str, Any]) -> RequestRow:
    stream = StreamMachine(SPEC, sent_ns=2, **how)
    stream.headers(200)
    stream.answer(body, 3)
    return stream.row()


@settings(max_examples=80)
@given(streams, cuts, specs, hows)
def test_however_it_is_cut_the_row_is_the_same(
    stream: bytes, places: list[int], spec: RequestSpec, how: dict[str, Any]
) -> None:
    row = row_of([stream], spec, how)
    for some in (places, range(min(len(stream), 300))):
        assert row_of(cut(stream, some), spec, how) == row


def test_whatever_comes_ends_in_a_row_that_can_be_kept(tmp_path: Path) -> None:
    """All rows in one file, by way of a shard: one file for each would take a hundred times as
    long."""
    rows: list[RequestRow] = []

    @settings(max_examples=200)
    @given(streams, odd_events, cuts, specs, hows, st.integers(0, 12))
    @example(COMPLETE, b"{}", [], SPEC, {"continuous_usage": False, "usage_per_choice": False}, 0)
    def answer(
        stream: bytes,
        body: bytes,
        some: list[int],
        spec: RequestSpec,
        how: dict[str, Any],
        leaves_after: int,
    ) -> None:
        received = cut(stream, some)
        rows.append(row_of(received, spec, how))
        rows.append(row_of(received, spec, how, leaves_after))
        rows.append(row_in_one_piece(body, how))

    answer()
    assert {row.outcome for row in rows} >= {Outcome.COMPLETED, Outcome.ABANDONED, Outcome.FAILED}
    folder = RunFolder.create(tmp_path / "run")
    (folder.path / "manifest.json").write_text("{}")
    with ShardWriter(folder.shards, RequestRow, 1) as shard:
        for row in rows:
            shard.write(row)
    folder.write_rows(RunRows(requests=ShardReader(folder.shards, RequestRow).read_new()))
    table = pq.read_table(folder.path / "requests.parquet")
    assert table.to_pylist() == [msgspec.to_builtins(row) for row in rows]
    frame = folder.frames().requests
    assert [list(of_one) for of_one in frame["event_tokens"]] == [row.event_tokens for row in rows]


def plain_events(stream: bytes) -> list[Event]:
    """The specification, word by word, on a stream that is there as a whole. But an event with a
    name is one without data, too."""
    lines = re.split(rb"\r\n|\n|\r", stream.removeprefix(b"\xef\xbb\xbf"))
    events, kind, data = [], b"", b""
    for line in lines[:-1]:  # the last has no end
        name, _, value = line.partition(b":")
        if not line and (data or kind):
            events.append((kind, data[:-1]))
            kind, data = b"", b""
        elif name == b"event":
            kind = value.removeprefix(b" ")
        elif name == b"data":
            data += value.removeprefix(b" ") + b"\n"
    return events


parts_of_lines = st.sampled_from(
    [
        b"\n",
        b"\r",
        b"\n\n",
        b"\r\n",
        b"data",
        b"event",
        b":",
        b" ",
        b"data: ",
        b"\xef\xbb\xbf",
        b"id",
        b"\0",
    ]
)


@settings(max_examples=200)
@given(st.lists(parts_of_lines | st.binary(max_size=3), max_size=30).map(b"".join), cuts)
def test_events_are_what_the_specification_makes_of_them(stream: bytes, places: list[int]) -> None:
    for some in (places, [], range(len(stream))):
        decoder = SSEDecoder()
        chunks = cut(stream, some)
        assert [e for chunk in chunks for e in decoder.feed(chunk, 0)] == plain_events(stream)
