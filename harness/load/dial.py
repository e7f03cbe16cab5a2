"""Opening a connection: name, address, TCP, TLS, all within one time limit."""

import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import httpx

from harness.load.places import NotFoundInTimeError, Places
from harness.load.tls import Tls
from harness.reach import is_out_of_handles, why_unreached

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
