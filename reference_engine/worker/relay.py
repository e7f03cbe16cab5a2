"""A prefill worker's way to its decode worker, and the way back to the frontends.

    engine ──▶ AddRequest, KVBlocks ... ──▶ decode worker
    frontends ◀── outputs and events, unchanged ◀──┘

The context of a request here is the parent of its context there: a cancellation is passed on at
once, in the thread that hears of it, between two pieces of a request's blocks. The two workers are
a chain. If the decode worker is lost, the frontends lose this one too, and can connect again when
it is back.
"""

import contextlib
import socket
import threading
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from queue import SimpleQueue
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from reference_engine.context import Cancellation, Context, Signal
from reference_engine.protocol import (
    AbortRequest,
    FromWorker,
    KVBlocks,
    Ready,
    SetFaults,
    StepReport,
)
from reference_engine.wire import (
    Beat,
    Beats,
    Failed,
    Hello,
    ProtocolError,
    decode_payload,
    encode_frame,
)
from reference_engine.worker.engine_io import FrontendShare, Leaving
from reference_engine.worker.frontend_connections import Frontends
from reference_engine.worker.inbox import DecodeWorkerLost, Inbox, TakenOver
from reference_engine.worker.peer import Peer, PeerLostError

_PIECE_BYTES: Final = 1024 * 1024
_CONNECT_S: Final = 5.0
_PAUSE_S: Final = 0.2


class _Passage(NamedTuple):
    """A request at the decode worker; its context there is a child of its context here."""

    frontend: str
    context: Context
    parent: Context | None


class Relay:
    """`_passages` has the requests at the decode worker, until their blocks are free; the step loop
    puts them in, the reading thread takes them out. `_peer` is None while there is no decode
    worker.
    """

    def __init__(
        self,
        hello: Hello,
        address: tuple[str, int],
        *,
        inbox: Inbox,
        frontends: Frontends,
        beats: Beats,
    ) -> None:
        self._hello = hello
        self._address = address
        self._inbox = inbox
        self._frontends = frontends
        self._beats = beats
        self._decoder = msgspec.msgpack.Decoder[FromWorker](FromWorker)
        self._peer: Peer | None = None
        self._was_connected = False
        self._passages: dict[str, _Passage] = {}
        self._to_send: SimpleQueue[tuple[Peer, Leaving]] = SimpleQueue()

    def start(self) -> None:
        self._frontends.is_open.clear()
        for loop in (self._keep_connected, self._keep_sending):
            threading.Thread(target=loop, daemon=True).start()

    def hand_over(self, leaving: Leaving) -> None:
        peer, name = self._peer, leaving.request.request_id
        if peer is None:
            self._inbox.put(DecodeWorkerLost())
            return
        there = Context(name)
        self._passages[name] = _Passage(leaving.frontend, leaving.context, leaving.parent)
        peer.send(encode_frame(leaving.request))
        there.watch(partial(self._cancel, peer, name))
        leaving.context.link_child(there)
        self._to_send.put((peer, leaving))

    def set_faults(self, message: SetFaults) -> None:
        """Set them for both workers."""
        self._inbox.put(message)
        if self._peer is not None:
            self._peer.send(encode_frame(message))

    def _cancel(self, peer: Peer, name: str, signal: Signal, why: Cancellation | None) -> None:
        assert why is not None
        abort = AbortRequest(request_id=name, reason=why.reason, signal=signal)
        peer.send(encode_frame(abort))

    def _keep_sending(self) -> None:
        while True:
            _send_blocks(*self._to_send.get())

    def _keep_connected(self) -> None:
        while True:
            with contextlib.suppress(OSError):  # it is not there yet, or not there again
                self._serve(socket.create_connection(self._address, _CONNECT_S))
            threading.Event().wait(_PAUSE_S)

    def _serve(self, connection: socket.socket) -> None:
        peer, why = Peer(connection, self._beats), "it has ended the connection"
        try:
            peer.send(encode_frame(self._hello))
            while (payloads := peer.receive()) is not None:
                for payload in payloads:
                    self._hear(peer, decode_payload(self._decoder, payload))
        except (OSError, PeerLostError, ProtocolError) as error:
            why = str(error)
        finally:
            peer.close()
            self._lose(why)

    def _hear(self, peer: Peer, message: FromWorker) -> None:
        match message:
            case Ready():
                self._passages.clear()
                self._peer = peer
                self._was_connected, self._frontends.refusal = True, None
                self._frontends.is_open.set()
            case Failed(message=why):
                if not self._was_connected:  # its settings cannot work
                    self._frontends.refusal = message
                    self._frontends.is_open.set()
                raise ProtocolError(why)
            case StepReport():
                shares = self._share_out(message)
                self._frontends.report(replace(message, outputs=[], events=[]), shares)
            case Beat():
                pass

    def _share_out(self, report: StepReport) -> Mapping[str, FrontendShare]:
        """Requests that are freed are forgotten before their frontends can hear of it."""
        shares: dict[str, FrontendShare] = defaultdict(lambda: FrontendShare([], []))
        freed = list[str]()
        for event in report.events:
            passage = self._passages.get(event.request_id)
            if passage is None:
                continue
            shares[passage.frontend].events.append(event)
            if event.event == "taken_over":
                self._inbox.put(TakenOver(event.request_id))
            elif event.event == "blocks_freed":
                freed.append(event.request_id)
        for output in report.outputs:
            if output.request_id in self._passages:
                shares[self._passages[output.request_id].frontend].outputs.append(output)
        for name in freed:
            del self._passages[name]
        return shares

    def _lose(self, why: str) -> None:
        if self._peer is not None:
            self._peer = None
            self._passages.clear()
            self._frontends.shut(f"the decode worker is lost: {why}")


def _send_blocks(peer: Peer, leaving: Leaving) -> None:
    """A function of its own, since an ended request's context must not be kept alive."""
    for at in range(0, len(leaving.blocks), _PIECE_BYTES):
        if leaving.context.is_stopped():
            return
        data = bytes(leaving.blocks[at : at + _PIECE_BYTES])
        peer.send(encode_frame(KVBlocks(request_id=leaving.request.request_id, data=data)))
        peer.flush()
