"""However the bytes are cut, the answer is the same; whatever they are, it is an answer or an
httpx error."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from typing import cast

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.load.connection import Connection
from harness.load.http1 import MAX_HEAD_BYTES, Answer
from tests.harness.load.made_up_answers import (
    BAD,
    CHUNKED,
    EVERYTHING,
    GOOD,
    Seen,
    asking_each_time,
    cut,
    seen_by,
    waiting_for_more,
)


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


def over(*chunks: bytes, timeout_s: float = 30.0) -> Connection:
    return Connection(cast("socket.socket", Wire(iter(chunks))), timeout_s)


def seen_by_its_reader(chunks: list[bytes], *, asks_each_time: bool = True) -> Seen:
    ways = [asking_each_time if asks_each_time else waiting_for_more]
    return seen_by(over(*chunks), itertools.cycle(ways))


def read(connection: Connection) -> bytes:
    connection.receive_head(None)
    return all_of(connection)


def all_of(connection: Connection) -> bytes:
    return b"".join(iter(connection.receive, None))


@pytest.mark.parametrize("name", EVERYTHING)
def test_byte_by_byte_is_the_same_as_at_once(name: str) -> None:
    answer = EVERYTHING[name]
    bytewise = [answer[i : i + 1] for i in range(len(answer))]
    assert seen_by_its_reader(bytewise) == seen_by_its_reader([answer] if answer else [])


@given(st.sampled_from(list(EVERYTHING.values())), st.lists(st.integers(0, 4000), max_size=12))
def test_however_it_is_cut(answer: bytes, places: list[int]) -> None:
    at_once = seen_by_its_reader(cut(answer, []))
    assert seen_by_its_reader(cut(answer, places)) == at_once
    assert seen_by_its_reader(cut(answer, places), asks_each_time=False) == at_once


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
