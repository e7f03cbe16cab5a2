"""One connection to the server, and one response on it as its bytes come.

Each receive is parsed and passed on whole, so bytes that have not been handed over are still in the
kernel, where they can be counted. Every wait has an end: for the next byte, for the rest of the
headers once they have begun, and for the next content if only framing comes.
"""

import contextlib
import fcntl
import os
import signal
import socket
import ssl
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import httpx

from harness.client.connect import Tls
from harness.client.http1 import MAX_HEAD_BYTES, Http1Response, endless
from harness.client.receiver import Take, receiver
from harness.errors import in_words

CLIENT_PROGRAM: Final = "cat"
BROKEN: Final = "the connection broke"
_MOST_RECEIVES: Final = 16  # without waiting: a server may send without a pause
_RESET: Final = struct.pack("ii", 1, 0)  # linger for no time: closing throws all away
# The module `socket` would double the time of its start.
_RELAY: Final = """
import _socket, os, select
listener, theirs = _socket.socket(fileno=0), _socket.socket(fileno=1)
os.write(2, b"!")
ours = _socket.socket(fileno=listener._accept()[0])
ours.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
while True:
    for source in select.select([ours, theirs], [], [])[0]:
        data = source.recv(65536)
        if not data:
            os._exit(0)
        (theirs if source is ours else ours).sendall(data)
"""


class Deadline(NamedTuple):
    """A moment on the monotonic clock, and the complaint if nothing has come by then."""

    at_ns: int
    complaint: str

    def left_s(self) -> float:
        """Raises httpx.ReadTimeout when it has passed."""
        left_ns = self.at_ns - time.perf_counter_ns()
        if left_ns <= 0:
            raise httpx.ReadTimeout(self.complaint)
        return left_ns / 1e9


class MortalProcess:
    """A process that holds a connection, so that it can be killed: the client whose program
    crashes. `files` become its first descriptors. Raises OSError if it cannot be started."""

    def __init__(self, command: list[str], *files: int) -> None:
        for file in files:  # ours may be non-blocking, which a program does not expect
            os.set_blocking(file, True)
        actions = [(os.POSIX_SPAWN_DUP2, file, number) for number, file in enumerate(files)]
        self._pid: int | None = os.posix_spawnp(command[0], command, {}, file_actions=actions)

    def strike(self) -> None:
        """Kill it, and do not wait for its end."""
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def kill(self) -> None:
        self.strike()
        pid, self._pid = self._pid, None
        if pid is None:
            return
        with contextlib.suppress(ChildProcessError):  # gevent may have reaped it already
            os.waitpid(pid, 0)


class ClientProcess(MortalProcess):
    """It is `cat`, with the connection as its standard input: its user has read what `cat` has
    read. `output` is our end of a pair. No other process holds `sock`, so when `cat` is killed the
    kernel ends it. `sock` is closed, too, if no process can be started."""

    def __init__(self, sock: socket.socket) -> None:
        self.output, theirs = socket.socketpair()
        with sock, theirs, contextlib.ExitStack() as on_failure:
            on_failure.callback(self.output.close)
            super().__init__([CLIENT_PROGRAM], sock.fileno(), theirs.fileno())
            on_failure.pop_all()


class RelayProcess(MortalProcess):
    """It has the connection to the server, and a place for one channel of gRPC. It says that it is
    there, and passes all bytes on, both ways. Raises OSError."""

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        word, its_word = socket.socketpair()
        with (
            word,
            its_word,
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection((host, port), timeout_s) as server,
            contextlib.ExitStack() as on_failure,
        ):
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            program = [sys.executable, "-I", "-S", "-c", _RELAY]
            super().__init__(program, *(one.fileno() for one in (listener, server, its_word)))
            on_failure.callback(self.kill)
            its_word.close()
            if not word.recv(1):
                raise OSError("it ended at once")
            on_failure.pop_all()
            self.place = f"127.0.0.1:{listener.getsockname()[1]}"


