"""However the bytes are cut, over TLS too, and however their user reads just then, the answer is
the same; whatever they are, it is an answer or an httpx error.

(Nothing is patched here: only gevent's own sockets wait in its hub.)
"""

import fcntl
import itertools
import socket
import ssl
import termios
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import cast

import gevent  # noqa: TID251
import httpx
import pytest
from gevent import socket as gevent_socket  # noqa: TID251
from hypothesis import given
from hypothesis import strategies as st

from harness.client.connect import Tls
from harness.client.connection import Http1Connection
from harness.client.http1 import MAX_HEAD_BYTES, MAX_HEADERS, Http1Response
from harness.client.receiver import Take
from harness.client.sse import SSEDecoder
from tests.harness.client.asking import body_of, cut
from tests.harness.client.conftest import Secrets
from tests.harness.client.test_connect import agreed

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
EVENTS = b"".join(b'data: {"n":%d}\r\n\r\n' % n for n in range(4)) + b": beat\n\ndata: \xff\n\n"


def chunked(body: bytes, *, size: int, end: bytes = b"0\r\n\r\n") -> bytes:
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x;x=y\r\n%b\r\n" % (len(part), part) for part in parts) + end


GOOD = {
    "chunked": CHUNKED + chunked(EVENTS, size=7),
    "trailers": CHUNKED + chunked(EVENTS, size=50, end=b"0\r\na: b\r\nc:\r\n\r\n"),
    "length": OK + b"content-length: %d\r\n\r\n" % len(EVENTS) + EVENTS,
    "more than declared": OK + b"content-length: 18\r\n\r\n" + EVENTS,
    "a second answer": (OK + b"content-length: 0\r\n\r\n") * 2,
    "until the end": b"HTTP/1.0 200 OK\r\na:\r\nb: c\r\n\r\n" + EVENTS,
    "informed before": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    + (OK + b"\r\n" + EVENTS),
    "no content": b"HTTP/1.1 204 No Content\r\nx: y\r\n\r\n",
    "not modified": b"HTTP/1.1 304 Not Modified\r\ncontent-length: 9\r\n\r\n",
    "redirect": b"HTTP/1.1 307 X\r\nlocation: /there\r\ncontent-length: 2\r\n\r\nhi",
    "no coding": CHUNKED[:-2] + b"content-encoding: None\r\n\r\n" + chunked(EVENTS, size=7),
    "encoded refusal": b"HTTP/1.1 503 X\r\ncontent-encoding: gzip\r\n\r\n\x1f\x8b",
}
BAD = {
    "nothing": (b"", "before the answer was complete"),
    "half a head": (OK + b"content-", "before the answer was complete"),
    "only a hint": (b"HTTP/1.1 103 Early Hints\r\n\r\n", "before the answer was complete"),
    "half a body": (GOOD["length"][:-3], "before the answer was complete"),
    "no last chunk": (GOOD["chunked"][:-5], "before the answer was complete"),
    "not a chunk": (CHUNKED + chunked(EVENTS, size=9, end=b"zz\r\n"), "not HTTP/1.1: Invalid"),
    "two framings": (CHUNKED[:-2] + b"content-length: 3\r\n\r\nabc", "not HTTP/1.1: Content-Len"),
    "a bad status": (b"HTTP/1.1 2xx OK\r\n\r\n", "not HTTP/1.1: Invalid status"),
    "tls": (b"\x15\x03\x03\x00\x02\x02\x46", "not HTTP/1.1: Expected HTTP/"),
    "switched": (
        b"HTTP/1.1 101 X\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\nabc",
        "another protocol",
    ),
    "gzip": (OK + b"content-encoding: gzip\r\n\r\n\x1f\x8b", "content-encoding: gzip"),
    "zipped chunks": (
        OK + b"transfer-encoding: gzip, chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
        "transfer-encoding: gzip, chunked",
    ),
    "endless headers": (OK + b"a: b\r\n" * (MAX_HEADERS + 1) + b"\r\n", "headers without end"),
}
EVERYTHING = {**GOOD, **{name: answer for name, (answer, _) in BAD.items()}}
ANSWERS = st.sampled_from(list(EVERYTHING.values()))
PLACES = st.lists(st.integers(0, 4000), max_size=12)

