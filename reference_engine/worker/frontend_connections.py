"""The worker's frontends: many connections at once, a reading thread each.

    accept ─▶ its Hello ─▶ our first word ─▶ messages in, reports out ─▶ its end or its silence:
                                                                         its requests are cancelled

A peer that breaks the protocol, falls silent or reads nothing loses its own connection, and with it
its requests. The step loop never waits for a socket, but at the end of the process.
"""

import contextlib
import socket
import sys
import threading
import time
from collections import Counter
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
    HELLO_S,
    MAX_PEERS,
    Beat,
    Beats,
    Failed,
    Hello,
    LearnedBy,
    ProtocolError,
    check_hello,
    decode_payload,
    encode_frame,
)
from reference_engine.worker.engine_io import FrontendShare
from reference_engine.worker.inbox import DecodeWorkerLost, Inbox, Requests
from reference_engine.worker.peer import FAREWELL_S, Peer, PeerLostError

MAX_CONNECTIONS: Final = 2 * MAX_PEERS  # strangers among them; further ones are closed at once
_NOTHING: Final = FrontendShare([], [])

FirstWord = Ready | Failed


class ChainLostError(Exception):
    """The decode worker behind this one is lost: no fault of the peer's, and no cancellation."""


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

    def report(self, report: StepReport, shares: Mapping[str, FrontendShare]) -> None:
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

    def leave(self) -> None:
        """Call it before this process ends: what was reported arrives, and new connections wait."""
        self.is_open.clear()
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
            peer.finish()
        ends = time.monotonic() + FAREWELL_S
        for peer in peers:
            peer.has_closed.wait(max(0.0, ends - time.monotonic()))

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