class Http1Connection(Http1Response):
    """`received_ns` is when the latest bytes came, before anything was done with them. `limit` may
    be changed at any time: it holds in addition to `timeout_s`, the longest wait for the next
    bytes. `pass_on` takes the connection over when it could carry another request."""

    def __init__(
        self,
        sock: socket.socket,
        timeout_s: float | None,
        *,
        tls: Tls | None = None,
    ) -> None:
        super().__init__()
        self.limit: Deadline | None = None
        self.sock = sock
        self.tls = tls
        self.owner: ClientProcess | None = None
        self.pass_on: Callable[[Http1Connection], None] | None = None
        self.leaves_at_ns: int | None = None
        self.received_ns = 0
        self.received_bytes = 0  # before the headers were complete
        self.is_kept = False  # else `close` leaves it open, and only `reset` ends it
        self._timeout_s = timeout_s
        self._receiver = receiver(sock)
        self._is_closed = False

    def send(self, data: bytes, timeout_s: float | None) -> bool:
        """Raises httpx.WriteTimeout and httpx.WriteError. False, and no error, if the request was
        not taken whole but an answer, or an end, is already there: a server that refuses may have
        stopped reading."""
        try:
            self.sock.settimeout(timeout_s)
            self.sock.sendall(data if self.tls is None else self.tls.encrypt(data))
        except OSError as error:
            if self.has_input():
                return False
            if isinstance(error, TimeoutError):
                text = f"the request was not taken within {timeout_s} s"
                raise httpx.WriteTimeout(text) from error
            raise httpx.WriteError(f"the request could not be sent: {in_words(error)}") from error
        return True

    def has_input(self) -> bool:
        self.sock.settimeout(0)
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def give_to_process(self) -> None:
        """Let a process receive and pass on from now on, so that it can be killed. Raises
        httpx.ConnectError: then the connection is closed."""
        try:
            self.owner = ClientProcess(self.sock)
        except OSError as error:
            why = f"no process to be killed could be started: {in_words(error)}"
            raise httpx.ConnectError(why) from error
        self._receiver.close()
        self.sock = self.owner.output
        self._receiver = receiver(self.sock)

    def receive_head(self, leaves_at_ns: int | None = None) -> bool:
        """Wait for the headers; body bytes that came along are kept for the next receive. False:
        they have not come by `leaves_at_ns`."""
        self.leaves_at_ns = leaves_at_ns
        return self._receive_until("headers", lambda: self.has_head, leaves_at_ns)

    def receive(self) -> bytes | None:
        """The body bytes of one receive (maybe none); waits for it. None: the body is complete."""
        if not self._body:
            if self.is_complete:
                return None
            self._receive_until("framing", lambda: bool(self._body) or self.is_complete)
        return self.take_body()

    def receive_each(self, take: Take) -> bool:
        """Hand the body bytes of each receive to `take` while it returns True; it may return early,
        to be called again. False: the body is complete."""

        def parse_and_take(data: bytes, t_ns: int) -> bool:
            self.received_ns = t_ns
            self._take_in(data)
            if not self._body:
                return False  # only framing: the waiting caller continues
            return take(self.take_body(), t_ns) and not self.is_complete and self.broken is None

        chunk = self.receive()
        if chunk is None:
            return False
        if take(chunk, self.received_ns) and not self.is_complete and self.broken is None:
            until_ns = None if self.limit is None else self.limit.at_ns
            with _os_errors_as_httpx():
                try:
                    self._receiver.receive_each(parse_and_take, self._timeout_s, until_ns)
                except (TimeoutError, BlockingIOError) as error:
                    if self.limit is not None:
                        self.limit.left_s()  # raises its own complaint
                    raise self._nothing_came() from error
        return True

    def receive_within(self, wait_s: float) -> bytes | None:
        """Like `receive`, for at most `wait_s`; None also if nothing came. 0 never waits."""
        if not self._body:
            if self.is_complete:
                return None
            data = self._receive_raw(max(0.0, wait_s))
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
            data = self._receive_raw(0.0)  # with nothing left: is this the end?
            if data is None:
                return
            left -= len(data)
            self._take_in(data)
            if self._body:
                yield self.take_body()

    def receive_raw_present(self) -> Iterator[bytes]:
        """The bytes on the wire that the kernel holds now, without parsing them; b"" at the end of
        the connection. Nothing can be parsed any more after that."""
        for _ in range(_MOST_RECEIVES):
            with _os_errors_as_httpx():
                try:
                    data = self._receiver.receive(0.0)
                except (TimeoutError, BlockingIOError):
                    return
            yield data
            if not data:
                return

    def unread_bytes(self) -> int:
        """Bytes that the kernel holds: closing now would send a reset, not an orderly end."""
        answer = fcntl.ioctl(self.sock.fileno(), termios.FIONREAD, b"\0\0\0\0")
        return int(struct.unpack("i", answer)[0])

    def say_last(self) -> None:
        if self.tls is not None and self.owner is None:
            self._send_at_once(self.tls.farewell())

    def reset(self) -> None:
        """End it at once, even if it was kept open: the kernel sends a reset, TLS nothing."""
        self._is_closed = True
        self._receiver.close()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.sock.close()

    def close(self) -> None:
        if self.is_kept or self._is_closed:
            return
        self._is_closed = True
        self._receiver.close()
        if self.owner is not None:
            self.owner.kill()
        if self.pass_on is not None and self.is_complete and self.may_go_on:
            self.pass_on(self)
            return
        self.say_last()
        self.sock.close()

    # How the bytes come in

    def _receive_until(
        self, what: str, has_come: Callable[[], bool], leaves_at_ns: int | None = None
    ) -> bool:
        """Receive until it has come, or the user leaves: then False. Raises if meanwhile too much
        comes that is no content, or for too long."""
        size, began_s = 0, 0.0
        while not has_come():
            wait_s = self._timeout_s
            if leaves_at_ns is not None:
                wait_s = max(0, leaves_at_ns - time.perf_counter_ns()) / 1e9
            data = self._receive_raw(wait_s)
            if data is None and leaves_at_ns is not None:
                return False
            if data is None:
                raise self._nothing_came()
            self.received_bytes += len(data)
            self._take_in(data)
            now_s = time.perf_counter()
            began_s = began_s if size else now_s
            size += len(data)
            if not has_come():
                self._check_overhead(what, size, now_s - began_s)
        return True

    def _check_overhead(self, what: str, size: int, lasted_s: float) -> None:
        if size > 2 * MAX_HEAD_BYTES:
            raise endless(what)
        if self._timeout_s is not None and lasted_s > self._timeout_s:
            raise httpx.ReadTimeout(
                f"{self._timeout_s:g} s after they began the {what} had not come to an end"
            )

    def _receive_raw(self, wait_s: float | None) -> bytes | None:
        if self.broken is not None:
            raise self.broken
        limit, is_limited = self.limit, False
        if limit is not None and (wait_s is None or limit.left_s() < wait_s):
            wait_s, is_limited = limit.left_s(), True
        with _os_errors_as_httpx():
            try:
                data = self._receiver.receive(wait_s)
            except (TimeoutError, BlockingIOError) as error:
                if limit is not None and is_limited:
                    raise httpx.ReadTimeout(limit.complaint) from error
                return None
        self.received_ns = time.perf_counter_ns()
        return data

    def _nothing_came(self) -> httpx.ReadTimeout:
        return httpx.ReadTimeout(f"nothing came for {self._timeout_s} s")

    def _take_in(self, data: bytes) -> None:
        if self.tls is None or not data:
            self.parse(data)
            return
        if plain := self._decrypt(self.tls, data):
            self.parse(plain)
        if self.tls.is_over and not self.is_complete and self.broken is None:
            self.parse(b"")

    def _decrypt(self, tls: Tls, data: bytes) -> bytes:
        try:
            return tls.decrypt(data)
        except ssl.SSLError as error:
            raise httpx.ReadError(f"TLS broke: {error.reason or error}") from error
        finally:
            self._send_at_once(tls.owed())

    def _send_at_once(self, data: bytes) -> None:
        if data:
            with contextlib.suppress(OSError):
                self.sock.settimeout(0)
                self.sock.send(data)


@contextlib.contextmanager
def _os_errors_as_httpx() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise httpx.ReadError(f"{BROKEN}: {in_words(error)}") from error