Seen = tuple[object, ...]
# Reads a part, and returns whether there may be more.
Reading = Callable[[Http1Connection, Take], bool]


def asking_each_time(connection: Http1Connection, take: Take) -> bool:
    """As a user whose every receive changes something."""
    return connection.receive_each(lambda chunk, t_ns: take(chunk, t_ns) and False)


def thinking(connection: Http1Connection, take: Take) -> bool:
    """As a user that is about to leave, and waits so long."""
    if (chunk := connection.receive_within(30)) is not None:
        take(chunk, connection.received_ns)
    return not connection.is_complete


def at_the_moment(connection: Http1Connection, take: Take) -> bool:
    """As a user whose time to leave has come; but it stays."""
    for chunk in connection.receive_present():
        take(chunk, connection.received_ns)
    return asking_each_time(connection, take)


READINGS: list[Reading] = [Http1Connection.receive_each, asking_each_time, thinking, at_the_moment]


def seen_by(connection: Http1Connection, readings: Iterator[Reading]) -> Seen:
    """Status, headers, events, and how it ended."""
    events: list[bytes] = []
    times_ns = [0]
    error = None
    decoder = SSEDecoder()

    def take(chunk: bytes, t_ns: int) -> bool:
        assert t_ns == connection.received_ns
        events.extend(data for _, data in decoder.feed(chunk, t_ns))
        times_ns.append(t_ns)
        return True

    try:
        connection.receive_head()
        while next(readings)(connection, take):
            """There is more."""
    except httpx.TransportError as problem:
        error = f"{type(problem).__name__}: {problem}".partition("; it begins")[0]
    assert times_ns == sorted(times_ns)
    head = (connection.status_code, connection.headers) if connection.has_head else (0, [])
    return *head, events, connection.is_complete, error


class Wire:
    """A socket from which this comes, and then the end."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks

    def settimeout(self, _seconds: float | None) -> None:
        pass

    def recv(self, _size: int) -> bytes:
        return next(self._chunks, b"")


def over(*chunks: bytes, timeout_s: float = 30.0) -> Http1Connection:
    return Http1Connection(cast("socket.socket", Wire(iter(chunks))), timeout_s)


def seen(*chunks: bytes, reading: Reading = asking_each_time) -> Seen:
    return seen_by(over(*chunks), itertools.repeat(reading))


damages = st.lists(st.tuples(st.integers(0, 4000), st.binary(max_size=3)), max_size=4)


@given(ANSWERS | st.binary(max_size=200), damages, PLACES)
def test_whatever_it_is_nothing_but_httpx_errors(
    answer: bytes, changes: list[tuple[int, bytes]], places: list[int]
) -> None:
    for place, new in changes:
        place %= len(answer) + 1
        answer = answer[:place] + new + answer[place + len(new) :]
    at_once = seen(*cut(answer, []))
    assert seen(*cut(answer, places)) == seen(*cut(answer, range(len(answer)))) == at_once


def sent_in(
    pieces: Sequence[bytes], readings: Sequence[Reading], *, tls: Tls | None = None
) -> Seen:
    """A reader's view of these pieces, each a receive of its own, over a socket as in a load."""
    near, far = gevent_socket.socketpair()

    def send() -> None:
        for piece in pieces:
            far.sendall(piece)
            while fcntl.ioctl(near.fileno(), termios.FIONREAD, bytes(4)) != bytes(4):
                gevent.idle()  # the reader comes first
        far.shutdown(socket.SHUT_WR)

    with near, far:
        sending = gevent.spawn(send)
        connection = Http1Connection(near, 30.0, tls=tls)
        try:
            return seen_by(connection, itertools.cycle(readings))
        finally:
            sending.kill()
            sending.get()
            connection.close()


@cache
def at_once(answer: bytes) -> Seen:
    return sent_in([answer] if answer else [], READINGS[:1])


some_readings = st.lists(st.sampled_from(READINGS), min_size=1, max_size=4)


