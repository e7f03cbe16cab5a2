"""The worker's frontends: many connections at once, a reading thread each.

    accept ─▶ its Hello ─▶ our first word ─▶ messages in, reports out ─▶ its end or its silence:
                                                                         its requests are cancelled

A peer that breaks the protocol, falls silent or reads nothing loses its own connection, and with it
its requests. The step loop never waits for a socket: frames that the kernel does not take at once
are sent by a thread that lives as long as there are some.
"""

import contextlib
import socket
import struct
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from math import isfinite
from typing import Final

import msgspec

from reference_engine.context import CancelReason
from reference_engine.protocol import (
    AbortRequest,
    AddRequest,
    KVBlocks,
    Ready,
    SetFaults,
    StepReport,
    ToWorker,
)
from reference_engine.wire import (
    HELLO_BYTES,
    HELLO_S,
    MAX_PEERS,
    MAX_UNSENT_BYTES,
    Beat,
    Beats,
    Failed,
    FrameReader,
    Hello,
    LearnedBy,
    ProtocolError,
    check_hello,
    decode_payload,
    encode_frame,
)
from reference_engine.worker.engine import Share
from reference_engine.worker.inbox import DecodeWorkerLost, Inbox, Requests

MAX_CONNECTIONS: Final = 2 * MAX_PEERS  # strangers among them; further ones are closed at once
_FAREWELL_S: Final = 0.5
_RECEIVE_BYTES: Final = 256 * 1024
_BEAT: Final = encode_frame(Beat())
_NOTHING: Final = Share([], [])

FirstWord = Ready | Failed


class PeerLostError(Exception):
    """A peer is silent, or reads nothing."""


class ChainLostError(Exception):
    """The decode worker behind this one is lost: no fault of the peer's, and no cancellation."""


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
            ends = time.monotonic() + _FAREWELL_S
            self._socket.settimeout(_FAREWELL_S)
            while time.monotonic() < ends and self._socket.recv(_RECEIVE_BYTES):
                pass

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # which wakes a thread that sends
        self._socket.close()

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


