"""A connection to a peer, read by one thread and written to by any, which none of these waits for.

Frames that the kernel does not take at once are sent by a thread that lives as long as there are
some.
"""

import contextlib
import socket
import struct
import threading
import time
from collections import deque
from typing import Final

import msgspec

from reference_engine.protocol import ToWorker
from reference_engine.wire import (
    HELLO_BYTES,
    MAX_UNSENT_BYTES,
    Beat,
    Beats,
    Failed,
    FrameReader,
    ProtocolError,
    decode_payload,
    encode_frame,
)
from reference_engine.worker.inbox import Requests

FAREWELL_S: Final = 0.5
_RECEIVE_BYTES: Final = 256 * 1024
_BEAT: Final = encode_frame(Beat())


class PeerLostError(Exception):
    """A peer is silent, or reads nothing."""


class Peer:
    """A connection. Its requests have its `key`: `name`, and for a name that was here before also
    a number, because what is still reported of an earlier connection is not for a later one.

    `_unsent` is None but while a thread sends what is in it; it and `_sent_at` change under `_lock`
    only.
    """

    def __init__(self, connection: socket.socket, beats: Beats) -> None:
        connection.settimeout(None)  # Python's would take the place of the two below
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(beats.interval_s))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(beats.timeout_s))
        self.name = self.key = ""
        self.requests: Requests
        self._socket = connection
        self._beats = beats
        self._reader = FrameReader()
        self._lock = threading.Lock()
        self._unsent: deque[bytes] | None = None
        self._sender: threading.Thread | None = None
        self._sent_at = time.monotonic()
        self._ended: Exception | None = None
        self._is_ready = False
        self.has_closed = threading.Event()

    def send(self, frame: bytes, *, is_first_word: bool = False, is_report: bool = False) -> None:
        """Never waits. If the connection has ended, its reading thread finds that. Before the first
        word there are no reports.
        """
        with self._lock:
            if is_report and not self._is_ready:
                return
            self._is_ready = self._is_ready or is_first_word
            self._sent_at = time.monotonic()
            if self._unsent is None:
                frame = self._try(frame)
                if not frame:
                    return
                self._unsent, self._num_unsent_bytes = deque(), 0
                self._sender = threading.Thread(target=self._send_the_rest, daemon=True)
                self._sender.start()
            self._unsent.append(frame)
            self._num_unsent_bytes += len(frame)
            is_too_much = self._num_unsent_bytes > MAX_UNSENT_BYTES
        if is_too_much:
            self.end(PeerLostError(f"over {MAX_UNSENT_BYTES} bytes are unread"))

    def mute(self) -> None:
        """Send no more reports."""
        with self._lock:
            self._is_ready = False

    def flush(self) -> None:
        """Wait until the kernel has it all, or the connection has ended."""
        with self._lock:
            sender = self._sender
        if sender is not None:
            sender.join()

    def finish(self) -> None:
        """Send what is unsent, and then no more; the other side closes when it has read that."""
        self.flush()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def beat(self) -> None:
        if time.monotonic() - self._sent_at >= self._beats.interval_s:
            self.send(_BEAT)

    def end(self, why: Exception) -> None:
        """Any thread may call it; the reading thread then raises `why`. The first one counts."""
        self._ended = self._ended or why
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def greet(self, decoder: msgspec.msgpack.Decoder[ToWorker], hello_s: float) -> list[ToWorker]:
        """The first messages that it sends. Raises ProtocolError if none comes in time."""
        num_received, ends = 0, time.monotonic() + hello_s
        while num_received < HELLO_BYTES:
            self._socket.settimeout(max(0.001, ends - time.monotonic()))
            try:
                data = self._socket.recv(HELLO_BYTES - num_received)
            except TimeoutError:
                break
            if not data:
                raise ConnectionResetError("the peer has gone")
            num_received += len(data)
            if payloads := self._reader.feed(data):
                self._socket.settimeout(None)
                return [decode_payload(decoder, payload) for payload in payloads]
        raise ProtocolError(f"no Hello within {hello_s:g} s and {HELLO_BYTES} bytes")

    def receive(self) -> list[bytes] | None:
        """The next payloads; None at the connection's end. Beats are sent meanwhile.

        Raises PeerLostError after a long silence. Time in which this process slept does not count:
        a wait ends only if there is nothing to read.
        """
        num_waits = 0
        while True:
            self.beat()
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                num_waits += 1
                if num_waits * self._beats.interval_s >= self._beats.timeout_s:
                    raise PeerLostError(f"silent for {self._beats.timeout_s:g} s") from None
                continue
            if self._ended is not None:
                raise self._ended
            return self._reader.feed(data) if data else None

    def refuse(self, why: str) -> None:
        """Say why, then read for a moment: closing with bytes unread could take the words back."""
        with contextlib.suppress(OSError):
            if self._unsent is None:
                self._socket.send(encode_frame(Failed(message=why)), socket.MSG_DONTWAIT)
            self._socket.shutdown(socket.SHUT_WR)
            ends = time.monotonic() + FAREWELL_S
            self._socket.settimeout(FAREWELL_S)
            while time.monotonic() < ends and self._socket.recv(_RECEIVE_BYTES):
                pass

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # which wakes a thread that sends
        self._socket.close()
        self.has_closed.set()

    def _try(self, frame: bytes) -> bytes:
        """Returns the part that the kernel does not take at once."""
        try:
            return frame[self._socket.send(frame, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return frame
        except OSError:
            return b""

    def _send_the_rest(self) -> None:
        assert self._unsent is not None
        while True:
            with self._lock:
                if not self._unsent:
                    self._unsent = None
                    return
                frame = self._unsent.popleft()
                self._num_unsent_bytes -= len(frame)
            try:
                self._socket.sendall(frame)
            except BlockingIOError:
                self.end(PeerLostError(f"it has read nothing for {self._beats.timeout_s:g} s"))
                return
            except OSError:
                return  # it has ended


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
