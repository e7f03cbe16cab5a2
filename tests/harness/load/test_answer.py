"""However the bytes are cut, the answer is the same; whatever they are, it is an answer or an
httpx error."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from typing import cast

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.load.answer import MAX_HEAD_BYTES, MAX_HEADERS, Answer
from harness.load.connection import Connection
from harness.load.sse import SSEDecoder

EVENTS = b"".join(b'data: {"n":%d}\r\n\r\n' % n for n in range(4)) + b": beat\n\ndata: \xff\n\n"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def chunked(body: bytes, *, size: int, end: bytes = b"0\r\n\r\n") -> bytes:
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x;x=y\r\n%b\r\n" % (len(part), part) for part in parts) + end


GOOD = {
    "chunked": CHUNKED + chunked(EVENTS, size=7),
    "trailers": CHUNKED + chunked(EVENTS, size=50, end=b"0\r\na: b\r\nc:\r\n\r\n"),
    "length": b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(EVENTS) + EVENTS,
    "more than declared": b"HTTP/1.1 200 OK\r\ncontent-length: 18\r\n\r\n" + EVENTS,
    "a second answer": b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n" * 2,
    "until the end": b"HTTP/1.0 200 OK\r\na:\r\nb: c\r\n\r\n" + EVENTS,
    "informed before": b"HTTP/1.1 100 Continue\r\n\r\n"
    b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\n\r\n" + EVENTS,
    "no content": b"HTTP/1.1 204 No Content\r\nx: y\r\n\r\n",
    "not modified": b"HTTP/1.1 304 Not Modified\r\ncontent-length: 9\r\n\r\n",
    "redirect": b"HTTP/1.1 307 X\r\nlocation: /there\r\ncontent-length: 2\r\n\r\nhi",
    "encoded refusal": b"HTTP/1.1 503 X\r\ncontent-encoding: gzip\r\n\r\n\x1f\x8b",
}
BAD = {
    "nothing": (b"", "before the answer was complete"),
    "half a head": (b"HTTP/1.1 200 OK\r\ncontent-", "before the answer was complete"),
    "only a hint": (b"HTTP/1.1 103 Early Hints\r\n\r\n", "before the answer was complete"),
    "half a body": (GOOD["length"][:-3], "before the answer was complete"),
    "no last chunk": (GOOD["chunked"][:-5], "before the answer was complete"),
    "not a chunk": (CHUNKED + chunked(EVENTS, size=9, end=b"zz\r\n"), "not HTTP/1.1: Invalid"),
    "a chunk too long": (CHUNKED + b"3\r\nabcd\r\n", "not HTTP/1.1: Expected"),
    "a huge chunk": (CHUNKED + b"f" * 20 + b"\r\n", "not HTTP/1.1: Chunk size overflow"),
    "two framings": (CHUNKED[:-2] + b"content-length: 3\r\n\r\nabc", "not HTTP/1.1: Content-Len"),
    "two lengths": (
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
        "not HTTP/1.1",
    ),
    "ssh": (b"SSH-2.0-OpenSSH_9.6\r\n", "not HTTP/1.1: Expected HTTP/"),
    "a bad header": (b"HTTP/1.1 200 OK\r\n\xff\xfe\r\n\r\n", "not HTTP/1.1: Invalid header"),
    "a bad status": (b"HTTP/1.1 2xx OK\r\n\r\n", "not HTTP/1.1: Invalid status"),
    "http/2": (b"\x00\x00\x12\x04\x00\x00\x00\x00\x00", "not HTTP/1.1"),
    "tls": (b"\x15\x03\x03\x00\x02\x02\x46", "not HTTP/1.1: Expected HTTP/"),
    "switched": (
        b"HTTP/1.1 101 X\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\nabc",
        "another protocol",
    ),
    "gzip": (
        b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\n\r\n\x1f\x8b",
        "content-encoding: gzip",
    ),
    "zipped chunks": (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
        "transfer-encoding: gzip, chunked",
    ),
    "endless headers": (
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * (MAX_HEADERS + 1) + b"\r\n",
        "headers without end",
    ),
}
EVERYTHING = {**GOOD, **{name: answer for name, (answer, _) in BAD.items()}}


class Wire:
    """A socket from which this comes, and then the end."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks

    def settimeout(self, _seconds: float | None) -> None:
        pass

    def recv(self, _size: int) -> bytes:
        return next(self._chunks, b"")

    def close(self) -> None:
        pass


