"""The worker process: its start, its end, and the cost of a connection that goes wrong."""

import os
import subprocess
import sys

import psutil
import pytest

from reference_engine.config import EngineConfig
from reference_engine.faults import Faults
from reference_engine.protocol import SetFaults, encode_frame
from tests.reference_engine.running_worker import (
    NUM_BLOCKS,
    Line,
    RunningWorker,
    abort,
    add,
    frame,
    running_worker,
)

pytestmark = pytest.mark.e2e


def serves_a_request(line: Line, request_id: str) -> None:
    """A request runs to its end, and all blocks are free after it."""
    line.send(add(request_id))
    output, report = line.last_output_of(request_id)
    assert (output.num_generated, output.finish_reason) == (4, "length")
    assert (report.num_running, report.num_waiting) == (0, 0)
    assert report.free_blocks == NUM_BLOCKS


@pytest.mark.parametrize(
    ("sent", "why"),
    [(frame(b"\xc1"), "no message"), (encode_frame(add("living", max_tokens=1)), "in use")],
    ids=["malformed", "id_in_use"],
)
def test_a_peer_that_breaks_the_protocol_loses_the_connection_and_its_requests(
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


def test_settings_that_cannot_work_are_reported_to_the_frontend() -> None:
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