@pytest.mark.parametrize("is_tls", [False, True])
@given(ANSWERS, PLACES, PLACES, some_readings, st.booleans())
def test_over_gevents_sockets(
    secrets: Secrets,
    is_tls: bool,
    answer: bytes,
    records: list[int],
    places: list[int],
    readings: list[Reading],
    says_so: bool,
) -> None:
    """TLS is cut into records, and these cut again; the server says that it ends, or does not."""
    if not is_tls:
        assert sent_in(cut(answer, places), readings) == at_once(answer)
        return
    ours, peer = agreed(secrets)
    for piece in cut(answer, records):
        peer.end.write(piece)
    if says_so:
        with pytest.raises(ssl.SSLWantReadError):  # it does not wait for our own last word
            peer.end.unwrap()
    assert sent_in(cut(peer.sent(), places), readings, tls=ours) == at_once(answer)


@pytest.mark.parametrize("name", GOOD)
def test_answers(name: str) -> None:
    status, headers, events, is_complete, error = seen(GOOD[name])
    assert (is_complete, error) == (True, None)
    if status == 200 and name not in ("more than declared", "a second answer"):
        assert events == [b'{"n":%d}' % n for n in range(4)] + [b"\xff"]
    if name == "trailers":
        assert headers == [(b"transfer-encoding", b"chunked")]
    if name == "informed before":
        assert headers == []


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_answer(name: str) -> None:
    answer, complaint = BAD[name]
    error = str(seen(answer)[-1])
    assert error.startswith("RemoteProtocolError: ")
    assert complaint in error
    if name == "not a chunk":  # the good bytes before it are handed over
        assert len(cast("list[bytes]", seen(answer)[2])) == 5


def test_tls_where_none_is_spoken() -> None:
    with pytest.raises(httpx.RemoteProtocolError, match="the URL should begin with https://"):
        over(BAD["tls"][0]).receive_head()


@pytest.mark.parametrize("name", ["chunked", "trailers", "length", "no content", "redirect"])
def test_what_may_go_on(name: str) -> None:
    good = GOOD[name]
    closing = good.replace(b"\r\n", b"\r\nconnection: close\r\n", 1)
    older = good.replace(b"HTTP/1.1", b"HTTP/1.0")
    for answer, may_go_on in ((good, True), (good + b"x", False), (closing, False), (older, False)):
        connection = over(answer)
        connection.receive_head()
        body_of(connection)
        assert connection.may_go_on is may_go_on


@pytest.mark.parametrize(
    "head",
    [
        OK + b"a: " + b"b" * MAX_HEAD_BYTES,
        b"HTTP/1.1 103 X\r\na: %b\r\n\r\nHTTP/1.1 200 OK\r\na: %b" % ((b"b" * 40_000,) * 2),
    ],
    ids=["one header", "hints and headers together"],
)
def test_a_head_is_bounded_in_bytes(head: bytes) -> None:
    with pytest.raises(httpx.RemoteProtocolError, match="headers without end: more than 65536"):
        Http1Response().parse(head + b"\r\ncontent-length: 0\r\n\r\n")


ENDLESS = [
    (OK + b"a: ", b"1", "headers"),
    (OK, b"a: b\r\n", "headers"),
    (b"HTTP/1.1 200 ", b"1", "headers"),
    (b"HTTP/1.1 103 X\r\n\r\n", b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n", "headers"),
    (CHUNKED + b"5;a=", b"x", "framing"),
    (CHUNKED + b"0\r\n", b"a: b\r\n", "framing"),
    (CHUNKED + b"5\r\nhello\r\n0\r\na: ", b"x", "framing"),
]


@pytest.mark.parametrize(("beginning", "drop", "what"), ENDLESS)
def test_what_has_no_end_is_given_up(beginning: bytes, drop: bytes, what: str) -> None:
    """By its bytes; or by its time, when each drop is in time for the next."""
    flood = over(beginning, *itertools.repeat(drop * 3000, 1000))
    with pytest.raises(httpx.RemoteProtocolError, match=f"{what} without end"):
        read(flood)
    assert flood.received_bytes < 4 * MAX_HEAD_BYTES + len(drop) * 3000
    drip = over(beginning, *[drop] * 20, timeout_s=0.0)  # here there is no time at all
    with pytest.raises(httpx.ReadTimeout, match=f"the {what} had not come to an end"):
        read(drip)


def read(connection: Http1Connection) -> bytes:
    connection.receive_head()
    return body_of(connection)
