"""The decoder against the examples of the specification, and its bounds; `test_fuzz` cuts streams
in any way."""

import pytest

from harness.client.sse import MAX_STRAY_BYTES, STRAY, EndlessEventError, Event, SSEDecoder


def data_of(decoder: SSEDecoder, chunk: bytes, t_ns: int = 0) -> list[bytes]:
    return [data for _, data in decoder.feed(chunk, t_ns)]


def decode(*chunks: bytes) -> list[bytes]:
    decoder = SSEDecoder()
    return [data for chunk in chunks for data in data_of(decoder, chunk)]


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        # The examples of the specification, in its order.
        (b"data: YHOO\ndata: +2\ndata: 10\n\n", [b"YHOO\n+2\n10"]),
        (
            b": test stream\n\ndata: first event\nid: 1\n\n"
            b"data:second event\nid\n\ndata:  third event\n\n",
            [b"first event", b"second event", b" third event"],
        ),
        # The last block is discarded: no blank line follows it.
        (b"data\n\ndata\ndata\n\ndata:", [b"", b"\n"]),
        (b"data:test\n\ndata: test\n\n", [b"test", b"test"]),
        # Heartbeats between events, and in the middle of one.
        (b": heartbeat\n\ndata: a\n: heartbeat\ndata: b\n\n: heartbeat\n\n", [b"a\nb"]),
        # Other line ends, a byte order mark, other fields.
        (b"data: a\r\n\r\ndata: b\r\rdata: c\n\n", [b"a", b"b", b"c"]),
        (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
        (b"id: 1\nretry: 10\n\n", []),
        (b"dataset: a\n\n", []),
        (b": keep-alive\n\n\n\n", []),
        (b'data: {"a": "x: y"}\n\n', [b'{"a": "x: y"}']),
        ("data: é\x0b\x0c\x1c\u2028\n\n".encode(), ["é\x0b\x0c\x1c\u2028".encode()]),
    ],
)
def test_streams_of_the_specification(stream: bytes, events: list[bytes]) -> None:
    assert decode(stream) == events
    assert decode(*(stream[i : i + 1] for i in range(len(stream)))) == events


NAMED = [
    (b"event: ping\nretry: 10\n\n", [(b"ping", b"")]),
    (b"event: ping\ndata: a\n\n", [(b"ping", b"a")]),
    (b"event:ping\ndata: a\ndata: b\n\ndata: c\n\n", [(b"ping", b"a\nb"), (b"", b"c")]),
    (b"data: a\nevent: one\nevent: other\n\n", [(b"other", b"a")]),
    (b"event: one\nevent\ndata: a\n\nevents: no\n\n", [(b"", b"a")]),
    (b"event: a\r\ndata: b\r\n\r\ndata: c\r\n\r\n", [(b"a", b"b"), (b"", b"c")]),
]


@pytest.mark.parametrize(("stream", "events"), NAMED)
def test_an_event_has_its_own_name_alone(stream: bytes, events: list[Event]) -> None:
    whole, drops = SSEDecoder(), SSEDecoder()
    assert whole.feed(stream, 0) == events
    one_by_one = (drops.feed(stream[i : i + 1], 0) for i in range(len(stream)))
    assert [event for some in one_by_one for event in some] == events


def test_a_name_that_is_pending_is_that_of_the_next_data() -> None:
    decoder = SSEDecoder()
    assert decoder.feed(b"event: error\n", 0) == []
    assert decoder.feed(b"data: a\n\n", 0) == [(b"error", b"a")]


@pytest.mark.parametrize(
    ("answer", "events"),
    [
        (b'{"error": {"message": "no"}}', [(STRAY, b'{"error": {"message": "no"}}')]),
        (b'{\n  "error": "no"\n}\n', [(STRAY, b'{\n  "error": "no"\n}')]),
        (b"<html>" + b"a" * 10_000, [(STRAY, b"<html>" + b"a" * 10_000)]),
        (b"a\nb\n\nc\ndata: d\n\nx", [(STRAY, b"a\nb"), (STRAY, b"c"), (b"", b"d"), (STRAY, b"x")]),
        (b"data: a\nstray\n: comment\n\nid: 7\n", [(STRAY, b"stray"), (b"", b"a")]),
        (b": comment\nid: 7\ndata: a\n\ndata: b", [(b"", b"a"), (b"", b"b")]),
        (b"data: a\n\nevent: error\n", [(b"", b"a"), (b"error", b"")]),
        (b"data: a\n\ndat", [(b"", b"a")]),
        (b"data: a\n\nevent", [(b"", b"a")]),
        (b"data: [DONE]\r", [(b"", b"[DONE]")]),
        (b"", []),
    ],
)
def test_lines_of_no_event_and_an_event_without_its_end_come_in_their_place(
    answer: bytes, events: list[Event]
) -> None:
    for size in (1, 7, len(answer) or 1):
        decoder, found = SSEDecoder(keeps_strays=True), []
        for first in range(0, len(answer), size):
            found += decoder.feed(answer[first : first + size], 0)
        assert found + decoder.end() == events


