"""The worker as a service: whatever a connection does, only that connection pays for it."""

import os
import socket
import subprocess
import sys

import msgspec
import psutil
import pytest

from reference_engine.config import EngineConfig
from reference_engine.core.request import Sampling
from reference_engine.faults import Faults
from reference_engine.protocol import MAX_FRAME_BYTES, AddRequest, Hello, SetFaults, encode_frame
from tests.reference_engine.running_worker import (
    NUM_BLOCKS,
    SECRET,
    Line,
    RunningWorker,
    abort,
    add,
    frame,
    running_worker,
)

pytestmark = pytest.mark.e2e

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
    "id_in_use": (encode_frame(add("living", max_tokens=1)), "in use"),
}
STRANGERS = {
    "another_message": (encode_frame(add("a")), "AddRequest before Hello"),
    "wrong_secret": (encode_frame(Hello(secret="wrong")), "wrong secret"),
    "secret_not_ascii": (encode_frame(Hello(secret="sésame")), "wrong secret"),
    "http": (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", "at most"),
    "a_lot": (frame(bytes(2000)), "no Hello"),
}


def serves_a_request(line: Line, request_id: str) -> None:
    """A request runs to its end, and all blocks are free after it."""
    line.send(add(request_id))
    output, report = line.last_output_of(request_id)
    assert (output.num_generated, output.finish_reason) == (4, "length")
    assert (report.num_running, report.num_waiting) == (0, 0)
    assert report.free_blocks == NUM_BLOCKS


@pytest.mark.parametrize(("sent", "why"), BROKEN.values(), ids=list(BROKEN))
def test_whoever_breaks_the_protocol_loses_the_connection_and_its_requests(
    sent: bytes, why: str
) -> None:
    with running_worker() as worker:
        with Line(worker) as line:
            line.ready()
            line.send(add("living", max_tokens=3000), add("waiting", max_tokens=3000))
            while not line.report().num_running:
                pass
            line.socket.sendall(sent)
            assert line.is_ended_by_the_worker()
        assert why in worker.next_complaint()
        with Line(worker) as line:
            line.ready()
            output, report = line.last_output_of("waiting")
            assert output.finish_reason == "error"
            assert {e.reason for e in report.events if e.event == "removed"} == {"connection_lost"}
            serves_a_request(line, "living")


@pytest.mark.parametrize(("sent", "why"), STRANGERS.values(), ids=list(STRANGERS))
def test_strangers_get_nothing_and_the_next_one_is_served(sent: bytes, why: str) -> None:
    with running_worker() as worker:
        with Line(worker, secret=None) as line:
            line.socket.sendall(sent)
            assert line.is_ended_by_the_worker()
        assert why in worker.next_complaint()
        with Line(worker) as line:
            line.ready()
            serves_a_request(line, "a")


def test_who_says_nothing_is_not_waited_for_long() -> None:
    with running_worker() as worker:
        with Line(worker, secret=None) as silent:
            with Line(worker) as line:  # waits behind the silent one
                line.ready()
            assert silent.is_ended_by_the_worker()
        assert "no Hello within 5 s" in worker.next_complaint()


def test_a_second_connection_waits_for_the_first_to_end() -> None:
    with running_worker() as worker, Line(worker) as first:
        first.ready()
        with Line(worker) as second:
            serves_a_request(first, "a")
            second.socket.setblocking(False)
            with pytest.raises(BlockingIOError):
                second.socket.recv(1)
            second.socket.setblocking(True)
            first.socket.close()
            second.ready()
            serves_a_request(second, "a")


def test_half_a_frame_is_thrown_away_with_its_connection() -> None:
    with running_worker() as worker:
        with Line(worker) as line:
            line.ready()
            line.socket.sendall(encode_frame(add("half"))[:-1])
        with Line(worker) as line:
            line.ready()
            serves_a_request(line, "a")


def test_frames_that_come_with_the_hello_are_heard() -> None:
    with running_worker() as worker, Line(worker, secret=None) as line:
        line.send(Hello(secret=SECRET), add("a"), add("b", max_tokens=3000), abort("b"))
        line.ready()
        assert line.last_output_of("a")[0].finish_reason == "length"


def test_a_reset_is_an_end_like_any_other() -> None:
    with running_worker() as worker:
        with Line(worker) as line:
            line.ready()
            line.send(add("a", max_tokens=3000))
            line.report()
            line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        with Line(worker) as line:
            line.ready()
            serves_a_request(line, "b")


def test_a_frontend_that_reads_nothing_does_not_hold_up_the_worker_for_ever() -> None:
    with running_worker() as worker:
        with Line(worker) as deaf:
            deaf.ready()
            # All in one report, of more bytes than the kernel keeps for those who do not read.
            names = [f"request-{number}" for number in range(20_000)]
            deaf.send(*(add(name, num_prompt=1) for name in names), *map(abort, names))
            assert "a report could not be sent" in worker.next_complaint()
        with Line(worker) as line:
            line.ready()
            serves_a_request(line, "a")


def test_faults_outlive_the_connection_that_set_them() -> None:
    with running_worker() as worker:
        with Line(worker) as line:
            line.ready()
            line.send(SetFaults(faults=Faults(leak_blocks=1)))
            line.report()
        with Line(worker) as line:
            line.ready()
            line.send(add("a", max_tokens=3000))
            while not line.report().num_running:
                pass
            line.send(abort("a"))
            assert line.last_output_of("a")[1].free_blocks == NUM_BLOCKS - 1


def test_settings_that_cannot_work_are_told_to_who_knows_the_secret() -> None:
    torch = pytest.importorskip("torch", reason="needs the extra `engine` (torch)")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with running_worker(EngineConfig(device="cuda")) as worker:
        with Line(worker, secret="wrong") as line:
            assert line.is_ended_by_the_worker()
        assert "wrong secret" in worker.next_complaint()
        with Line(worker) as line:
            assert "no CUDA device" in line.failed().message


def test_the_end_of_standard_input_ends_it_in_the_middle_of_anything() -> None:
    worker = RunningWorker()
    with Line(worker) as line:
        line.ready()
        line.send(add("a", max_tokens=3000))
        line.report()
        assert worker.end() == (0, "")
        assert line.is_ended_by_the_worker()


def test_a_stalled_step_does_not_keep_it_either() -> None:
    worker = RunningWorker()
    with Line(worker) as line:
        line.ready()
        line.send(SetFaults(faults=Faults(stall_survivors_on_abort=600)), add("a", max_tokens=3000))
        while not line.report().num_running:
            pass
        line.send(abort("a"))
        assert worker.end() == (0, "")


def test_it_listens_on_loopback_only() -> None:
    with running_worker() as worker:
        sockets = psutil.Process(worker.process.pid).net_connections()
        assert [(s.laddr.ip, s.status) for s in sockets] == [("127.0.0.1", "LISTEN")]


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


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere niceness is the whole process's")
def test_the_computing_is_nicer_than_the_listening() -> None:
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    with running_worker() as worker, Line(worker) as line:
        line.ready()
        pid = worker.process.pid
        threads = [thread.id for thread in psutil.Process(pid).threads()]
        niceness = {tid: os.getpriority(os.PRIO_PROCESS, tid) - ours for tid in threads}
        assert niceness.pop(pid) == 10
        assert list(niceness.values()) == [0, 0]
