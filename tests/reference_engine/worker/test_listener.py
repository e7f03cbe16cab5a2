"""The worker's end of the connection, without a worker behind it: a peer harms only itself."""

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from math import nan

import msgspec
import pytest
from msgspec.structs import replace

from reference_engine.config import EngineConfig
from reference_engine.faults import Faults
from reference_engine.protocol import (
    FromWorker,
    ToWorker,
    WorkerSettings,
)
from reference_engine.wire import (
    MAX_FRAME_BYTES,
    Failed,
    FrameReader,
    Hello,
    encode_frame,
)
from reference_engine.worker.engine import ConnectionLost, Inbox
from reference_engine.worker.service import FirstWord, Listener, compute
from tests.reference_engine.fake_worker import EMPTY_REPORT, READY, frame, output
from tests.reference_engine.stepped_engine import abort, add

SECRET = "open sesame"
HELLO = encode_frame(Hello(peer="frontend-0", secret=SECRET))
BROKEN = {
    "too_long": ((MAX_FRAME_BYTES + 1).to_bytes(4, "little"), "at most"),
    "unknown_type": (frame(msgspec.msgpack.encode(["nonsense"])), "no message"),
    "fields_missing": (frame(msgspec.msgpack.encode(["add", "x"])), "no message"),
    "not_utf8": (frame(b"\x92\xa5hello\xa2\xff\xff"), "no message"),
    "too_deep": (frame(b"\x93\xa5hello\xa1x" + b"\x91" * 100_000), "no message"),
    "a_wrong_fault": (frame(b"\x92\xa6faults\x81\xaalose-abort\x07"), "no message"),
    "second_hello": (HELLO, "second Hello"),
    "empty_prompt": (encode_frame(add("bad", num_prompt=0)), "no prompt"),
    "no_such_token": (encode_frame(add("bad", word=2048)), "tokens that do not exist"),
    "context": (encode_frame(add("bad", num_prompt=4000, max_tokens=97)), "max_tokens"),
    "nothing_to_do": (encode_frame(add("bad", max_tokens=0)), "max_tokens"),
    "no_temperature": (encode_frame(add("bad", temperature=nan)), "temperature"),
}
STRANGERS = {
    "another_message": (encode_frame(add("a")), "AddRequest before Hello"),
    "wrong_secret": (encode_frame(Hello(peer="frontend-0", secret="wrong")), "wrong secret"),
    "secret_not_ascii": (encode_frame(Hello(peer="frontend-0", secret="sésame")), "wrong secret"),
    "http": (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", "at most"),
    "a_lot": (frame(bytes(2000)), "no Hello"),
    "silent": (b"", "no Hello within 0.05 s"),
}


class Line:
    """A connection to a worker, as the frontend has one."""

    def __init__(self, address: tuple[str, int], *, first: bytes = HELLO) -> None:
        self.socket = socket.create_connection(address, timeout=30)
        self._reader = FrameReader()
        self._decoder = msgspec.msgpack.Decoder[FromWorker](FromWorker)
        self._read: list[bytes] = []
        self.socket.sendall(first)

    def __enter__(self) -> "Line":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.socket.close()

    def send(self, *messages: ToWorker) -> None:
        self.socket.sendall(b"".join(encode_frame(message) for message in messages))

    def next(self) -> FromWorker:
        while not self._read:
            data = self.socket.recv(65536)
            assert data, "the worker has ended the connection"
            self._read = self._reader.feed(data)
        message: FromWorker = self._decoder.decode(self._read.pop(0))
        return message

    def is_ended_by_the_worker(self) -> bool:
        """Read to the end, which comes: the socket's timeout fails the test otherwise."""
        with contextlib.suppress(ConnectionResetError):
            while self.socket.recv(65536):
                pass
        return True


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

    def connect(self, first: bytes = HELLO) -> Line:
        return Line(self._socket.getsockname(), first=first)

    def serve_another(self) -> None:
        with self.connect() as line:
            assert line.next() == READY
            line.send(abort("a"))
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
    yield ends
    ends.close()


def test_the_latest_reports_without_a_connection_go_to_the_next_one_in_order(ends: Ends) -> None:
    for num_reports, num_kept in ((3, 3), (100, 64)):
        reports = [replace(EMPTY_REPORT, num_waiting=number) for number in range(num_reports)]
        for report in reports:
            ends.listener.send(report)
        with ends.connect() as line:
            assert line.next() == READY
            kept = [line.next() for _ in range(num_kept)]
        assert kept == reports[-num_kept:]
        ends.apply_the_loss()


@pytest.mark.parametrize(("sent", "why"), BROKEN.values(), ids=list(BROKEN))
def test_a_peer_that_breaks_the_protocol_loses_its_connection(
    ends: Ends, sent: bytes, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with ends.connect() as line:
        assert line.next() == READY
        line.socket.sendall(sent)
        ends.apply_the_loss()
        assert line.is_ended_by_the_worker()
    assert why in capsys.readouterr().err
    ends.serve_another()


@pytest.mark.parametrize(("sent", "why"), STRANGERS.values(), ids=list(STRANGERS))
def test_strangers_get_nothing_and_the_next_connection_is_served(
    ends: Ends, sent: bytes, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with ends.connect(sent) as line:
        assert line.is_ended_by_the_worker()
    assert why in capsys.readouterr().err
    ends.serve_another()


def test_a_second_connection_waits_for_the_first_to_end(ends: Ends) -> None:
    with ends.connect() as first:
        assert first.next() == READY
        with ends.connect() as second:
            first.send(abort("a"))
            assert ends.heard() == [abort("a")]
            second.socket.setblocking(False)
            with pytest.raises(BlockingIOError):
                second.next()
            second.socket.settimeout(10)
            first.socket.close()
            ends.apply_the_loss()
            assert second.next() == READY
        ends.apply_the_loss()


@pytest.mark.parametrize("is_reset", [False, True], ids=["FIN", "RST"])
def test_half_a_frame_is_thrown_away_with_its_connection(ends: Ends, is_reset: bool) -> None:
    with ends.connect() as line:
        assert line.next() == READY
        line.socket.sendall(encode_frame(add("half"))[:-1])
        if is_reset:
            line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    ends.apply_the_loss()
    ends.serve_another()


def test_frames_that_come_with_the_hello_are_heard(ends: Ends) -> None:
    with ends.connect(HELLO + encode_frame(add("a")) + encode_frame(abort("a"))) as line:
        assert line.next() == READY
        heard = ends.heard()
        while len(heard) < 2:
            heard += ends.heard()
        assert heard == [add("a"), abort("a")]
    ends.apply_the_loss()


@pytest.mark.parametrize(
    ("is_deaf_at_once", "why"), [(False, "a report could not be sent"), (True, "unavailable")]
)
def test_a_frontend_that_reads_nothing_does_not_hold_up_the_worker_for_ever(
    ends: Ends, is_deaf_at_once: bool, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    large = replace(EMPTY_REPORT, outputs=[output("x" * 1000, 1)] * 20_000)
    if is_deaf_at_once:
        ends.listener.send(large)  # kept for the next connection
    with ends.connect() as deaf:
        if not is_deaf_at_once:
            assert deaf.next() == READY
            ends.listener.send(large)
        ends.apply_the_loss()
        assert deaf.is_ended_by_the_worker()
    assert why in capsys.readouterr().err
    ends.serve_another()


def test_without_settings_it_says_what_it_wants() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "reference_engine.worker.service"],
        input=b"",
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"the first line of standard input" in done.stderr
    assert b"Traceback" not in done.stderr


def test_settings_that_cannot_work_are_the_first_word() -> None:
    torch = pytest.importorskip("torch", reason="needs the extra `engine` (torch)")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    inbox, first_word = Inbox(lambda: 0), Future[FirstWord]()
    inbox.close()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = EngineConfig(device="cuda")
        settings = WorkerSettings(config=config, faults=Faults(), secret=SECRET)
        listener = Listener(
            listening,
            inbox,
            secret=SECRET,
            first_word=first_word,
            max_model_len=config.max_model_len,
        )
        compute(settings, listener, inbox, first_word)
    failed = first_word.result()
    assert isinstance(failed, Failed)
    assert "no CUDA device" in failed.message
