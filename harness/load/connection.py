"""One response as its bytes come: parsed, handed over whole, and timed.

Each receive is passed on at once, so bytes that have not been handed over are still in the kernel,
where they can be counted (`unread_bytes`), over TLS too. The ways to leave are in
`harness.load.leave`.

Every wait has an end. The next byte must come in time; so must the rest of the headers once they
have begun, and the next content if only framing comes: a byte now and then is no answer.
"""

import contextlib
import fcntl
import socket
import ssl
import struct
import termios
import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import httpx

from harness.load.client_process import ClientProcess
from harness.load.connect import Tls
from harness.load.http1 import MAX_HEAD_BYTES, Answer, endless
from harness.load.receiver import Take, receiver

_RESET: Final = struct.pack("ii", 1, 0)  # linger for no time: closing throws all away


class PatienceEndedError(Exception):
    """The user's patience ended before the headers came; the connection is still open."""

    def __init__(self, connection: "Connection") -> None:
        super().__init__("out of patience before the headers, as planned")
        self.connection = connection


class _LimitPassedError(httpx.ReadTimeout):
    """A `Limit` has passed, as opposed to the longest wait for the next bytes."""


class Limit(NamedTuple):
    """When something must have come, on the monotonic clock, and the complaint if it has not."""

    at_ns: int
    complaint: str

    def left_s(self) -> float:
        """Raises httpx.ReadTimeout when it has passed."""
        left_ns = self.at_ns - time.perf_counter_ns()
        if left_ns <= 0:
            raise _LimitPassedError(self.complaint)
        return left_ns / 1e9