Seen = tuple[object, ...]


def over(*chunks: bytes, timeout_s: float = 30.0) -> Connection:
    return Connection(cast("socket.socket", Wire(iter(chunks))), timeout_s)


def seen_by_its_reader(chunks: list[bytes], *, asks_each_time: bool = True) -> Seen:
    """Status, headers, events, and how it ended."""
    connection, events, error = over(*chunks), [], None
    decoder = SSEDecoder()

    def take(chunk: bytes, t_ns: int) -> bool:
        events.extend(decoder.feed(chunk, t_ns))
        return not asks_each_time

    try:
        connection.receive_head(None)
        while connection.receive_each(take):
            """There is more."""
    except httpx.TransportError as problem:
        error = f"{type(problem).__name__}: {problem}".partition("; it begins")[0]
    return (
        connection.status_code if connection.has_head else 0,
        connection.headers if connection.has_head else [],
        events,
        connection.is_complete,
        error,
    )


def read(connection: Connection) -> bytes:
    connection.receive_head(None)
    return all_of(connection)


def all_of(connection: Connection) -> bytes:
    return b"".join(iter(connection.receive, None))


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = [0, *sorted({place % (len(data) + 1) for place in places}), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(ends) if a < b]


@pytest.mark.parametrize("name", EVERYTHING)
def test_byte_by_byte_is_the_same_as_at_once(name: str) -> None:
    answer = EVERYTHING[name]
    bytewise = [answer[i : i + 1] for i in range(len(answer))]
    assert seen_by_its_reader(bytewise) == seen_by_its_reader([answer] if answer else [])


@settings(deadline=None)
@given(st.sampled_from(list(EVERYTHING.values())), st.lists(st.integers(0, 4000), max_size=12))
def test_however_it_is_cut(answer: bytes, places: list[int]) -> None:
    at_once = seen_by_its_reader(cut(answer, []))
    assert seen_by_its_reader(cut(answer, places)) == at_once
    assert seen_by_its_reader(cut(answer, places), asks_each_time=False) == at_once


@settings(deadline=None)
@given(
    st.sampled_from(list(EVERYTHING.values())),
    st.lists(st.tuples(st.integers(0, 4000), st.binary(max_size=3)), min_size=1, max_size=4),
    st.lists(st.integers(0, 4000), max_size=6),
)
def test_whatever_it_is_nothing_but_httpx_errors(
    answer: bytes, changes: list[tuple[int, bytes]], places: list[int]
) -> None:
    for place, new in changes:
        place %= len(answer) + 1
        answer = answer[:place] + new + answer[place + len(new) :]
    assert seen_by_its_reader(cut(answer, places)) == seen_by_its_reader(cut(answer, []))


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_noise(noise: bytes) -> None:
    assert seen_by_its_reader([noise])[-1] is not None


@pytest.mark.parametrize("name", GOOD)
def test_answers(name: str) -> None:
    status, _, events, is_complete, error = seen_by_its_reader([GOOD[name]])
    assert (is_complete, error) == (True, None)
    if status == 200 and name not in ("more than declared", "a second answer"):
        assert events == [b'{"n":%d}' % n for n in range(4)] + [b"\xff"]


