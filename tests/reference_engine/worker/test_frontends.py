"""The worker's frontends over real sockets, without a worker: a peer harms only itself."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from math import nan

import msgspec
import pytest
from msgspec.structs import replace

from reference_engine.context import CancelReason, Signal
from reference_engine.protocol import AbortRequest, FromWorker, ToWorker
from reference_engine.wire import (
    MAX_FRAME_BYTES,
    MAX_PEERS,
    Beat,
    Beats,
    Failed,
    FrameReader,
    Hello,
    LearnedBy,
    encode_frame,
)
from reference_engine.worker.engine_io import FrontendShare
from reference_engine.worker.frontend_connections import (
    MAX_CONNECTIONS,
    FirstWord,
    Frontends,
)
from reference_engine.worker.inbox import Added, CancelCommand, Command, Inbox
from reference_engine.worker.peer import Peer, PeerLostError
from tests.reference_engine.fake_worker import EMPTY_REPORT, READY, frame, output
from tests.reference_engine.stepped_engine import abort, add

SECRET = "open sesame"
QUICK = Beats(interval_s=0.05, timeout_s=0.5)
PATIENT = Beats(interval_s=0.02, timeout_s=30.0)
LOST = CancelReason.FRONTEND_LOST


def hello(peer: str = "frontend-0", secret: str = SECRET, version: int = 1) -> bytes:
    return encode_frame(Hello(peer=peer, secret=secret, version=version))


BROKEN = {
    "too_long": ((MAX_FRAME_BYTES + 1).to_bytes(4, "little"), "at most"),
    "unknown_type": (frame(msgspec.msgpack.encode(["nonsense"])), "no message"),
    "fields_missing": (frame(msgspec.msgpack.encode(["add", "x"])), "no message"),
    "not_utf8": (frame(b"\x92\xa5hello\xa2\xff\xff"), "no message"),
    "too_deep": (frame(b"\x93\xa5hello\xa1x" + b"\x91" * 100_000), "no message"),
    "a_wrong_fault": (frame(b"\x92\xa6faults\x81\xaalose-abort\x07"), "no message"),
    "no_such_reason": (frame(msgspec.msgpack.encode(["abort", "a", "boredom"])), "no message"),
    "second_hello": (hello(), "second Hello"),
    "empty_prompt": (encode_frame(add("bad", num_prompt=0)), "no prompt"),
    "no_such_token": (encode_frame(add("bad", word=2048)), "tokens that do not exist"),
    "context": (encode_frame(add("bad", num_prompt=4000, max_tokens=97)), "max_tokens"),
    "nothing_to_do": (encode_frame(add("bad", max_tokens=0)), "max_tokens"),
    "no_temperature": (encode_frame(add("bad", temperature=nan)), "temperature"),
    "id_in_use": (encode_frame(add("held")), "its id is in use"),
}
STRANGERS = {
    "another_message": (encode_frame(add("a")), "AddRequest before Hello"),
    "wrong_secret": (hello(secret="wrong"), "wrong secret"),
    "secret_not_ascii": (hello(secret="sésame"), "wrong secret"),
    "no_name": (hello(peer=""), "without a name"),
    "old_version": (hello(version=0), "this process speaks 1"),
    "http": (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", "at most"),
    "a_lot": (frame(bytes(2000)), "no Hello"),
    "silent": (b"", "no Hello within 0.05 s"),
    "name_is_taken": (hello("survivor"), "survivor is connected already"),
}


class Line:
    """A connection to a worker, as a frontend has one."""

    def __init__(self, address: tuple[str, int], first: bytes) -> None:
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
        """The next message that is no beat."""
        while isinstance(message := self.next_with_beats(), Beat):
            pass
        return message

    def next_with_beats(self) -> FromWorker:
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


@contextmanager
def beating(line: Line) -> Iterator[None]:
    is_over = threading.Event()

    def beat() -> None:
        with contextlib.suppress(OSError):
            while not is_over.wait(QUICK.interval_s):
                line.send(Beat())

    thread = threading.Thread(target=beat)
    thread.start()
    yield
    is_over.set()
    thread.join()


class Ends:
    """A worker's frontends, and the inbox that they fill. The test is the step loop: it keeps the
    contexts of requests alive.
    """

    def __init__(self, beats: Beats, hello_s: float = 0.05) -> None:
        self.inbox = Inbox(time.perf_counter_ns)
        self.first_word: Future[FirstWord] = Future()
        self.frontends = Frontends(
            self.inbox,
            time.perf_counter_ns,
            secret=SECRET,
            first_word=self.first_word,
            max_model_len=4096,
            beats=beats,
            hello_s=hello_s,
        )
        self.live: dict[str, Added] = {}
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=2 * MAX_CONNECTIONS)
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            self.frontends.accept(self._socket)

    def line(self, first: bytes) -> Line:
        return Line(self._socket.getsockname(), first)

    def connect(self, name: str = "frontend-0", *messages: ToWorker) -> Line:
        if not self.first_word.done():
            self.first_word.set_result(READY)
        line = self.line(hello(name) + b"".join(map(encode_frame, messages)))
        assert line.next() == READY
        return line

    def next_commands(self) -> list[Command]:
        drained = self.inbox.drain(timeout_s=10)
        assert drained is not None
        commands = [heard.command for heard in drained[1]]
        assert commands, "nothing was heard"
        self.live |= {one.request.request_id: one for one in commands if isinstance(one, Added)}
        return commands

    def cancelled(self, number: int = 1) -> list[tuple[str, CancelReason]]:
        found: list[tuple[str, CancelReason]] = []
        while len(found) < number:
            heard = [one for one in self.next_commands() if isinstance(one, CancelCommand)]
            found += [(one.request_id, one.why.reason) for one in heard]
        return found

    def take(self, *names: str) -> None:
        while not self.live.keys() >= set(names):
            self.next_commands()

    def serves(self, line: Line, name: str) -> bool:
        """The other peer is still heard, and still gets its reports."""
        line.send(abort(name))
        assert self.cancelled() == [(name, CancelReason.USER_DISCONNECT)]
        share = FrontendShare([output("more", 1, of=name)], [])
        self.frontends.report(EMPTY_REPORT, {"survivor": share})
        return line.next() == replace(EMPTY_REPORT, outputs=share.outputs)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)  # which wakes the thread that accepts
        self._thread.join(10)
        self._socket.close()
        assert not self._thread.is_alive()


@pytest.fixture(params=[PATIENT])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    ends = Ends(request.param)
    yield ends
    ends.close()


quick = pytest.mark.parametrize("ends", [QUICK], indirect=True)


@pytest.mark.parametrize(("sent", "why"), BROKEN.values(), ids=list(BROKEN))
def test_a_peer_that_breaks_the_protocol_hears_why_and_loses_its_own_requests_only(
    ends: Ends, sent: bytes, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with ends.connect("survivor", add("mine")) as survivor, ends.connect("f", add("held")) as line:
        ends.take("mine", "held")
        line.socket.sendall(sent)
        failed = line.next()
        assert isinstance(failed, Failed)
        assert why in failed.message
        assert line.is_ended_by_the_worker()
        assert ends.cancelled() == [("held", LOST)]
        assert ends.serves(survivor, "mine")
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("worker: connection to f ended: ")
    assert why in said


@pytest.mark.parametrize(("sent", "why"), STRANGERS.values(), ids=list(STRANGERS))
def test_strangers_hear_why_and_get_nothing(
    ends: Ends, sent: bytes, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with ends.connect("survivor", add("mine")) as survivor, ends.line(sent) as line:
        failed = line.next()
        assert isinstance(failed, Failed)
        assert why in failed.message
        assert line.is_ended_by_the_worker()
        ends.take("mine")
        assert ends.serves(survivor, "mine")
    (said,) = capsys.readouterr().err.splitlines()
    assert why in said


def test_a_name_is_free_again_once_its_connection_has_ended(ends: Ends) -> None:
    with ends.connect("f", add("a")) as line:
        ends.take("a")
        line.socket.close()
        assert ends.cancelled() == [("a", LOST)]
        with ends.connect("f", add("a")):
            ends.take("a")


@pytest.mark.parametrize("way", ["FIN", "RST", "half a frame"])
def test_a_lost_connection_kills_its_requests_and_counts_each_client_request_once(
    ends: Ends, way: str
) -> None:
    children = [add(f"p-{index}", parent_id="p") for index in range(2)]
    with ends.connect("f", add("told"), *children, add("alone")) as line:
        ends.take("told", "p-0", "p-1", "alone")
        line.send(abort("told"))
        assert ends.cancelled() == [("told", CancelReason.USER_DISCONNECT)]
        if way == "half a frame":
            line.socket.sendall(encode_frame(add("half"))[:-1])
        if way == "RST":
            line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    names = [name for name, _ in ends.cancelled(4)]
    assert names == ["told", "p-0", "p-1", "alone"]
    assert all(added.context.is_killed() for added in ends.live.values())
    assert ends.frontends.cancellations == {
        LearnedBy.CONTROL_MESSAGE: 1,
        LearnedBy.CONNECTION_DROPPED: 2,
    }, "message and connection are one, n answers are one"


@quick
def test_a_peer_that_falls_silent_is_lost_and_one_that_beats_is_not(
    ends: Ends, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        ends.connect("survivor", add("mine")) as survivor,
        beating(survivor),
        ends.connect("f", add("a")) as silent,
    ):
        ends.take("mine", "a")
        assert ends.cancelled() == [("a", LOST)]
        assert silent.is_ended_by_the_worker()
        assert ends.frontends.cancellations == {LearnedBy.HEARTBEAT_TIMEOUT: 1}
        assert ends.serves(survivor, "mine")
    assert "connection to f ended: silent for 0.5 s" in capsys.readouterr().err


def test_a_silent_peer_is_lost_in_its_time_also_by_the_side_that_called() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peer = Peer(socket.create_connection(silent.getsockname(), timeout=30), QUICK)
        with pytest.raises(PeerLostError, match="silent for"):
            peer.receive()
        peer.close()


def test_a_silent_worker_beats_also_while_its_model_is_built(ends: Ends) -> None:
    with ends.line(hello()) as line:
        assert line.next_with_beats() == Beat()
        ends.first_word.set_result(READY)
        assert line.next() == READY
        assert line.next_with_beats() == Beat()


LARGE = {"deaf": FrontendShare([output("x" * 1000, 1)] * 20_000, [])}


def test_a_frontend_that_reads_nothing_is_not_waited_for(ends: Ends) -> None:
    with ends.connect("survivor", add("mine")) as survivor, ends.connect("deaf"):
        ends.take("mine")
        started = time.perf_counter()
        for _ in range(3):
            ends.frontends.report(EMPTY_REPORT, LARGE)
        assert time.perf_counter() - started < PATIENT.timeout_s / 2
        assert [survivor.next() for _ in range(3)] == [EMPTY_REPORT] * 3
        assert ends.serves(survivor, "mine")


@quick
def test_a_frontend_that_reads_nothing_is_dropped_even_if_it_beats(
    ends: Ends, capsys: pytest.CaptureFixture[str]
) -> None:
    with ends.connect("deaf", add("a")) as deaf, beating(deaf):
        ends.take("a")
        ends.frontends.report(EMPTY_REPORT, LARGE)
        assert ends.cancelled() == [("a", LOST)]
        assert ends.frontends.cancellations == {LearnedBy.HEARTBEAT_TIMEOUT: 1}
    assert "connection to deaf ended: it has read nothing for 0.5 s" in capsys.readouterr().err


def test_a_slow_reader_gets_all_reports_whole_and_in_order(ends: Ends) -> None:
    reports = [replace(EMPTY_REPORT, num_waiting=number) for number in range(100)]
    share = FrontendShare([output("x" * 1000, 1)] * 200, [])
    with ends.connect() as line:
        for report in reports:
            ends.frontends.report(report, {"frontend-0": share})
        got = [line.next() for _ in reports]
    assert got == [replace(report, outputs=share.outputs) for report in reports]


def test_each_frontend_gets_its_own_share_and_every_step(ends: Ends) -> None:
    with ends.connect("f") as one, ends.connect("g") as other:
        ends.frontends.report(EMPTY_REPORT, {"g": FrontendShare([output("hello", 1)], [])})
        assert one.next() == EMPTY_REPORT
        assert other.next() == replace(EMPTY_REPORT, outputs=[output("hello", 1)])


def test_a_frontend_that_is_back_gets_nothing_that_an_earlier_connection_asked_for(
    ends: Ends,
) -> None:
    with ends.connect("f", add("a")) as line:
        ends.take("a")
        line.socket.sendall(hello())  # which ends the connection
        assert line.is_ended_by_the_worker()
    before = ends.live.pop("a").frontend
    with ends.connect("f", add("a")) as line:
        ends.take("a")
        now = ends.live["a"].frontend
        for frontend in (before, now):
            ends.frontends.report(
                EMPTY_REPORT, {frontend: FrontendShare([output(frontend, 1)], [])}
            )
        assert line.next() == EMPTY_REPORT
        assert line.next() == replace(EMPTY_REPORT, outputs=[output(now, 1)])


def test_an_abort_reaches_no_request_of_another_frontend(ends: Ends) -> None:
    with ends.connect("f", add("a")), ends.connect("g") as other:
        ends.take("a")
        other.send(
            abort("a"), add("b"), AbortRequest(request_id="b", reason=LOST, signal=Signal.KILL)
        )
        assert ends.cancelled() == [("b", LOST)]
        assert not ends.live["a"].context.is_stopped()
        assert ends.live["b"].context.is_killed()
        assert ends.frontends.cancellations.total() == 1


def test_the_peer_after_the_last_place_is_refused(ends: Ends) -> None:
    with contextlib.ExitStack() as stack:
        lines = [stack.enter_context(ends.connect(f"f-{n}")) for n in range(MAX_PEERS)]
        one_more = stack.enter_context(ends.line(hello("one more")))
        assert one_more.next() == Failed(message=f"{MAX_PEERS} peers are connected already")
        ends.frontends.report(EMPTY_REPORT, {})
        assert all(line.next() == EMPTY_REPORT for line in lines)


def test_a_crowd_of_strangers_keeps_a_frontend_out_only_while_it_stays() -> None:
    with contextlib.closing(Ends(PATIENT, hello_s=30.0)) as ends, contextlib.ExitStack() as stack:
        ends.first_word.set_result(READY)
        strangers = [stack.enter_context(ends.line(b"")) for _ in range(MAX_CONNECTIONS)]
        with ends.line(hello()) as one_more:
            assert one_more.is_ended_by_the_worker()
        for stranger in strangers:
            stranger.socket.close()
        is_in = False
        while not is_in:
            with ends.line(hello()) as line, contextlib.suppress(AssertionError, ConnectionError):
                is_in = line.next() == READY
