"""The worker process: its start, its end, and the cost of a connection that goes wrong."""

import os
import socket
import sys
from concurrent.futures import Future

import psutil
import pytest

from reference_engine.config import EngineConfig
from reference_engine.faults import Faults
from reference_engine.protocol import Failed, Ready, SetFaults, WorkerSettings
from reference_engine.worker.inbox import Inbox
from reference_engine.worker.service import FirstWord, Listener, compute
from tests.reference_engine.running_worker import (
    NUM_BLOCKS,
    SECRET,
    Line,
    RunningWorker,
    running_worker,
)
from tests.reference_engine.stepped_engine import abort, add


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


@pytest.mark.e2e
def test_a_peer_that_breaks_the_protocol_loses_the_connection_and_its_requests() -> None:
    with running_worker() as worker:
        with Line(worker.address) as line:
            assert isinstance(line.next(), Ready)
            line.send(add("living", max_tokens=3000), add("waiting", max_tokens=3000))
            while not line.report().num_running:
                pass
            line.send(add("living", max_tokens=1))
            assert line.is_ended_by_the_worker()
        assert "in use" in worker.next_complaint()
        with Line(worker.address) as line:
            assert isinstance(line.next(), Ready)
            output, report = line.last_output_of("waiting")
            assert output.finish_reason == "error"
            assert {e.reason for e in report.events if e.event == "removed"} == {"connection_lost"}
            line.send(add("living", max_tokens=4))
            output, report = line.last_output_of("living")
            assert (output.num_generated, output.finish_reason) == (4, "length")
            assert (report.num_running, report.free_blocks) == (0, NUM_BLOCKS)


@pytest.mark.e2e
@pytest.mark.parametrize("is_stalled", [False, True])
def test_the_end_of_standard_input_ends_it_even_in_a_stalled_step(is_stalled: bool) -> None:
    worker = RunningWorker()
    with Line(worker.address) as line:
        assert isinstance(line.next(), Ready)
        faults = Faults(stall_survivors_on_abort=600)
        line.send(SetFaults(faults=faults), add("a", max_tokens=3000))
        while not line.report().num_running:
            pass
        if is_stalled:
            line.send(abort("a"))
        assert worker.end() == (0, "")
        assert line.is_ended_by_the_worker()


@pytest.mark.e2e
def test_it_listens_on_loopback_only_and_its_computing_is_nicer_than_its_listening() -> None:
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    with running_worker() as worker:
        process = psutil.Process(worker.process.pid)
        sockets = process.net_connections()
        assert [(s.laddr.ip, s.status) for s in sockets] == [("127.0.0.1", "LISTEN")]
        with Line(worker.address) as line:
            assert isinstance(line.next(), Ready)
            if sys.platform != "linux":
                return  # niceness is the whole process's
            threads = [thread.id for thread in process.threads()]
            niceness = {tid: os.getpriority(os.PRIO_PROCESS, tid) - ours for tid in threads}
            assert niceness.pop(process.pid) == 10
            assert list(niceness.values()) == [0, 0]
