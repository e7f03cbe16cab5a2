"""A stop with requests running: abort or drain, and a second signal."""

import json
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.reference_engine.running_engine import (
    RunningEngine,
    body,
    post_raw,
    read_until,
)
from tests.reference_engine.test_leaving import lazy_client

pytestmark = pytest.mark.e2e

SLOW = ("--runner", "simulated", "--sim-fixed-ms", "20", "--max-num-seqs", "1")
DRAIN = (*SLOW, "--shutdown", "drain")


@contextmanager
def stopping(*flags: str, status: int) -> Iterator[RunningEngine]:
    """An engine that has to end with `status`, without a word, and with its worker."""
    engine = RunningEngine(*flags, stderr=subprocess.PIPE)
    yield engine
    assert engine.process.wait(20) == status
    assert engine.process.stderr is not None
    assert engine.process.stderr.read() == b""
    engine.process.stderr.close()
    engine.worker.wait(20)
    engine.stop()


def stream_of(engine: RunningEngine, request_id: str, max_tokens: int = 3000) -> socket.socket:
    stream = post_raw(engine, request_id, stream=True, max_tokens=max_tokens)
    read_until(stream, b'"text"')
    return stream


def wait_until_it_drains(engine: RunningEngine) -> None:
    while httpx.get(f"{engine.url}/health").status_code != 503:
        pass


def last_chunk(answer: bytes) -> dict[str, object]:
    """The last event of a stream before its [DONE]."""
    lines = [line for line in answer.split(b"\n") if line.startswith(b"data: {")]
    chunk: dict[str, object] = json.loads(lines[-1].removeprefix(b"data: "))
    return chunk


def test_aborting_gives_each_client_its_partial_answer() -> None:
    with stopping(*SLOW, status=130) as engine:
        stream = stream_of(engine, "stream")
        whole = post_raw(engine, "whole")  # waits: there is one slot
        engine.wait_for("arrived", "whole")
        engine.process.send_signal(signal.SIGINT)
        chunk = last_chunk(read_until(stream, b"[DONE]"))
        assert "server_shutdown" in json.dumps(chunk["cancellation_info"])
        assert b"server_shutdown" in read_until(whole, b"cancellation_info")
        stream.close()
        whole.close()


def test_draining_lets_running_and_waiting_requests_end_and_takes_no_more() -> None:
    with stopping(*DRAIN, status=143) as engine:
        stream = stream_of(engine, "stream", max_tokens=150)  # for three seconds
        whole = post_raw(engine, "whole", max_tokens=5)
        engine.wait_for("arrived", "whole")
        engine.process.send_signal(signal.SIGTERM)
        wait_until_it_drains(engine)
        refused = httpx.post(f"{engine.url}/v1/completions", json=body(max_tokens=1))
        assert refused.status_code == 503
        assert "shutting down" in refused.json()["error"]["message"]
        answer = read_until(stream, b"[DONE]")
        assert b'"finish_reason":"length"' in answer
        assert b"server_shutdown" not in answer
        assert b'"completion_tokens":5' in read_until(whole, b"total_tokens")
        stream.close()
        whole.close()


@pytest.mark.slow
def test_draining_has_an_end() -> None:
    with stopping(*DRAIN, "--drain-timeout-s", "0.3", status=143) as engine:
        stream = stream_of(engine, "stream")
        engine.process.send_signal(signal.SIGTERM)
        assert b"server_shutdown" in read_until(stream, b"[DONE]")
        stream.close()


@pytest.mark.slow
def test_a_second_signal_means_at_once() -> None:
    with stopping(*DRAIN, status=143) as engine:
        stream = stream_of(engine, "stream")
        engine.process.send_signal(signal.SIGTERM)
        wait_until_it_drains(engine)
        engine.process.send_signal(signal.SIGINT)
        assert b"server_shutdown" in read_until(stream, b"[DONE]")
        stream.close()


def test_the_end_of_standard_input_drains_too() -> None:
    with stopping(*DRAIN, status=0) as engine:
        stream = stream_of(engine, "stream", max_tokens=20)
        assert engine.process.stdin is not None
        engine.process.stdin.close()
        assert b'"finish_reason":"length"' in read_until(stream, b"[DONE]")
        stream.close()


def test_nothing_to_drain_is_drained_at_once() -> None:
    with stopping(*DRAIN, "--drain-timeout-s", "3600", status=143) as engine:
        engine.process.send_signal(signal.SIGTERM)


@pytest.mark.slow
def test_an_abort_that_the_worker_forgets_holds_nothing_up() -> None:
    with stopping(*SLOW, "--fault", "lose-abort=1", status=143) as engine:
        stream = stream_of(engine, "stream")
        engine.process.send_signal(signal.SIGTERM)
        read_until(stream, b"the server is shutting down")
        stream.close()


@pytest.mark.slow
def test_a_client_that_reads_nothing_holds_nothing_up() -> None:
    flags = ("--runner", "simulated", "--sim-fixed-ms", "0", "--send-buffer-bytes", "4096")
    with stopping(*flags, status=143) as engine:
        deaf = post_raw(engine, "deaf", stream=True)  # half a megabyte, more than the kernel keeps
        engine.wait_for("finished", "deaf")
        engine.process.send_signal(signal.SIGTERM)
        assert engine.process.wait(20) == 143
        deaf.close()


@pytest.mark.slow
def test_an_unread_answer_holds_nothing_up() -> None:
    """Its request has long ended, and its task with it; the rest of it is in a buffer."""
    flags = ("--runner", "simulated", "--sim-fixed-ms", "0", "--send-buffer-bytes", "4096")
    with stopping(*flags, status=143) as engine:
        deaf = lazy_client(engine, "deaf", n=16)  # 300 kB
        engine.wait_for("finished", "deaf")
        while engine.metric("vllm:num_requests_running"):
            pass
        engine.process.send_signal(signal.SIGTERM)
        assert engine.process.wait(20) == 143
        deaf.close()


def seconds_to_end_beside_half_a_request(flags: tuple[str, ...]) -> float:
    with stopping(*flags, status=143) as engine:
        address = engine.url.removeprefix("http://").split(":")
        with socket.create_connection((address[0], int(address[1]))) as slow:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: slow\r\n"
            slow.sendall(head + b"expect: 100-continue\r\ncontent-length: 9\r\n\r\n{")
            read_until(slow, b"100 Continue")
            engine.process.send_signal(signal.SIGTERM)
            started_s = time.monotonic()
            assert b" 503 " in read_until(slow, b"shutting down")
        assert engine.process.wait(20) == 143
        return time.monotonic() - started_s


@pytest.mark.slow
def test_a_request_that_does_not_arrive_whole_holds_nothing_up() -> None:
    """Otherwise it would hold up each stop for the 3 s that a last answer may take."""
    tries = (seconds_to_end_beside_half_a_request(DRAIN) for _ in range(3))
    assert any(took_s < 3 for took_s in tries)


def test_a_worker_that_dies_while_draining_ends_the_wait() -> None:
    with stopping(*DRAIN, status=143) as engine:
        stream = stream_of(engine, "stream")
        engine.process.send_signal(signal.SIGTERM)
        wait_until_it_drains(engine)
        engine.worker.kill()
        read_until(stream, b"lost its worker")
        stream.close()
