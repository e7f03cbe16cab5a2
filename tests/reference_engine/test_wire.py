"""Frames survive any cutting; a connection is lost once, and says how that was learned."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_engine.connection import PeerConnection
from reference_engine.context import CancelReason
from reference_engine.core.request import Sampling
from reference_engine.protocol import (
    AbortRequest,
    AddRequest,
    ToWorker,
)
from reference_engine.wire import (
    WIRE_VERSION,
    Beat,
    Beats,
    FrameReader,
    Hello,
    LearnedBy,
    ProtocolError,
    check_hello,
    encode_frame,
)

QUICK = Beats(interval_s=0.01, timeout_s=0.1)


@given(cuts=st.lists(st.integers(0, 200), max_size=6))
def test_frames_survive_any_cutting(cuts: list[int]) -> None:
    messages: list[ToWorker] = [
        AddRequest(request_id="a", prompt_token_ids=[1, 2], sampling=Sampling(max_tokens=3)),
        AbortRequest(request_id="a", reason=CancelReason.USER_DISCONNECT),
    ]
    data = b"".join(encode_frame(message) for message in messages)
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    reader, decoder = FrameReader(), msgspec.msgpack.Decoder(ToWorker)
    payloads: list[bytes] = []
    for start, end in pairwise(edges):
        payloads += reader.feed(data[start:end])
    assert [decoder.decode(payload) for payload in payloads] == messages


def test_a_monstrous_frame_is_refused_before_it_is_read() -> None:
    with pytest.raises(ProtocolError, match="at most"):
        FrameReader().feed(b"\xff\xff\xff\xff")


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        (Hello(peer="a", secret="other"), "wrong secret"),
        (Hello(peer="a", secret="s", version=WIRE_VERSION + 1), "run the same walkaway"),
        (AbortRequest(request_id="a", reason=CancelReason.API), "AbortRequest before Hello"),
    ],
)
def test_only_a_greeting_of_this_version_with_the_secret_is_accepted(
    hello: object, why: str
) -> None:
    with pytest.raises(ProtocolError, match=why):
        check_hello(hello, "s", [])
    assert check_hello(Hello(peer="a", secret="s"), "s", ["b"]).peer == "a"


class Peer:
    """Our end of a connection whose other end is raw; `lost` becomes how it was lost."""

    def __init__(self, on_message: Callable[[object], object]) -> None:
        self.lost = asyncio.get_running_loop().create_future()
        self.connection: PeerConnection[ToWorker] = PeerConnection(
            msgspec.msgpack.Decoder(ToWorker),
            on_message=on_message,
            on_lost=lambda learned_by, error: self.lost.set_result((learned_by, error)),
            beats=QUICK,
        )


@asynccontextmanager
async def connected(
    on_message: Callable[[object], object] = lambda message: None,
) -> AsyncIterator[tuple[Peer, asyncio.StreamReader, asyncio.StreamWriter]]:
    peer, loop = Peer(on_message), asyncio.get_running_loop()
    server = await loop.create_server(lambda: peer.connection, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    try:
        yield peer, reader, writer
    finally:
        writer.close()
        peer.connection.close()
        server.close()


async def next_beat(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(len(encode_frame(Beat())))


def test_a_peer_that_beats_is_kept_and_a_silent_one_is_lost() -> None:
    async def main() -> None:
        async with connected() as (peer, reader, writer):
            for _ in range(30):  # three times as long as silence is allowed
                assert await next_beat(reader) == encode_frame(Beat())
                writer.write(encode_frame(Beat()))
            assert not peer.lost.done()
            assert await peer.lost == (LearnedBy.HEARTBEAT_TIMEOUT, None)
            with pytest.raises(ConnectionError):
                peer.connection.send(Beat())

    asyncio.run(main())


def test_a_peer_that_ends_is_lost_at_once() -> None:
    async def main() -> None:
        async with connected() as (peer, reader, writer):
            await next_beat(reader)
            writer.close()
            assert await peer.lost == (LearnedBy.CONNECTION_DROPPED, None)

    asyncio.run(main())


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x02\0\0\0\xc1\xc1"])
def test_a_broken_frame_ends_the_connection_and_nothing_after_it_is_heard(data: bytes) -> None:
    async def main() -> None:
        heard = list[object]()
        async with connected(heard.append) as (peer, _, writer):
            good = AbortRequest(request_id="a", reason=CancelReason.API)
            writer.write(encode_frame(good) + data + encode_frame(good))
            learned_by, error = await peer.lost
            assert learned_by is LearnedBy.CONNECTION_DROPPED
            assert isinstance(error, ProtocolError)
            assert len(heard) <= 1

    asyncio.run(main())
