"""The worker's process: its settings, and its own port."""

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from reference_engine.config import EngineConfig, EngineConfigError, StepCost
from reference_engine.faults import Faults
from reference_engine.protocol import Listening, Ready, StepReport, WorkerSettings
from reference_engine.wire import Failed, encode_frame
from reference_engine.worker.frontend_connections import Frontends
from reference_engine.worker.service import Worker
from reference_engine.worker.status import StatusServer, WorkerStatus
from tests.reference_engine.stepped_engine import Bench, abort, add
from tests.reference_engine.worker.test_frontends import SECRET, Line, beating, hello

QUICK = EngineConfig(
    runner="simulated", num_blocks=256, step_cost=StepCost(fixed_s=0.001), max_num_seqs=4
)


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


class RunningWorker:
    def __init__(
        self,
        module: str = "reference_engine.worker.service",
        stderr: int | None = None,
        settings: dict[str, object] | None = None,
    ) -> None:
        self.settings, self.status = settings or {}, 0
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        whole = WorkerSettings(
            config=QUICK, faults=Faults(), secret=SECRET, metrics_port=0, name="decode-3"
        )
        whole = msgspec.structs.replace(whole, **self.settings)
        self.process.stdin.write(msgspec.json.encode(whole) + b"\n")
        self.process.stdin.flush()
        self.ports = msgspec.json.decode(self.process.stdout.readline(), type=Listening)
        self.url = f"http://127.0.0.1:{self.ports.metrics_port}"

    def connect(self, name: str) -> Line:
        line = Line(("127.0.0.1", self.ports.port), hello(name))
        ready = line.next()
        assert isinstance(ready, Ready)
        assert ready.worker == "decode-3"
        return line

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.ports.port

    def kill(self) -> None:
        self.process.kill()
        self.status = -signal.SIGKILL

    def end(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        assert self.process.wait(20) == self.status
        self.process.stdout.close()

    def is_whole(self) -> bool:
        return httpx.get(f"{self.url}/walkaway/integrity").text == "ok\n"

    def metrics(self) -> dict[str, float]:
        families = text_string_to_metric_families(httpx.get(f"{self.url}/metrics").text)
        return {
            " ".join([sample.name, *sorted(sample.labels.values())]): sample.value
            for family in families
            for sample in family.samples
        }

    def lines(self, path: str) -> list[dict[str, object]]:
        return [msgspec.json.decode(line) for line in httpx.get(self.url + path).text.splitlines()]


@contextmanager
def running(**settings: object) -> Iterator[RunningWorker]:
    worker = RunningWorker(settings=settings)
    try:
        yield worker
    finally:
        worker.end()


def report_of(line: Line) -> StepReport:
    report = line.next()
    assert isinstance(report, StepReport)
    return report


def next_token(line: Line) -> str:
    while not (outputs := report_of(line).outputs):
        pass
    return outputs[0].text


def end_of(line: Line, request_id: str) -> StepReport:
    while True:
        report = report_of(line)
        if any(one.request_id == request_id and one.ending for one in report.outputs):
            return report


@pytest.mark.e2e
def test_its_own_port_shows_what_becomes_of_a_lost_frontends_requests() -> None:
    decode = msgspec.structs.replace(QUICK, component="decode")
    with (
        running(config=decode, peer_timeout_s=1.0) as worker,
        worker.connect("f") as survivor,
        beating(survivor),
    ):
        with worker.connect("silent") as silent:
            silent.send(add("forgotten", max_tokens=3000))
            assert silent.is_ended_by_the_worker()
        with worker.connect("g") as lost, beating(lost):
            lost.send(add("told", max_tokens=3000), add("lost", max_tokens=3000))
            next_token(lost)
            lost.send(abort("told"))
            end_of(lost, "told")
        assert httpx.get(f"{worker.url}/walkaway/integrity").text == "ok\n"
        survivor.send(add("mine", max_tokens=4))
        assert end_of(survivor, "mine").free_blocks == QUICK.num_blocks
        metrics = worker.metrics()
        assert metrics["dynamo_component_cancellation_total decode dynamo generate"] == 3
        assert metrics["walkaway_worker_cancellations_total control_message"] == 1
        assert metrics["walkaway_worker_cancellations_total connection_dropped"] == 1
        assert metrics["walkaway_worker_cancellations_total heartbeat_timeout"] == 1
        assert metrics["walkaway_worker_aborted_requests_total"] == 3
        assert metrics["walkaway_worker_free_blocks"] == QUICK.num_blocks
        entries = worker.lines("/walkaway/lifecycle")
        ends = [(one["event"], one["reason"]) for one in entries if one["request_id"] == "lost"][
            -4:
        ]
        assert ends == [
            ("abort_received", "frontend_lost"),
            ("removed", "frontend_lost"),
            ("blocks_freed", "frontend_lost"),
            ("finished", "abort"),
        ]
        assert {one["worker"] for one in entries} == {"decode-3"}
        assert [one["seq"] for one in worker.lines("/walkaway/lifecycle?after=3&limit=2")] == [4, 5]
        steps = worker.lines("/walkaway/steps?limit=3")
        assert [(one["step"], one["worker"]) for one in steps] == [
            (number, "decode-3") for number in (1, 2, 3)
        ]


# A prompt of 40 tokens takes five steps; two requests together need more blocks than there are.
TIGHT = EngineConfig(
    device="cpu",
    batch_invariant=True,
    max_num_seqs=2,
    num_blocks=16,
    block_size=4,
    max_model_len=64,
    max_num_batched_tokens=8,
)
MINE = add("mine", num_prompt=4, max_tokens=44, temperature=0.0)
STATES = {  # what a frontend has asked for, and how it is then lost
    "waiting": ([add("holds"), add("waits")], "FIN"),
    "admitted": ([add("x", num_prompt=40)], "RST"),
    "first_token": ([add("x", num_prompt=20, max_tokens=40)], "half a frame"),
    "preempted": ([add("x", num_prompt=20, max_tokens=40)], "FIN"),
}


def text_of(line: Line, request_id: str) -> str:
    text = ""
    while True:
        for output in report_of(line).outputs:
            assert output.request_id == request_id, "another frontend's"
            text += output.text
            if output.ending is not None:
                assert output.ending.finish_reason == "length"
                return text


def leave(line: Line, way: str) -> None:
    if way == "half a frame":
        line.socket.sendall(encode_frame(add("y"))[:-1])
    if way == "RST":
        line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    line.socket.close()


@pytest.mark.e2e
def test_a_frontend_lost_in_any_state_frees_all_and_leaves_the_others_stream_bit_equal() -> None:
    pytest.importorskip("torch", reason="needs the extra `engine` (torch)")
    with running(config=TIGHT) as worker, worker.connect("f") as survivor, beating(survivor):
        survivor.send(MINE)
        alone = text_of(survivor, "mine")
        for state, (requests, way) in STATES.items():
            with worker.connect("g") as lost:
                survivor.send(MINE)
                text = next_token(survivor)
                lost.send(*requests)
                while state != "waiting" and state not in [e.event for e in report_of(lost).events]:
                    pass
                leave(lost, way)
            assert text + text_of(survivor, "mine") == alone, state
            assert httpx.get(f"{worker.url}/walkaway/integrity").text == "ok\n"
            assert worker.metrics()["walkaway_worker_free_blocks"] == TIGHT.num_blocks, state
        metrics = worker.metrics()
        assert metrics["walkaway_worker_cancellations_total connection_dropped"] == 5
        assert metrics["walkaway_worker_aborted_requests_total"] == 5


def test_an_engine_that_finds_itself_wrong_says_so_and_bad_questions_get_an_answer() -> None:
    bench = Bench(Faults(leak_blocks=8), max_num_seqs=1)
    bench.step(add("gone", num_prompt=30, max_tokens=2))
    bench.step(abort("gone"), add("stuck"))  # no block is left: the step loop waits for commands
    frontends = Frontends(bench.inbox, bench.now, secret="", first_word=Future(), max_model_len=32)
    settings = WorkerSettings(config=QUICK, faults=Faults(), secret="")
    listening = socket.create_server(("127.0.0.1", 0))
    server = StatusServer(WorkerStatus(settings, frontends, bench.inbox), listening)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    threads = [threading.Thread(target=server.serve_forever)]
    threads.append(threading.Thread(target=bench.engine.run, args=(bench.inbox,)))
    for thread in threads:
        thread.start()
    assert httpx.get(f"{url}/walkaway/integrity").status_code == 200
    stuck = bench.scheduler.requests["stuck"]
    stuck.block_table.append(0)
    answer = httpx.get(f"{url}/walkaway/integrity")
    assert answer.status_code == 500
    assert "a waiting request holds blocks" in answer.text
    assert httpx.get(f"{url}/walkaway/lifecycle?after=x").status_code == 400
    assert httpx.get(f"{url}/metric").status_code == 404
    stuck.block_table.clear()
    bench.inbox.close()
    server.shutdown()
    server.server_close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_settings_that_cannot_work_are_the_first_word() -> None:
    torch = pytest.importorskip("torch", reason="needs the extra `engine` (torch)")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    config = EngineConfig(device="cuda")
    worker = Worker(WorkerSettings(config=config, faults=Faults(), secret=SECRET))
    with pytest.raises(EngineConfigError, match="no CUDA device"):
        worker.compute()
    failed = worker.first_word.result()
    assert isinstance(failed, Failed)
    assert "no CUDA device" in failed.message
    taken = worker.listening.port
    for ports in ({"port": taken}, {"metrics_port": taken}):
        settings = msgspec.structs.replace(worker.settings, **ports)
        with pytest.raises(EngineConfigError, match=f"cannot listen on 127.0.0.1:{taken}"):
            Worker(settings)