class Connection(Answer):
    """One response being received. At `leaves_at_ns` the user's patience ends.

    `received_ns` is when the latest bytes came, before anything was done with them. `limit` may be
    changed at any time: it holds beside `timeout_s`, the longest wait for the next bytes. `pass_on`
    takes the connection over when it could carry another request.
    """

    def __init__(
        self,
        sock: socket.socket,
        timeout_s: float | None,
        *,
        limit: Limit | None = None,
        owner: ClientProcess | None = None,
        tls: Tls | None = None,
        pass_on: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self.limit = limit
        self.sock = sock
        self._receiver = receiver(sock)
        self.owner = owner
        self.leaves_at_ns: int | None = None
        self.received_ns = 0
        self.received_bytes = 0  # before the headers were complete
        self.is_kept = False
        self._timeout_s = timeout_s
        self._tls = tls
        self._pass_on = pass_on
        self._is_closed = False

    def receive_head(self, leaves_at_ns: int | None) -> None:
        """Wait for the headers; body bytes that came along are kept for the next receive.

        Raises PatienceEndedError when they have not come by `leaves_at_ns`.
        """
        self.leaves_at_ns = leaves_at_ns
        overhead = _Overhead("headers", self._timeout_s)
        while not self.has_head:
            if self.leaves_at_ns is None:
                data = self._receive_raw(self._longest_wait_s())
            else:
                wait_s = (self.leaves_at_ns - time.perf_counter_ns()) / 1e9
                if (early := self._receive_raw_within(wait_s)) is None:
                    raise PatienceEndedError(self)
                data = early
            self.received_bytes += len(data)
            self._take_in(data)
            if not self.has_head:
                overhead.add(len(data))

    def receive(self) -> bytes | None:
        """The body bytes of one receive (maybe none); waits for it. None: the body is complete."""
        if not self._body:
            if self.is_complete:
                return None
            wait_s = self._timeout_s if self.limit is None else self._longest_wait_s()
            self._take_in(self._receive_raw(wait_s))
            if not self._body and not self.is_complete:
                self._receive_past_framing()
        return self.take_body()

    def receive_each(self, take: Take) -> bool:
        """Hand the body bytes of each receive to `take` while it returns True; it may return early,
        to be called again. False: the body is complete."""
        chunk = self.receive()
        if chunk is None:
            return False
        if take(chunk, self.received_ns) and not self.is_complete and self.broken is None:
            until_ns = None if self.limit is None else self.limit.at_ns
            with self._as_httpx(self._timeout_s):
                self._receiver.receive_each(self._and_then(take), self._timeout_s, until_ns)
        return True

    def receive_within(self, wait_s: float) -> bytes | None:
        """Like `receive`, for at most `wait_s`; None also if nothing came. 0 never waits."""
        if not self._body:
            if self.is_complete:
                return None
            data = self._receive_raw_within(wait_s)
            if data is None:
                return None
            self._take_in(data)
        return self.take_body()

    def receive_present(self) -> Iterator[bytes]:
        """The body bytes in the kernel now, receive by receive, without waiting. The last receive
        may hold some that came meanwhile."""
        left = self.unread_bytes()
        if self._body:
            yield self.take_body()
        while (left >= 0 or self.broken is not None) and not self.is_complete:
            data = self._receive_raw_within(0)  # with nothing left: is this the end?
            if data is None:
                return
            left -= len(data)
            self._take_in(data)
            if self._body:
                yield self.take_body()

    def unread_bytes(self) -> int:
        """Bytes that the kernel holds: closing now would send a reset, not an orderly end."""
        answer = fcntl.ioctl(self.sock.fileno(), termios.FIONREAD, b"\0\0\0\0")
        return int(struct.unpack("i", answer)[0])

    def say_last(self) -> None:
        """Over TLS, send the close_notify."""
        if self._tls is not None and self.owner is None:
            self._send_at_once(self._tls.farewell())

    def keep_open(self) -> None:
        """From now on `close` leaves it open; only `reset` ends it."""
        self.is_kept = True

    def reset(self) -> None:
        """End it at once, even if it was kept open: the kernel sends a reset, TLS nothing."""
        self._is_closed = True
        self._receiver.close()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.sock.close()

    def close(self) -> None:
        """End it, unless it is kept or passed on; doing it twice is fine."""
        if self.is_kept or self._is_closed:
            return
        self._is_closed = True
        self._receiver.close()
        if self.owner is not None:
            self.owner.kill()
        if self._pass_on is not None and self.is_complete and self.may_go_on:
            self._pass_on()
            return
        self.say_last()
        self.sock.close()

    # How the bytes come in

    def _longest_wait_s(self) -> float | None:
        if self.limit is None:
            return self._timeout_s
        left_s = self.limit.left_s()
        return left_s if self._timeout_s is None else min(self._timeout_s, left_s)

    def _receive_past_framing(self) -> None:
        """Only framing came, such as the head of a chunk; receive until there is content."""
        overhead = _Overhead("framing", self._timeout_s)
        while not self._body and not self.is_complete:
            data = self._receive_raw(self._longest_wait_s())
            self._take_in(data)
            overhead.add(len(data))

    def _receive_raw_within(self, wait_s: float) -> bytes | None:
        """None when nothing comes in this time. The limit holds too."""
        if self.limit is not None:
            wait_s = min(wait_s, self.limit.left_s())
        try:
            return self._receive_raw(max(0.0, wait_s))
        except _LimitPassedError:
            raise
        except httpx.ReadTimeout:
            return None

    def _and_then(self, take: Take) -> Take:
        """Parse received bytes first; if they hold no content, the waiting caller goes on."""

        def parse_and_take(data: bytes, t_ns: int) -> bool:
            self.received_ns = t_ns
            self._take_in(data)
            if not self._body:
                return False
            return take(self.take_body(), t_ns) and not self.is_complete and self.broken is None

        return parse_and_take

    def _receive_raw(self, wait_s: float | None) -> bytes:
        if self.broken is not None:
            raise self.broken
        with self._as_httpx(wait_s):
            data = self._receiver.receive(wait_s)
            self.received_ns = time.perf_counter_ns()
        return data

    @contextlib.contextmanager
    def _as_httpx(self, wait_s: float | None) -> Iterator[None]:
        try:
            yield
        except (TimeoutError, BlockingIOError) as error:
            if self.limit is not None:
                self.limit.left_s()  # raises its own complaint
            raise httpx.ReadTimeout(f"nothing came for {wait_s} s") from error
        except OSError as error:
            raise httpx.ReadError(f"the connection broke: {error}") from error

    def _take_in(self, data: bytes) -> None:
        if self._tls is None or not data:
            self.parse(data)
            return
        if plain := self._decrypt(self._tls, data):
            self.parse(plain)
        if self._tls.is_over and not self.is_complete and self.broken is None:
            self.parse(b"")

    def _decrypt(self, tls: Tls, data: bytes) -> bytes:
        try:
            plain = tls.decrypt(data)
        except ssl.SSLError as error:
            raise httpx.ReadError(f"TLS broke: {error.reason or error}") from error
        finally:
            self._send_at_once(tls.owed())
        return plain

    def _send_at_once(self, data: bytes) -> None:
        """Send if that needs no wait: the bytes are a courtesy."""
        if data:
            with contextlib.suppress(OSError):
                self.sock.settimeout(0)
                self.sock.send(data)


class _Overhead:
    """Bytes beside content, and their time. `add` raises at too much of either."""

    def __init__(self, what: str, longest_s: float | None) -> None:
        self._what = what
        self._longest_s = longest_s
        self._began_s = time.perf_counter()
        self._size = 0

    def add(self, size: int) -> None:
        if not self._size:
            self._began_s = time.perf_counter()
        self._size += size
        if self._size > 2 * MAX_HEAD_BYTES:
            raise endless(self._what)
        if self._longest_s is not None and time.perf_counter() - self._began_s > self._longest_s:
            raise httpx.ReadTimeout(
                f"{self._longest_s:g} s after they began the {self._what} had not come to an end"
            )