def test_lines_of_no_event_are_kept_up_to_a_bound() -> None:
    decoder = SSEDecoder(keeps_strays=True)
    for _ in range(300):
        assert decoder.feed(b"a" * 9_999 + b"\n", 0) == []
    ((name, data),) = decoder.feed(b"\n", 0)
    assert name == STRAY
    assert MAX_STRAY_BYTES - 10_000 < len(data) <= MAX_STRAY_BYTES
    assert decoder.feed(b"again\n\n", 0) == [(STRAY, b"again")]


def test_an_event_comes_with_the_bytes_that_complete_it() -> None:
    decoder = SSEDecoder()
    assert data_of(decoder, b"data: a\n\ndata: b\n", 1) == [b"a"]
    assert decoder.feed(b"", 2) == []
    assert data_of(decoder, b"\ndata: c\r\n\r", 3) == [b"b", b"c"]
    assert decoder.feed(b"\n", 4) == []  # the rest of a CRLF is not a second blank line
    assert data_of(decoder, b"data: d\n\n", 5) == [b"d"]


@pytest.mark.parametrize(
    "endless",
    [
        b"data: aaaa\n",
        b"data:\n",
        b"data\n",
        b"a",
        b": a",
        b"data: %b\n\n" % (b"a" * 1000),
    ],
    ids=["lines", "empty values", "bare names", "one line", "a comment", "at once"],
)
def test_an_endless_event_is_refused(endless: bytes) -> None:
    decoder = SSEDecoder(max_event_bytes=1000)
    for _ in range(1000 // len(endless)):
        assert decoder.feed(endless, 0) == []
    with pytest.raises(EndlessEventError, match="more than 1000 bytes"):
        decoder.feed(endless * 1000, 0)


def test_lines_that_come_in_pieces_count_as_much() -> None:
    decoder = SSEDecoder(max_event_bytes=1000)
    for _ in range(199):
        assert decoder.feed(b"data: aa", 0) == decoder.feed(b"aa\n", 0) == []
    with pytest.raises(EndlessEventError):
        decoder.feed(b"data: aa", 0)


def test_the_bound_is_of_one_event() -> None:
    decoder = SSEDecoder(max_event_bytes=20)
    for _ in range(100):
        for piece in (b": a comm", b"ent\nda", b"ta: aaaa", b"aaaa\n"):
            assert decoder.feed(piece, 0) == []
        assert data_of(decoder, b"\n") == [b"aaaaaaaa"]


class TestInDrops:
    """However little comes at a time, an event comes to an end."""

    @pytest.mark.parametrize("drop", [b"a", b"data: a\n", b": a", b"data:\n: beat\n"])
    def test_an_event_without_end(self, drop: bytes) -> None:
        decoder = SSEDecoder(max_event_ns=100)
        decoder.feed(b"data: whole\n\n", 7)
        for t_ns in range(10, 111, 10):
            assert decoder.feed(drop, t_ns) == []
        with pytest.raises(EndlessEventError, match="had not come to an end 1e-07 s after"):
            decoder.feed(drop, 111)

    @pytest.mark.parametrize(
        "drops",
        [
            (b"data: a\n", b"\n"),
            (b"data: a\n\nda", b"ta: b\n\ndata: c", b"\n\ndata"),
            (b": be", b"at\n"),
            (b"at\n: be",),
            (b"\n",),
        ],
    )
    def test_those_that_end_have_all_the_time(self, drops: tuple[bytes, ...]) -> None:
        decoder = SSEDecoder(max_event_ns=100)
        for t_ns in range(0, 3000, 50):
            decoder.feed(drops[t_ns // 50 % len(drops)], t_ns)
