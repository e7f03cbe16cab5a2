"""The worker's end of the connection, without a worker behind it."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import msgspec
import pytest

from reference_engine.core.accounting import Counters
from reference_engine.protocol import (
    FrameReader,
    FromWorker,
    Hello,
    Ready,
    StepReport,
    encode_frame,
)
from reference_engine.worker.inbox import ConnectionLost, Inbox
from reference_engine.worker.service import FirstWord, Listener

SECRET = "open sesame"
READY = Ready(pid=1, device="cpu", vocab_size=2048, gpu_name=None)


class Ends:
    """A listener on a thread of its own, and the inbox that it fills."""

    def __init__(self) -> None:
        self.inbox = Inbox(time.perf_counter_ns)
        self._socket = socket.create_server(("127.0.0.1", 0))
        first_word: Future[FirstWord] = Future()
        first_word.set_result(READY)
        self.listener = Listener(
            self._socket,
            self.inbox,
            secret=SECRET,
            first_word=first_word,
            max_model_len=4096,
        )
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            self.listener.serve()

    def connect(self) -> socket.socket:
        connection = socket.create_connection(self._socket.getsockname(), timeout=10)
        connection.sendall(encode_frame(Hello(secret=SECRET)))
        return connection

    def apply_the_loss(self) -> None:
        """As the step loop does it, when a connection has ended."""
        drained = self.inbox.drain(timeout_s=10)
        assert drained is not None
        (heard,) = drained[1]
        assert isinstance(heard.message, ConnectionLost)
        heard.message.applied.set()

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)  # which wakes the thread that accepts
        self._thread.join(10)
        self._socket.close()
        assert not self._thread.is_alive()


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    try:
        yield ends
    finally:
        ends.close()


def report(num_waiting: int) -> StepReport:
    return StepReport(
        step=None,
        outputs=[],
        events=[],
        num_running=0,
        num_waiting=num_waiting,
        free_blocks=0,
        cached_blocks=0,
        counters=Counters(),
    )


def messages(connection: socket.socket, count: int) -> list[FromWorker]:
    reader, decoder = FrameReader(), msgspec.msgpack.Decoder[FromWorker](FromWorker)
    found: list[FromWorker] = []
    while len(found) < count:
        data = connection.recv(65536)
        assert data, "the worker has ended the connection"
        found += [decoder.decode(payload) for payload in reader.feed(data)]
    return found


def test_all_that_was_said_to_nobody_is_told_to_the_next_one_in_order(ends: Ends) -> None:
    for turn in range(2):
        for number in range(3):
            ends.listener.send(report(10 * turn + number))
        with ends.connect() as connection:
            ready, *reports = messages(connection, 4)
            assert ready == READY
            assert reports == [report(10 * turn + number) for number in range(3)]
        ends.apply_the_loss()


def test_of_too_many_reports_to_nobody_the_latest_are_kept(ends: Ends) -> None:
    for number in range(100):
        ends.listener.send(report(number))
    with ends.connect() as connection:
        _, *reports = messages(connection, 65)
    assert reports == [report(number) for number in range(36, 100)]
    ends.apply_the_loss()
