"""Answers good and bad, cut anywhere, and what their reader sees of them however it reads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import httpx

from harness.load.connection import Connection
from harness.load.http1 import MAX_HEADERS
from harness.load.receiver import Take
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

Seen = tuple[object, ...]
# Reads a part, and tells whether there may be more.
Reading = Callable[[Connection, Take], bool]


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = [0, *sorted({place % (len(data) + 1) for place in places}), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(ends) if a < b]


def waiting_for_more(connection: Connection, take: Take) -> bool:
    """As a user reads who does not mean to leave."""
    return connection.receive_each(take)


def asking_each_time(connection: Connection, take: Take) -> bool:
    """As one whose every receive changes something."""

    def take_and_ask(chunk: bytes, t_ns: int) -> bool:
        take(chunk, t_ns)
        return False

    return connection.receive_each(take_and_ask)


def thinking(connection: Connection, take: Take) -> bool:
    """As one who is about to leave, and waits so long."""
    chunk = connection.receive_within(30)
    if chunk is not None:
        take(chunk, connection.received_ns)
    return not connection.is_complete


def at_the_moment(connection: Connection, take: Take) -> bool:
    """As one whose time to leave has come; but they stay."""
    for chunk in connection.receive_present():
        take(chunk, connection.received_ns)
    return asking_each_time(connection, take)


WAYS: list[Reading] = [waiting_for_more, asking_each_time, thinking, at_the_moment]


def seen_by(connection: Connection, ways: Iterator[Reading]) -> Seen:
    """Status, headers, events, and how it ended."""
    events: list[bytes] = []
    times_ns = [0]
    error = None
    decoder = SSEDecoder()

    def take(chunk: bytes, t_ns: int) -> bool:
        events.extend(decoder.feed(chunk, t_ns))
        times_ns.append(t_ns)
        return True

    try:
        connection.receive_head(None)
        while next(ways)(connection, take):
            """There is more."""
    except httpx.TransportError as problem:
        error = f"{type(problem).__name__}: {problem}".partition("; it begins")[0]
    assert times_ns == sorted(times_ns)
    return (
        connection.status_code if connection.has_head else 0,
        connection.headers if connection.has_head else [],
        events,
        connection.is_complete,
        error,
    )
