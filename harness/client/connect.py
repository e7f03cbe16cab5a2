"""Opening a connection: name, address, TCP, TLS, all within one time limit."""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Final

import httpx

from harness.http_client import why_unreached

_PORTS: Final = {"http": 80, "https": 443}
_RECEIVE_BYTES: Final = 65536
# A server notices that reading stopped once all buffers between are full: ours is the smallest, and
# the server's kernel makes its own buffer as large as some segments.
_SMALL_BUFFER_BYTES: Final = 1152
_SMALL_SEGMENT_BYTES: Final = 536

Address = tuple[int, Any]  # a family, and an address as sockets take it


def known(host: str, port: int) -> list[Address]:
    """The address that the host is, if it is one."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError, UnicodeError):
            socket.inet_pton(family, host)
            return [(family, (host, port))]
    return []


def look_up(host: str, port: int) -> list[Address]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [(family, address) for family, _, _, _, address in found]


class Dns:
    """The addresses of one host: looked up once, and anew after it could not be reached, in a
    thread, as the system's look-up has no usable time limit. With an `address`, that is the only
    one."""

    def __init__(
        self,
        host: str,
        port: int,
        look_up: Callable[[str, int], list[Address]] = look_up,
        *,
        address: str | None = None,
    ) -> None:
        self.host, self.port = host, port
        self._address = address
        self._look_up = look_up
        self._lookup: Future[list[Address]] | None = None

    def addresses(self, timeout_s: float | None) -> list[Address]:
        """The addresses in the order to try them. Raises OSError, httpx.ConnectTimeout and
        UnicodeError."""
        lookup = self._lookup or self._begin()
        try:
            return list(lookup.result(timeout_s))
        except TimeoutError as error:
            if lookup.done():  # it is the system's own
                raise
            text = f"the address of {self.host} was not known within {timeout_s} s"
            raise httpx.ConnectTimeout(text) from error

    def prefer(self, address: Address) -> None:
        if self._lookup is not None and self._lookup.done():
            self._lookup.result().sort(key=lambda one: one != address)

    def forget(self) -> None:
        self._lookup = None

    def _begin(self) -> Future[list[Address]]:
        lookup = self._lookup = Future()
        if addresses := known(self._address or self.host, self.port):
            lookup.set_result(addresses)
        else:
            threading.Thread(target=self._run, args=(lookup,), daemon=True).start()
        return lookup

    def _run(self, lookup: Future[list[Address]]) -> None:
        try:
            lookup.set_result(self._look_up(self.host, self.port))
        except Exception as error:  # noqa: BLE001  any error goes to the waiting callers
            self.forget()
            lookup.set_exception(error)


class Tls:
    """Our end of one TLS connection. `is_over`: the server has sent its close_notify. Methods that
    take bytes from the server raise ssl.SSLError for invalid bytes."""

    def __init__(self, context: ssl.SSLContext, host: str) -> None:
        self.is_over = False
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._end = context.wrap_bio(self._received, self._to_send, server_hostname=host)

    @property
    def protocol(self) -> str | None:
        """Agreed on by ALPN."""
        return self._end.selected_alpn_protocol()

    def shake_hands(self, data: bytes) -> bool:
        self._received.write(data)
        try:
            self._end.do_handshake()
        except ssl.SSLWantReadError:
            return False
        return True

    def decrypt(self, data: bytes) -> bytes:
        self._received.write(data)
        parts: list[bytes] = []
        try:
            while part := self._end.read(_RECEIVE_BYTES):
                parts.append(part)
            self.is_over = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:  # as above, after our own close_notify
            self.is_over = True
        return b"".join(parts)

    def encrypt(self, plain: bytes) -> bytes:
        self._end.write(plain)
        return self.owed()

    def owed(self) -> bytes:
        return self._to_send.read()

    def farewell(self) -> bytes:
        """The close_notify to send: from now on only the server sends (RFC 8446, 6.1)."""
        with contextlib.suppress(ssl.SSLError):  # it would wait for the server's close_notify
            self._end.unwrap()
        return self.owed()


def dns_of(url: httpx.URL, address: str | None = None) -> Dns:
    return Dns(url.raw_host.decode("ascii"), url.port or _PORTS[url.scheme], address=address)


def connect(
    dns: Dns, timeout_s: float | None, *, context: ssl.SSLContext | None, is_small: bool = False
) -> tuple[socket.socket, Tls | None]:
    """`is_small`: with the smallest possible receive buffer. Raises httpx.ConnectTimeout and
    httpx.ConnectError."""
    until_s = None if timeout_s is None else time.perf_counter() + timeout_s
    try:
        sock = _connect_tcp(dns, dns.addresses(timeout_s), until_s, is_small=is_small)
        with _closed_on_failure(sock):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if context is None:
                return sock, None
            tls = Tls(context, dns.host)
            _shake_hands(sock, tls, until_s)
            return sock, tls
    except TimeoutError as error:
        text = f"no connection to {dns.host}:{dns.port} within {timeout_s} s"
        raise httpx.ConnectTimeout(text) from error
    except (OSError, UnicodeError) as error:  # the latter for an invalid host name
        raise httpx.ConnectError(why_unreached(error, dns.host, dns.port)) from error


def _connect_tcp(
    dns: Dns, to_try: list[Address], until_s: float | None, *, is_small: bool
) -> socket.socket:
    problem = OSError(f"no address of {dns.host}")
    for number, address in enumerate(to_try):
        left_s = _left(until_s)
        sock = socket.socket(address[0], socket.SOCK_STREAM)
        try:
            with _closed_on_failure(sock):
                if is_small:  # before the handshake, which announces the size
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SMALL_BUFFER_BYTES)
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, _SMALL_SEGMENT_BYTES)
                sock.settimeout(None if left_s is None else left_s / (len(to_try) - number))
                sock.connect(address[1])
        except OSError as error:
            problem = error
            continue
        if number:
            dns.prefer(address)
        return sock
    dns.forget()
    raise problem


def _shake_hands(sock: socket.socket, tls: Tls, until_s: float | None) -> None:
    data = b""
    while True:
        try:
            has_agreed = tls.shake_hands(data)
        finally:  # also an alert, which says why
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
