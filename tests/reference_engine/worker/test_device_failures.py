"""Out of memory, and a failed device, as the engine's users and its frontends meet them."""

import subprocess
import threading

import httpx
import pytest
from msgspec.structs import replace

from reference_engine.config import EngineConfigError
from reference_engine.model.runners import Runner
from reference_engine.serve.link import NO_MEMORY
from reference_engine.serve.supervisor import WORKER_LOST
from reference_engine.wire import Beat
from reference_engine.worker.service import on_a_device
from tests.reference_engine.breaking_engine import FAILED, MODULE, OUT_OF_MEMORY
from tests.reference_engine.fake_worker import EMPTY_REPORT
from tests.reference_engine.running_engine import RunningEngine, post_raw, read_until
from tests.reference_engine.stepped_engine import add
from tests.reference_engine.worker.test_frontends import LARGE, PATIENT, Ends, hello
from tests.reference_engine.worker.test_service import RunningWorker, next_token, report_of

SIMULATED = ("--runner", "simulated", "--sim-fixed-ms", "2", "--num-blocks", "256")


@pytest.mark.e2e
def test_a_step_out_of_memory_ends_its_own_streams_and_what_waited_is_served() -> None:
    flags = (*SIMULATED, "--max-num-seqs", "2", "--worker-metrics-port", "0")
    engine = RunningEngine(*flags, stderr=subprocess.PIPE, module=MODULE)
    stream, leaver = post_raw(engine, "stream", stream=True), post_raw(engine, "leaver")
    engine.wait_for("first_token", "stream")
    engine.wait_for("first_token", "leaver")
    breaks = post_raw(engine, "breaks", seed=OUT_OF_MEMORY)
    engine.wait_for("arrived", "breaks")
    waits = post_raw(engine, "waits", stream=True, max_tokens=40)
    engine.wait_for("arrived", "waits")
    leaver.close()
    assert NO_MEMORY.encode() in read_until(stream, b"out of memory")
    assert b"503 Service Unavailable" in read_until(breaks, NO_MEMORY.encode())
    assert b'"finish_reason":"length"' in read_until(waits, b"[DONE]")
    for client in (stream, breaks, waits):
        client.close()
    mine = [one for one in engine.events() if one["client_request_id"] == "stream"]
    assert [(one["event"], one["reason"]) for one in mine][-3:] == [
        ("removed", "out_of_memory"),
        ("blocks_freed", "out_of_memory"),
        ("finished", "error"),
    ]
    assert engine.metric("vllm:request_success_total", finished_reason="error") == 2
    assert engine.metric("vllm:request_success_total", finished_reason="length") == 1
    assert engine.metric("vllm:num_requests_running") == 0
    assert engine.metric("vllm:kv_cache_usage_perc") == 0
    [page] = engine.ready["worker_metrics_urls"]
    assert httpx.get(page.replace("/metrics", "/walkaway/integrity")).text == "ok\n"
    assert engine.stop() == 0
    assert engine.process.stderr is not None
    [line] = engine.process.stderr.read().decode().splitlines()
    engine.process.stderr.close()
    assert "was out of memory and has ended 2 of its requests: CUDA out of memory. Tried" in line


@pytest.mark.e2e
def test_a_device_that_fails_ends_the_engine_with_what_it_said() -> None:
    engine = RunningEngine(*SIMULATED, stderr=subprocess.PIPE, module=MODULE)
    stream = post_raw(engine, "stream", stream=True)
    engine.wait_for("first_token", "stream")
    breaks = post_raw(engine, "breaks", seed=FAILED)
    read_until(stream, WORKER_LOST.encode())
    assert b"503 Service Unavailable" in read_until(breaks, WORKER_LOST.encode())
    stream.close()
    breaks.close()
    assert engine.process.wait(20) == 1
    assert engine.process.stderr is not None
    said = engine.process.stderr.read().decode().splitlines()
    engine.process.stderr.close()
    engine.stop()
    assert said == [
        "worker: the device has failed, and this process ends: CUDA error: an illegal memory "
        "access was encountered; if a new start does not help, CUDA_LAUNCH_BLOCKING=1 shows which "
        "kernel it was, and --device cpu needs no device",
        "walkaway engine: the worker process has ended (status 1); its last output, if any, is "
        "above",
    ]


@pytest.mark.e2e
def test_the_last_events_of_all_requests_come_before_the_end_of_a_workers_process() -> None:
    worker = RunningWorker(module=MODULE, stderr=subprocess.PIPE)
    worker.status = 1
    with worker.connect("f") as f, worker.connect("g") as g:
        f.send(add("runs", max_tokens=3000))
        next_token(f)
        g.send(add("breaks", seed=FAILED))
        events: dict[str, list[tuple[str, str | None]]] = {}
        for line, name in ((f, "runs"), (g, "breaks")):
            while ("finished", "error") not in events.setdefault(name, []):
                events[name] += [(one.event, one.reason) for one in report_of(line).events]
            assert line.is_ended_by_the_worker()
    failed = [
        ("removed", "device_failed"),
        ("blocks_freed", "device_failed"),
        ("finished", "error"),
    ]
    assert events == {"runs": failed, "breaks": [("admitted", None), *failed]}
    worker.end()
    assert worker.process.stderr is not None
    [said] = worker.process.stderr.read().splitlines()
    worker.process.stderr.close()
    assert said.startswith(b"worker: the device has failed, and this process ends: CUDA error: an")


def test_when_a_worker_leaves_a_slow_reader_gets_its_last_report_and_a_new_frontend_no_word() -> (
    None
):
    ends = Ends(PATIENT)
    with ends.connect("deaf") as slow, ends.connect("quick") as quick:
        ends.frontends.report(EMPTY_REPORT, LARGE)
        leaving = threading.Thread(target=ends.frontends.leave)
        leaving.start()
        assert quick.next() == EMPTY_REPORT
        assert slow.next() == replace(EMPTY_REPORT, outputs=LARGE["deaf"].outputs)
        for line in (slow, quick):
            assert line.is_ended_by_the_worker()
    leaving.join(10)
    assert not leaving.is_alive()
    with ends.line(hello("late")) as late:
        assert late.next_with_beats() == Beat(), "not Ready"
    ends.close()


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("CUDA error: out of memory", "lower --max-num-batched-tokens"),
        ("CUDA error: unspecified launch failure", "--device cpu"),
    ],
)
def test_a_model_for_which_the_device_has_no_room_or_fails_is_refused(
    said: str, advice: str
) -> None:
    pytest.importorskip("torch", reason="needs the extra `engine` (torch)")

    def load() -> Runner:
        raise RuntimeError(said)

    with pytest.raises(EngineConfigError, match=advice) as refused:
        on_a_device(load)
    assert said in str(refused.value)
