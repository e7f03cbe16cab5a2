"""From body bytes to the stream machine: event by event, or an answer in one piece."""

import time
from typing import Final, Protocol

from harness.load.abandon import StepEstimate
from harness.load.sse import EndlessEventError, SSEDecoder
from harness.load.stream import StreamMachine

MAX_ANSWER_BYTES: Final = 1 << 26  # of an answer in one piece


class Reader(Protocol):
    """Takes the bytes of a body as they come, with the time of their receive. What comes after
    leaving is told apart (`late`)."""

    def read(self, chunk: bytes, t_ns: int, /) -> None: ...
    def end(self) -> None: ...
    def read_late(self, chunk: bytes) -> None: ...
    def end_late(self) -> None: ...


class StreamReader:
    """Server-sent events. Gaps between tokens go to `step`, where somebody asks for them."""

    def __init__(self, stream: StreamMachine, step: StepEstimate | None) -> None:
        self._stream = stream
        self._step = step
        self._decoder = SSEDecoder()

    def read(self, chunk: bytes, t_ns: int, /) -> None:
        stream = self._stream
        for event in self._decoder.feed(chunk, t_ns):
            if stream.outcome is not None:
                return
            before = stream.tokens_read
            stream.event(event, t_ns)
            if (
                stream.tokens_read != before
                and self._step is not None
                and (gap_ns := stream.last_gap_ns) is not None
            ):
                self._step.observe(gap_ns)

    def end(self) -> None:
        self._stream.body_ended(time.perf_counter_ns())

    def read_late(self, chunk: bytes) -> None:
        for event in self._decoder.feed(chunk, time.perf_counter_ns()):
            self._stream.late_event(event)

    def end_late(self) -> None:
        self._stream.late_end(time.perf_counter_ns())


class UnaryReader:
    """A body that means nothing before it is complete."""

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

    def end(self) -> None:
        self._stream.answer(b"".join(self._parts), time.perf_counter_ns())

    def read_late(self, chunk: bytes) -> None:
        self.read(chunk, time.perf_counter_ns())

    def end_late(self) -> None:
        t_ns = time.perf_counter_ns()
        self._stream.late_event(b"".join(self._parts))
        self._stream.late_end(t_ns)
