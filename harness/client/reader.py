"""Readers of an answer: bytes as they come go through a decoder into the stream machine.

The load, the harness's own requests and the suite read streams with this one reader.
"""

import time
from contextlib import suppress
from typing import Final, Protocol

from harness.client.sse import EndlessEventError, SSEDecoder
from harness.client.stream import StreamMachine
from harness.client.wire_log import Tap
from harness.records import Outcome
from harness.workload.observed_latency import StepEstimate

MAX_ANSWER_BYTES: Final = 1 << 26  # of an answer in one piece


class Reader(Protocol):
    def read(self, chunk: bytes, t_ns: int, /) -> None: ...

    def read_rest(self, t_ns: int, /) -> None:
        """No more bytes come: read what is there without its end."""

    def end(self) -> None: ...


class StreamReader:
    def __init__(self, stream: StreamMachine, step: StepEstimate | None) -> None:
        self._stream = stream
        self._step = step
        self._decoder = SSEDecoder(keeps_strays=True)

    def read(self, chunk: bytes, t_ns: int, /) -> None:
        stream = self._stream
        for name, data in self._decoder.feed(chunk, t_ns):
            if stream.outcome is not None and stream.outcome is not Outcome.ABANDONED:
                return
            before = stream.tokens_read
            stream.event(data, t_ns, name)
            if (
                stream.tokens_read != before
                and self._step is not None
                and (gap_ns := stream.last_gap_ns) is not None
            ):
                self._step.observe(gap_ns)

    def read_rest(self, t_ns: int, /) -> None:
        with suppress(EndlessEventError):  # it has been raised before
            for name, data in self._decoder.end():
                if self._stream.outcome in (None, Outcome.ABANDONED):
                    self._stream.last_event(data, t_ns, name)

    def end(self) -> None:
        now_ns = time.perf_counter_ns()
        self.read_rest(now_ns)
        if self._stream.outcome in (None, Outcome.ABANDONED):
            self._stream.body_ended(now_ns)


class TappedReader:
    def __init__(self, reader: Reader, stream: StreamMachine, tap: Tap) -> None:
        self._reader, self._stream, self._tap = reader, stream, tap
        self.end, self.read_rest = reader.end, reader.read_rest

    def read(self, chunk: bytes, t_ns: int, /) -> None:
        before = self._stream.tokens_read
        self._reader.read(chunk, t_ns)
        self._tap.read(t_ns, chunk, self._stream.tokens_read - before)


class UnaryReader:
    def __init__(self, stream: StreamMachine, max_bytes: int = MAX_ANSWER_BYTES) -> None:
        self._stream = stream
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._size = 0

    def read(self, chunk: bytes, _t_ns: int, /) -> None:
        self._parts.append(chunk)
        self._size += len(chunk)
        if self._size > self._max_bytes:
            raise EndlessEventError(f"the answer has more than {self._max_bytes} bytes")

    def read_rest(self, t_ns: int, /) -> None:
        """Half an answer is none."""

    def end(self) -> None:
        self._stream.answer(b"".join(self._parts), time.perf_counter_ns())