@pytest.mark.parametrize("name", ["chunked", "trailers", "length", "no content", "redirect"])
def test_what_may_go_on(name: str) -> None:
    closing = GOOD[name].replace(b"\r\n", b"\r\nconnection: close\r\n", 1)
    for answer, may_go_on in ((GOOD[name], True), (GOOD[name] + b"x", False), (closing, False)):
        connection = over(answer)
        connection.receive_head(None)
        all_of(connection)
        assert connection.may_go_on is may_go_on


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\na: " + b"b" * MAX_HEAD_BYTES,
        b"HTTP/1.1 103 X\r\na: %b\r\n\r\nHTTP/1.1 200 OK\r\na: %b" % ((b"b" * 40_000,) * 2),
    ],
    ids=["one header", "hints and headers together"],
)
def test_a_head_is_bounded_in_bytes(head: bytes) -> None:
    answer = Answer()
    with pytest.raises(httpx.RemoteProtocolError, match="headers without end: more than 65536"):
        answer.parse(head + b"\r\ncontent-length: 0\r\n\r\n")


def test_trailers_and_hints_are_no_headers() -> None:
    assert seen_by_its_reader([GOOD["trailers"]])[1] == [(b"transfer-encoding", b"chunked")]
    assert seen_by_its_reader([GOOD["informed before"]])[1] == []


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_answer(name: str) -> None:
    answer, complaint = BAD[name]
    error = seen_by_its_reader([answer])[-1]
    assert isinstance(error, str)
    assert error.startswith("RemoteProtocolError: ")
    assert complaint in error


def test_tls_where_none_is_spoken() -> None:
    with pytest.raises(httpx.RemoteProtocolError, match="the URL should begin with https://"):
        over(BAD["tls"][0]).receive_head(None)


def test_what_was_good_before_it_is_handed_over() -> None:
    assert len(cast("list[bytes]", seen_by_its_reader([BAD["not a chunk"][0]])[2])) == 5


class TestWithoutEnd:
    @pytest.mark.parametrize(
        "beginning",
        [b"HTTP/1.1 200 OK\r\na: ", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 ", b"HTTP/1.1 200 "],
    )
    def test_a_head(self, beginning: bytes) -> None:
        connection = over(beginning, *itertools.repeat(b"1" * 4096, 1000))
        with pytest.raises(httpx.RemoteProtocolError):
            connection.receive_head(None)
        assert connection.received_bytes < 4 * MAX_HEAD_BYTES

    def test_informational_answers(self) -> None:
        hints = itertools.repeat(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" * 10)
        with pytest.raises(httpx.RemoteProtocolError, match="headers without end"):
            over(*itertools.islice(hints, 10_000)).receive_head(None)

    @pytest.mark.parametrize(
        "beginning", [b"5;a=", b"5\r\nhello\r\n0\r\n", b"5\r\nhello\r\n0\r\na: "]
    )
    def test_framing(self, beginning: bytes) -> None:
        more = b"a: b\r\n" * 500 if beginning.endswith(b"0\r\n") else b"x" * 3000
        connection = over(CHUNKED, beginning, *itertools.repeat(more, 1000))
        connection.receive_head(None)
        with pytest.raises(httpx.RemoteProtocolError, match="framing without end"):
            all_of(connection)


@pytest.mark.parametrize(
    ("beginning", "drop", "what"),
    [
        (b"HTTP/1.1 200 ", b"a", "headers"),
        (b"HTTP/1.1 200 OK\r\n", b"a: b\r\n", "headers"),
        (b"HTTP/1.1 103 X\r\n\r\n", b"HTTP/1.1 103 X\r\n\r\n", "headers"),
        (CHUNKED + b"5;x=", b"y", "framing"),
        (CHUNKED + b"0\r\n", b"a: b\r\n", "framing"),
    ],
)
def test_what_comes_in_drops_must_come_to_an_end_in_time(
    beginning: bytes, drop: bytes, what: str
) -> None:
    """Each drop is in time; together they are not (here there is no time at all)."""
    connection = over(beginning, *[drop] * 20, timeout_s=0.0)
    with pytest.raises(httpx.ReadTimeout, match=f"the {what} had not come to an end"):
        read(connection)