class Frontends:
    """Connected peers by key, and how often each way of learning has ended a request.

    A connection waits for `first_word` after its Hello, and until `is_open`: a prefill worker waits
    for its decode worker, whose `refusal` is passed on. `_peers` and `cancellations` change under
    `_lock` only.
    """

    def __init__(
        self,
        inbox: Inbox,
        now_ns: Callable[[], int],
        *,
        secret: str,
        first_word: Future[FirstWord],
        max_model_len: int,
        beats: Beats | None = None,
        hello_s: float = HELLO_S,
    ) -> None:
        self._inbox = inbox
        self._now_ns = now_ns
        self._secret = secret
        self._first_word = first_word
        self._max_model_len = max_model_len
        self._beats = beats or Beats()
        self._hello_s = hello_s
        self._decoder = msgspec.msgpack.Decoder(ToWorker)
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._lock = threading.Lock()
        self._peers: dict[str, Peer] = {}
        self._num_connections: Counter[str] = Counter()
        self.is_open = threading.Event()
        self.is_open.set()
        self.refusal: Failed | None = None
        self.set_faults: Callable[[SetFaults], None] = inbox.put
        self.cancellations: Counter[LearnedBy] = Counter()

    def accept(self, listening: socket.socket) -> None:
        """Serve whatever connects, until `listening` is closed."""
        try:
            while True:
                with contextlib.suppress(ConnectionError):
                    connection, _ = listening.accept()
                    if self._places.acquire(blocking=False):
                        threading.Thread(target=self._take, args=(connection,), daemon=True).start()
                    else:
                        connection.close()
        finally:
            self._inbox.close()

    def report(self, report: StepReport, shares: Mapping[str, Share]) -> None:
        for peer in tuple(self._peers.values()):
            outputs, events = shares.get(peer.key, _NOTHING)
            mine = msgspec.structs.replace(report, outputs=outputs, events=events)
            peer.send(encode_frame(mine), is_report=True)

    def shut(self, why: str) -> None:
        """End all requests and connections; new ones wait until `is_open` is set."""
        self.is_open.clear()
        say(f"no frontend is served: {why}")
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
            peer.mute()  # an end of its requests by error would keep it from asking elsewhere
        self._inbox.put(DecodeWorkerLost())
        for peer in peers:
            peer.end(ChainLostError(why))

    def hang_up(self, key: str, why: str) -> None:
        peer = self._peers.get(key)
        if peer is not None:
            peer.end(ProtocolError(why))

    def _take(self, connection: socket.socket) -> None:
        try:
            with connection:
                self._serve(Peer(connection, self._beats))
        finally:
            self._places.release()

    def _serve(self, peer: Peer) -> None:
        learned_by: LearnedBy | None = LearnedBy.CONNECTION_DROPPED
        why = ""
        try:
            first, *others = peer.greet(self._decoder, self._hello_s)
            self._register(peer, first)
            self._send_first_word(peer)
            for message in others:
                self._hear(peer, message)
            while (payloads := peer.receive()) is not None:
                for payload in payloads:
                    self._hear(peer, decode_payload(self._decoder, payload))
        except OSError:
            pass  # the peer has gone
        except ProtocolError as error:
            why = str(error)
        except PeerLostError as error:
            learned_by, why = LearnedBy.HEARTBEAT_TIMEOUT, str(error)
        except ChainLostError:
            learned_by = None
        finally:
            self._forget(peer, learned_by)
        if why:
            say(f"connection to {peer.name or 'a stranger'} ended: {why}")
            peer.refuse(why)
        peer.close()

    def _register(self, peer: Peer, first: ToWorker) -> None:
        with self._lock:
            names = {one.name for one in self._peers.values()}
            peer.name = check_hello(first, self._secret, names).peer
            self._num_connections[peer.name] += 1
            number = self._num_connections[peer.name]
            peer.key = peer.name if number == 1 else f"{peer.name}#{number}"
            peer.requests = Requests(peer.key, self._inbox, self._now_ns)
            self._peers[peer.key] = peer

    def _send_first_word(self, peer: Peer) -> None:
        while not self._first_word.done():
            with contextlib.suppress(TimeoutError):
                self._first_word.result(self._beats.interval_s)
            peer.beat()
        first_word = self._first_word.result()
        while isinstance(first_word, Ready) and not self.is_open.wait(self._beats.interval_s):
            peer.beat()
        peer.send(encode_frame(self.refusal or first_word), is_first_word=True)

    def _hear(self, peer: Peer, message: ToWorker) -> None:
        match message:
            case AddRequest():
                self._check(peer, message)
                peer.requests.add(message)
            case AbortRequest(request_id=name, reason=reason, signal=signal):
                is_first = peer.requests.cancel(name, signal, reason)
                with self._lock:
                    self.cancellations[LearnedBy.CONTROL_MESSAGE] += is_first
            case KVBlocks():
                peer.requests.take_in(message)
            case SetFaults():
                self.set_faults(message)
            case Beat():
                pass
            case Hello():
                raise ProtocolError("a second Hello")

    def _check(self, peer: Peer, add: AddRequest) -> None:
        name, prompt, sampling = f"request {add.request_id}", add.prompt_token_ids, add.sampling
        first_word = self._first_word.result()
        vocab_size = first_word.vocab_size if isinstance(first_word, Ready) else 0
        if add.request_id in peer.requests:
            raise ProtocolError(f"{name}: its id is in use")
        if not prompt or min(prompt) < 0 or max(prompt) >= vocab_size:
            raise ProtocolError(f"{name}: no prompt, or tokens that do not exist")
        if not 1 <= sampling.max_tokens <= self._max_model_len - len(prompt):
            raise ProtocolError(f"{name}: max_tokens is {sampling.max_tokens}")
        if add.answer and not (
            len(add.answer) < sampling.max_tokens
            and 0 <= min(add.answer) <= max(add.answer) < vocab_size
        ):
            raise ProtocolError(
                f"{name}: an answer that is too long, or has tokens that do not exist"
            )
        if not (isfinite(sampling.temperature) and sampling.temperature >= 0):
            raise ProtocolError(f"{name}: temperature {sampling.temperature}")

    def _forget(self, peer: Peer, learned_by: LearnedBy | None) -> None:
        if not peer.name:
            return  # a stranger
        number = peer.requests.cancel_all(CancelReason.FRONTEND_LOST)
        with self._lock:
            del self._peers[peer.key]
            if learned_by is not None:
                self.cancellations[learned_by] += number


def say(why: str) -> None:
    print(f"worker: {why}", file=sys.stderr, flush=True)  # noqa: T201
