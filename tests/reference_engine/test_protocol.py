from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference_engine.core.request import Sampling
from reference_engine.protocol import (
    AbortRequest,
    AddRequest,
    ToWorker,
)
from reference_engine.wire import (
    FrameReader,
    ProtocolError,
    encode_frame,
)


@given(cuts=st.lists(st.integers(0, 200), max_size=6))
def test_frames_survive_any_cutting(cuts: list[int]) -> None:
    messages: list[ToWorker] = [
        AddRequest(request_id="a", prompt_token_ids=[1, 2], sampling=Sampling(max_tokens=3)),
        AbortRequest(request_id="a", reason="user_disconnect"),
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
