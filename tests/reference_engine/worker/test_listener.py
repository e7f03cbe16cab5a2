"""The worker's end of the connection, without a worker behind it: a peer harms only itself."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import msgspec
import pytest

from reference_engine.core.accounting import Counters
from reference_engine.core.request import Sampling
from reference_engine.protocol import (
    MAX_FRAME_BYTES,
    AddRequest,
    FrameReader,
    FromWorker,
    Hello,
    Output,
    Ready,
    StepReport,
    ToWorker,
    encode_frame,
)
from reference_engine.worker.inbox import ConnectionLost, Inbox
from reference_engine.worker.service import FirstWord, Listener
from tests.reference_engine.running_worker import abort, add, frame

SECRET = "open sesame"
READY = Ready(pid=1, device="cpu", vocab_size=2048, gpu_name=None)


BROKEN = {
    "too_long": ((MAX_FRAME_BYTES + 1).to_bytes(4, "little"), "at most"),
    "malformed": (frame(b"\xc1"), "no message"),
    "unknown_type": (frame(msgspec.msgpack.encode(["nonsense"])), "no message"),
    "fields_missing": (frame(msgspec.msgpack.encode(["add", "x"])), "no message"),
    "not_utf8": (frame(b"\x92\xa5hello\xa2\xff\xff"), "no message"),
    "too_deep": (frame(b"\x93\xa5hello\xa1x" + b"\x91" * 100_000), "no message"),
    "a_wrong_fault": (frame(b"\x92\xa6faults\x81\xaalose-abort\x07"), "no message"),
    "second_hello": (encode_frame(Hello(secret=SECRET)), "second Hello"),
    "empty_prompt": (encode_frame(add("bad", num_prompt=0)), "no prompt"),
    "no_such_token": (
        encode_frame(
            AddRequest(request_id="bad", prompt_token_ids=[-1], sampling=Sampling(max_tokens=1))
        ),
        "tokens that do not exist",
    ),
    "context": (encode_frame(add("bad", num_prompt=4000, max_tokens=97)), "max_tokens"),
    "nothing_to_do": (encode_frame(add("bad", max_tokens=0)), "max_tokens"),
    "temperature": (
        encode_frame(
            AddRequest(
                request_id="bad",
                prompt_token_ids=[300],
                sampling=Sampling(max_tokens=1, temperature=float("nan")),
            )
        ),
        "temperature",
    ),
}
STRANGERS = {
    "another_message": (encode_frame(add("a")), "AddRequest before Hello"),
    "wrong_secret": (encode_frame(Hello(secret="wrong")), "wrong secret"),
    "secret_not_ascii": (encode_frame(Hello(secret="sésame")), "wrong secret"),
    "http": (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", "at most"),
    "a_lot": (frame(bytes(2000)), "no Hello"),
    "silent": (b"", "no Hello within 0.05 s"),
}


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
            hello_s=0.05,
        )
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            self.listener.serve()

    def connect(self, first: bytes = encode_frame(Hello(secret=SECRET))) -> socket.socket:
        connection = socket.create_connection(self._socket.getsockname(), timeout=10)
        connection.sendall(first)
        return connection

    def serve_another(self) -> None:
        with self.connect() as connection:
            assert messages(connection, 1) == [READY]
            connection.sendall(encode_frame(abort("a")))
            assert self.heard() == [abort("a")]
        self.apply_the_loss()

    def heard(self) -> list[ToWorker | ConnectionLost]:
        drained = self.inbox.drain(timeout_s=10)
        assert drained is not None
        return [heard.message for heard in drained[1]]

    def apply_the_loss(self) -> None:
        """As the step loop does it, when a connection has ended."""
        (lost,) = self.heard()
        assert isinstance(lost, ConnectionLost)
        lost.applied.set()

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


def test_reports_without_a_connection_go_to_the_next_one_in_order(ends: Ends) -> None:
    for turn in range(2):
        for number in range(3):
            ends.listener.send(report(10 * turn + number))
        with ends.connect() as connection:
            ready, *reports = messages(connection, 4)
            assert ready == READY
            assert reports == [report(10 * turn + number) for number in range(3)]
        ends.apply_the_loss()


def test_without_a_connection_the_latest_reports_are_kept(ends: Ends) -> None:
    for number in range(100):
        ends.listener.send(report(number))
    with ends.connect() as connection:
        _, *reports = messages(connection, 65)
    assert reports == [report(number) for number in range(36, 100)]
    ends.apply_the_loss()


def is_ended(connection: socket.socket) -> bool:
    """Read to the end, which comes: the socket's timeout fails the test otherwise."""
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(65536):
            pass
    return True


@pytest.mark.parametrize(("sent", "why"), BROKEN.values(), ids=list(BROKEN))
def test_a_peer_that_breaks_the_protocol_loses_its_connection(
    ends: Ends, sent: bytes, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with ends.connect() as connection:
        messages(connection, 1)
        connection.sendall(sent)
        ends.apply_the_loss()
        assert is_ended(connection)
    assert why in capsys.readouterr().err
    ends.serve_another()


@pytest.mark.parametrize(("sent", "why"), STRANGERS.values(), ids=list(STRANGERS))
def test_strangers_get_nothing_and_the_next_connection_is_served(
    ends: Ends, sent: bytes, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with ends.connect(sent) as connection:
        assert is_ended(connection)
    assert why in capsys.readouterr().err
    ends.serve_another()


def test_a_second_connection_waits_for_the_first_to_end(ends: Ends) -> None:
    with ends.connect() as first:
        messages(first, 1)
        with ends.connect() as second:
            first.sendall(encode_frame(abort("a")))
            assert ends.heard() == [abort("a")]
            second.setblocking(False)
            with pytest.raises(BlockingIOError):
                second.recv(1)
            second.settimeout(10)
            first.close()
            ends.apply_the_loss()
            assert messages(second, 1) == [READY]
        ends.apply_the_loss()


@pytest.mark.parametrize("is_reset", [False, True], ids=["FIN", "RST"])
def test_half_a_frame_is_thrown_away_with_its_connection(ends: Ends, is_reset: bool) -> None:
    with ends.connect() as connection:
        messages(connection, 1)
        connection.sendall(encode_frame(add("half"))[:-1])
        if is_reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    ends.apply_the_loss()
    ends.serve_another()


def test_frames_that_come_with_the_hello_are_heard(ends: Ends) -> None:
    hello = encode_frame(Hello(secret=SECRET))
    with ends.connect(hello + encode_frame(add("a")) + encode_frame(abort("a"))) as connection:
        messages(connection, 1)
        heard = ends.heard()
        while len(heard) < 2:
            heard += ends.heard()
        assert heard == [add("a"), abort("a")]
    ends.apply_the_loss()


def test_a_frontend_that_reads_nothing_does_not_hold_up_the_worker_for_ever(
    ends: Ends, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = [Output(request_id="a", text="x" * 1000, num_generated=1)] * 20_000
    with ends.connect() as deaf:
        messages(deaf, 1)
        ends.listener.send(msgspec.structs.replace(report(0), outputs=outputs))
        ends.apply_the_loss()
    assert "a report could not be sent" in capsys.readouterr().err
    ends.serve_another()
