"""Opening a connection: name, address, TCP, TLS, all within one time limit."""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import count
from typing import Any, Final, NamedTuple

import httpx

from harness.http_client import is_out_of_handles, why_unreached

KEPT_S: Final = 30.0

# A family, and an address as sockets take it.
Place = tuple[int, Any]


def look_up(host: str, port: int) -> list[Place]:
    """Ask the system, which puts the best first. What is an address already needs no question.
    Raises OSError and UnicodeError."""
    with contextlib.suppress(OSError):
        socket.inet_pton(socket.AF_INET, host)
        return [(socket.AF_INET, (host, port))]
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, place) for family, _, _, _, place in found]


class NotFoundInTimeError(TimeoutError):
    """The look-up took longer than who asked could wait."""


class _Found(NamedTuple):
    places: list[Place]
    until_s: float


class Places:
    """Its state, by host and port: `_found`, what was found and until when it is believed, and
    `_asked`, the look-ups under way, each of which ends by taking itself out."""

    def __init__(
        self,
        look_up: Callable[[str, int], list[Place]] = look_up,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._look_up = look_up
        self._now_s = now_s
        self._found: dict[tuple[str, int], _Found] = {}
        self._asked: dict[tuple[str, int], Future[list[Place]]] = {}
        self._turns = count()

    def of(self, host: str, port: int, timeout_s: float | None) -> list[Place]:
        """Where a host may be, in the order to try.

        Raises OSError, NotFoundInTimeError and UnicodeError.
        """
        found = self._found.get((host, port))
        if found is not None and found.until_s > self._now_s():
            return _in_turn(found.places, next(self._turns))
        answer = self._asked.get((host, port)) or self._ask(host, port)
        try:
            return _in_turn(answer.result(timeout_s), next(self._turns))
        except TimeoutError as error:
            if answer.done():  # it is the system's own
                raise
            raise NotFoundInTimeError from error

    def forget(self, host: str, port: int) -> None:
        """Look it up anew the next time: it could not be reached where it was."""
        self._found.pop((host, port), None)

    def _ask(self, host: str, port: int) -> Future[list[Place]]:
        answer = self._asked[host, port] = Future()
        threading.Thread(
            target=self._answer, args=(answer, host, port), name=f"look up {host}", daemon=True
        ).start()
        return answer

    def _answer(self, answer: Future[list[Place]], host: str, port: int) -> None:
        try:
            places = self._look_up(host, port)
        except Exception as error:  # noqa: BLE001  whatever it is, who waits must hear of it
            del self._asked[host, port]
            answer.set_exception(error)
            return
        self._found[host, port] = _Found(places, self._now_s() + KEPT_S)
        del self._asked[host, port]
        answer.set_result(places)


def _in_turn(places: list[Place], turn: int) -> list[Place]:
    """Another of the first one's family first each time; those of other families stay behind."""
    alike = [place for place in places if place[0] == places[0][0]]
    others = [place for place in places if place[0] != places[0][0]]
    first = turn % len(alike) if alike else 0
    return alike[first:] + alike[:first] + others


_READ_BYTES: Final = 65536


class Tls:
    """Our end of one TLS connection. `is_over`: the server has said its last (close_notify).

    All methods that take bytes from the server raise ssl.SSLError where these make no sense.
    """

    def __init__(self, context: ssl.SSLContext, host: str) -> None:
        self.is_over = False
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._end = context.wrap_bio(self._received, self._to_send, server_hostname=host)

    def shake_hands(self, data: bytes) -> bool:
        """Take what the server sent, at first nothing. True when both sides have agreed."""
        self._received.write(data)
        try:
            self._end.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def decrypt(self, data: bytes) -> bytes:
        """All that can be read now; nothing where a record is not yet complete."""
        self._received.write(data)
        parts: list[bytes] = []
        try:
            while part := self._end.read(_READ_BYTES):
                parts.append(part)
            self.is_over = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:  # the same, when we have said our last before
            self.is_over = True
        return b"".join(parts)

    def encrypt(self, plain: bytes) -> bytes:
        """What to send for it."""
        self._end.write(plain)
        return self.owed()

    def owed(self) -> bytes:
        """What the protocol itself has to send: handshake, alerts, new keys. Often nothing."""
        return self._to_send.read()

    def farewell(self) -> bytes:
        """The close_notify to send: from now on only the server speaks (RFC 8446, 6.1)."""
        with contextlib.suppress(ssl.SSLError):  # it would wait for the server's, too: not we
            self._end.unwrap()
        return self.owed()


_RECEIVE_BYTES: Final = 65536
# Who stops reading is noticed when all buffers between are full: ours is as small as can be.
_SMALL_BUFFER_BYTES: Final = 4096
_PORTS: Final = {"http": 80, "https": 443}

Origin = tuple[str, str, int]


class NoHandleLeftError(httpx.ConnectError):
    """This process can open nothing any more: it is not the server that failed."""


class Wire(NamedTuple):
    """An open connection: its socket and, where the URL says https, the TLS spoken on it."""

    sock: socket.socket
    tls: Tls | None

    def send(self, data: bytes, timeout_s: float | None) -> None:
        """Send all of it. Raises OSError."""
        self.sock.settimeout(timeout_s)
        self.sock.sendall(data if self.tls is None else self.tls.encrypt(data))

    def has_input(self) -> bool:
        """Whether something has come, if only the end."""
        self.sock.settimeout(0)
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True


def origin_of(url: httpx.URL) -> Origin:
    """Scheme, host (as it goes on the wire) and port."""
    return url.scheme, url.raw_host.decode("ascii"), url.port or _PORTS[url.scheme]


def dial(
    origin: Origin,
    timeout_s: float | None,
    *,
    trust: Callable[[], ssl.SSLContext],
    places: Places,
    is_small: bool = False,
) -> Wire:
    """Open a connection; `is_small`: with the smallest receive buffer that there is.

    Raises httpx.ConnectTimeout, httpx.ConnectError and NoHandleLeftError, which say what to do.
    """
    scheme, host, port = origin
    context = trust() if scheme == "https" else None
    until_s = None if timeout_s is None else time.perf_counter() + timeout_s
    try:
        sock = _connect(host, port, places, until_s, is_small=is_small)
        with _closed_on_failure(sock):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if context is None:
                return Wire(sock, None)
            tls = Tls(context, host)
            _agree(sock, tls, until_s)
            return Wire(sock, tls)
    except NotFoundInTimeError as error:
        raise httpx.ConnectTimeout(
            f"the address of {host} was not known within {timeout_s} s"
        ) from error
    except TimeoutError as error:
        raise httpx.ConnectTimeout(
            f"no connection to {host}:{port} within {timeout_s} s"
        ) from error
    except (OSError, UnicodeError) as error:  # the latter for what cannot be a host's name
        why = why_unreached(error, host, port)
        if isinstance(error, OSError) and is_out_of_handles(error):
            raise NoHandleLeftError(why) from error
        raise httpx.ConnectError(why) from error


def _connect(
    host: str, port: int, places: Places, until_s: float | None, *, is_small: bool
) -> socket.socket:
    """Try all addresses; one that swallows everything leaves time for those behind it."""
    problem = OSError(f"no address of {host}")
    to_try = places.of(host, port, _left(until_s))
    for number, (family, place) in enumerate(to_try):
        left_s = _left(until_s)
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            with _closed_on_failure(sock):
                if is_small:  # before the handshake, which tells the server
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER_BYTES)
                sock.settimeout(None if left_s is None else left_s / (len(to_try) - number))
                sock.connect(place)
                return sock
        except OSError as error:
            problem = error
    places.forget(host, port)
    raise problem


def _agree(sock: socket.socket, tls: Tls, until_s: float | None) -> None:
    data = b""
    while True:
        try:
            has_agreed = tls.shake_hands(data)
        finally:  # an alert, too: the server should know why
            if owed := tls.owed():
                sock.settimeout(_left(until_s))
                sock.sendall(owed)
        if has_agreed:
            return
        sock.settimeout(_left(until_s))
        data = sock.recv(_RECEIVE_BYTES)
        if not data:
            raise ConnectionResetError("the server hung up while TLS was being agreed on")


def _left(until_s: float | None) -> float | None:
    if until_s is None:
        return None
    left_s = until_s - time.perf_counter()
    if left_s <= 0:
        raise TimeoutError
    return left_s


@contextlib.contextmanager
def _closed_on_failure(sock: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        sock.close()
        raise
