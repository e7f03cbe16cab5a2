"""One response as its bytes come: parsed, handed over whole, and timed.

Each receive is passed on at once, so whatever has not been handed over is still in the kernel,
where it can be counted (`unread_bytes`). How a user leaves is not decided here: see
`harness.load.leaving`.
"""

import fcntl
import socket
import ssl
import struct
import termios
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

import httptools
import httpx

from harness.load.client_process import ClientProcess

_RECEIVE_BYTES: Final = 65536
_RESET: Final = struct.pack("ii", 1, 0)  # linger for no time: closing throws all away


class PatienceEndedError(Exception):
    """The user's patience ended before the headers came; the connection is still open."""

    def __init__(self, connection: "Connection") -> None:
        super().__init__("out of patience before the headers, as planned")
        self.connection = connection


class _LimitPassedError(httpx.ReadTimeout):
    """What had to be there by now is not."""


class Limit(NamedTuple):
    """When something must have come, on the monotonic clock, and what to say if it has not."""

    at_ns: int
    complaint: str

    def left_s(self) -> float:
        """Raises httpx.ReadTimeout when it is over."""
        self.check()
        return (self.at_ns - time.perf_counter_ns()) / 1e9

    def check(self) -> None:
        """Raises httpx.ReadTimeout when it is over."""
        if time.perf_counter_ns() >= self.at_ns:
            raise _LimitPassedError(self.complaint)


def reset_on_close(sock: socket.socket) -> None:
    """Let closing send a reset, whatever has been read."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


class Connection(httpx.SyncByteStream):
    """One response being received. `leaves_at_ns` is when a user without more patience leaves.

    Its state: `_body`, bytes parsed but not yet handed over (empty between calls), and how far the
    response has come. The parser calls the `on_` methods. `limit` may be changed at any time: it
    holds beside `timeout_s`, the longest wait for the next bytes.
    """

    def __init__(
        self,
        sock: socket.socket,
        timeout_s: float | None,
        *,
        limit: Limit | None = None,
        owner: ClientProcess | None = None,
    ) -> None:
        self.status_code = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.has_head = False
        self.is_complete = False
        self.limit = limit
        self.sock = sock
        self.owner = owner
        self.leaves_at_ns: int | None = None
        self._timeout_s = timeout_s
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self.is_kept = False
        self._ends_with_connection = True

    # What the parser tells...

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self.status_code = self._parser.get_status_code()
        if self.status_code < 200:  # "100 Continue" and its like precede the answer
            self.headers.clear()
            return
        self.has_head = True
        names = {name.lower() for name, _ in self.headers}
        self._ends_with_connection = not names & {b"content-length", b"transfer-encoding"}

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self.is_complete = self.has_head

    # What the reader asks...

    def receive_head(self, patience_ns: int | None) -> None:
        """Wait for the headers; body bytes that came along are kept for the next receive.

        Raises PatienceEndedError when they have not come after `patience_ns`.
        """
        self.leaves_at_ns = None
        if patience_ns is not None:
            self.leaves_at_ns = time.perf_counter_ns() + patience_ns
        while not self.has_head:
            if self.leaves_at_ns is None:
                self._parse(self._receive_raw(self._longest_wait_s()))
            elif not self._parse_within((self.leaves_at_ns - time.perf_counter_ns()) / 1e9):
                raise PatienceEndedError(self)

    def receive(self) -> bytes | None:
        """The body bytes of one receive (maybe none); waits for it. None: the body is complete."""
        if not self._body:
            if self.is_complete:
                return None
            wait_s = self._timeout_s if self.limit is None else self._longest_wait_s()
            self._parse(self._receive_raw(wait_s))
        return self._take_body()

    def receive_within(self, wait_s: float) -> bytes | None:
        """Like `receive`, for at most so long; None also when nothing came. 0 never waits."""
        if not self._body and (self.is_complete or not self._parse_within(wait_s)):
            return None
        return self._take_body()

    def unread_bytes(self) -> int:
        """What the kernel holds for us: closing now would send a reset, not an orderly end."""
        answer = fcntl.ioctl(self.sock.fileno(), termios.FIONREAD, b"\0\0\0\0")
        return int(struct.unpack("i", answer)[0])

    def keep_open(self) -> None:
        """From now on `close` leaves it open; `let_go` is what ends it."""
        self.is_kept = True

    def let_go(self) -> None:
        """End a connection that was kept open, with a reset: nothing of it lingers on."""
        reset_on_close(self.sock)
        self.sock.close()

    def close(self) -> None:
        """Close the socket, unless it is to be kept; doing it twice is fine."""
        if self.is_kept:
            return
        if self.owner is not None:
            self.owner.kill()
        self.sock.close()

    def __iter__(self) -> Iterator[bytes]:
        """The rest of the body, for httpx's own way of reading."""
        while (chunk := self.receive()) is not None:
            yield chunk

    # How the bytes come in...

    def _parse_within(self, wait_s: float) -> bool:
        """Take in what comes in this time; False when nothing does. The limit holds here, too."""
        if self.limit is not None:
            wait_s = min(wait_s, self.limit.left_s())
        try:
            data = self._receive_raw(max(0.0, wait_s))
        except _LimitPassedError:
            raise
        except httpx.ReadTimeout:
            return False
        self._parse(data)
        return True

    def _longest_wait_s(self) -> float | None:
        if self.limit is None:
            return self._timeout_s
        left_s = self.limit.left_s()
        return left_s if self._timeout_s is None else min(self._timeout_s, left_s)

    def _receive_raw(self, wait_s: float | None) -> bytes:
        self.sock.settimeout(wait_s)
        try:
            return self.sock.recv(_RECEIVE_BYTES)
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError) as error:
            if self.limit is not None:
                self.limit.check()
            raise httpx.ReadTimeout(f"nothing came for {wait_s} s") from error
        except OSError as error:
            raise httpx.ReadError(f"the connection broke: {error}") from error

    def _parse(self, data: bytes) -> None:
        if not data:
            if not (self.has_head and self._ends_with_connection):
                raise httpx.RemoteProtocolError(
                    "the server closed the connection before the answer was complete"
                )
            self.is_complete = True
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise httpx.RemoteProtocolError(f"this is not HTTP/1.1: {error}") from error

    def _take_body(self) -> bytes:
        body = b"".join(self._body)
        self._body.clear()
        return body
