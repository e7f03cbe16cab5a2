"""A stop with requests running: abort or drain, and a second signal."""

import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from reference_engine.serve.process import core_for
from tests.reference_engine.running_engine import (
    RunningEngine,
    body,
    lazy_client,
    post_raw,
    read_until,
)

pytestmark = pytest.mark.e2e

SLOW = ("--runner", "simulated", "--sim-fixed-ms", "20", "--max-num-seqs", "1")
DRAIN = (*SLOW, "--shutdown", "drain")
QUICK = ("--runner", "simulated", "--sim-fixed-ms", "0", "--send-buffer-bytes", "4096")


@contextmanager
def stopping(*flags: str, status: int = 143) -> Iterator[RunningEngine]:
    """An engine that has to end with `status`, without a word, and with its worker."""
    engine = RunningEngine(*flags, stderr=subprocess.PIPE)
    yield engine
    engine.silenced(status)


@contextmanager
def stream_of(engine: RunningEngine, max_tokens: int = 3000) -> Iterator[socket.socket]:
    with post_raw(engine, "stream", stream=True, max_tokens=max_tokens) as stream:
        read_until(stream, b'"text"')
        yield stream


def stop(engine: RunningEngine) -> None:
    engine.process.send_signal(signal.SIGTERM)


def wait_until_it_drains(engine: RunningEngine) -> None:
    while httpx.get(f"{engine.url}/health").status_code != 503:
        pass


def test_aborting_gives_each_client_its_partial_answer() -> None:
    with (
        stopping(*SLOW, status=130) as engine,
        stream_of(engine) as stream,
        post_raw(engine, "whole") as whole,  # waits: there is one slot
    ):
        engine.wait_for("arrived", "whole")
        engine.process.send_signal(signal.SIGINT)
        answer = read_until(stream, b"[DONE]")
        chunks = [line for line in answer.split(b"\n") if line.startswith(b"data: {")]
        last = json.loads(chunks[-1].removeprefix(b"data: "))
        assert "server_shutdown" in json.dumps(last["cancellation_info"])
        assert b"server_shutdown" in read_until(whole, b"cancellation_info")


def test_draining_lets_running_and_waiting_requests_end_and_takes_no_more() -> None:
    with (
        stopping(*DRAIN) as engine,
        stream_of(engine, max_tokens=150) as stream,  # for three seconds
        post_raw(engine, "whole", max_tokens=5) as whole,
    ):
        engine.wait_for("arrived", "whole")
        stop(engine)
        wait_until_it_drains(engine)
        refused = httpx.post(f"{engine.url}/v1/completions", json=body(max_tokens=1))
        assert refused.status_code == 503
        assert "shutting down" in refused.json()["error"]["message"]
        answer = read_until(stream, b"[DONE]")
        assert b'"finish_reason":"length"' in answer
        assert b"server_shutdown" not in answer
        assert b'"completion_tokens":5' in read_until(whole, b"total_tokens")


@pytest.mark.slow
@pytest.mark.parametrize("is_signalled_again", [False, True], ids=["timeout", "signal"])
def test_draining_has_an_end_and_a_second_signal_means_at_once(is_signalled_again: bool) -> None:
    flags = () if is_signalled_again else ("--drain-timeout-s", "0.3")
    with stopping(*DRAIN, *flags) as engine, stream_of(engine) as stream:
        stop(engine)
        if is_signalled_again:
            wait_until_it_drains(engine)
            engine.process.send_signal(signal.SIGINT)
        assert b"server_shutdown" in read_until(stream, b"[DONE]")


def test_the_end_of_standard_input_drains_too() -> None:
    with stopping(*DRAIN, status=0) as engine, stream_of(engine, max_tokens=20) as stream:
        assert engine.process.stdin is not None
        engine.process.stdin.close()
        assert b'"finish_reason":"length"' in read_until(stream, b"[DONE]")


def test_a_worker_that_dies_while_draining_ends_the_wait() -> None:
    with stopping(*DRAIN) as engine, stream_of(engine) as stream:
        stop(engine)
        wait_until_it_drains(engine)
        engine.worker.kill()
        read_until(stream, b"lost its worker")


@pytest.mark.slow
def test_an_abort_that_the_worker_forgets_holds_nothing_up() -> None:
    with stopping(*SLOW, "--fault", "lose-abort=1") as engine, stream_of(engine) as stream:
        stop(engine)
        read_until(stream, b"the server is shutting down")


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [{"stream": True}, {"n": 16}], ids=["task waits", "task has long ended"]
)
def test_a_client_that_reads_nothing_holds_nothing_up(fields: dict[str, Any]) -> None:
    """Its answer of half a megabyte is more than the kernel keeps."""
    with stopping(*QUICK) as engine, lazy_client(engine, "deaf", **fields):
        engine.wait_for("finished", "deaf")
        while engine.metric("vllm:num_requests_running"):
            pass
        stop(engine)
        assert engine.process.wait(20) == 143


@pytest.mark.slow
def test_a_request_that_does_not_arrive_whole_holds_nothing_up() -> None:
    with stopping(*DRAIN) as engine, socket.create_connection(engine.address) as slow:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: slow\r\n"
        slow.sendall(head + b"expect: 100-continue\r\ncontent-length: 9\r\n\r\n{")
        read_until(slow, b"100 Continue")
        stop(engine)
        assert b" 503 " in read_until(slow, b"shutting down")


def test_a_frontend_has_a_core_of_its_own_where_there_are_two() -> None:
    assert core_for(7, set()) is None
    assert core_for(7, {3}) is None
    assert {core_for(pid, {2, 5}) for pid in (100, 101)} == {2, 5}
    assert core_for(41, set(range(4, 20))) == 4 + 41 % 16
