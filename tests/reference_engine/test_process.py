"""The engine as its users meet it: the official client, its start and its end, no traceback."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import openai
import pytest

from tests.reference_engine.running_engine import (
    RunningEngine,
    body,
    lazy_client,
    post_raw,
    read_until,
    running,
)

pytestmark = pytest.mark.e2e


@pytest.fixture
def client() -> Iterator[openai.OpenAI]:
    with (
        running("--runner", "simulated", "--sim-fixed-ms", "5") as engine,
        openai.OpenAI(base_url=f"{engine.url}/v1", api_key="unused", max_retries=0) as client,
    ):
        yield client


def test_the_official_client_completes_and_chats_streamed_or_not(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    whole = client.completions.create(model="tiny", prompt="hello", max_tokens=4)
    assert whole.choices[0].finish_reason == "length"
    assert len(whole.choices[0].text.split()) == 4
    with client.completions.create(
        model="tiny",
        prompt="hello",
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert whole.usage is not None
    assert chunks[-1].usage == whole.usage
    chat: Any = client.chat.completions.create
    chat = partial(chat, model="tiny", messages=[{"role": "user", "content": "hi"}], seed=1)
    text = chat(max_completion_tokens=3).choices[0].message.content
    deltas = [chunk.choices[0].delta for chunk in chat(max_completion_tokens=3, stream=True)]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == text


def test_the_torch_runner_serves_and_without_permission_no_faults() -> None:
    pytest.importorskip("torch", reason="needs the extra `engine` (torch)")
    with running("--device", "cpu", "--num-blocks", "256", "--max-model-len", "512") as engine:
        answers = {
            httpx.post(
                f"{engine.url}/v1/completions", json=body(max_tokens=6, temperature=0), timeout=60
            ).json()["choices"][0]["text"]
            for _ in range(2)
        }
        assert len(answers) == 1, "greedy answers repeat"
        assert len(answers.pop().split()) == 6
        assert httpx.get(f"{engine.url}/walkaway/faults").status_code == 404


def test_a_client_that_stops_reading_is_there_even_if_the_kernel_ends_it() -> None:
    """The kernel treats unread data like unacknowledged data; the engine must distinguish them.

    Here its buffers have room for the whole answer, so it sees no stall itself.
    """
    flags = ["--runner", "simulated", "--sim-fixed-ms", "2", "--heartbeat-s", "0"]
    limits = ["--ack-timeout-s", "1", "--stall-timeout-s", "1", "--send-buffer-bytes", str(2**20)]
    with running(*flags, *limits) as engine, lazy_client(engine, "lazy", stream=True):
        engine.wait_for("finished", "lazy")
        kept = httpx.get(f"{engine.url}/v1/requests/lazy").json()
        assert kept["cancellation"]["method"] == "stall"


def test_when_the_worker_dies_the_frontend_says_so_and_ends() -> None:
    engine = RunningEngine(
        *("--runner", "simulated", "--fault", "die-on-abort", "--worker-metrics-port", "0"),
        stderr=subprocess.PIPE,
    )
    stream, whole = post_raw(engine, "stream", stream=True), post_raw(engine, "whole")
    engine.wait_for("first_token", "whole")
    [page] = engine.ready["worker_metrics_urls"]
    assert "walkaway_worker_num_running 2.0" in httpx.get(page).text
    post_raw(engine, "leaver").close()
    read_until(stream, b"the engine has lost its worker")
    assert b"503 Service Unavailable" in read_until(whole, b"lost its worker")
    stream.close()
    whole.close()
    assert engine.process.wait(20) == 1
    assert engine.process.stderr is not None
    assert engine.process.stderr.read().decode().splitlines() == [
        "walkaway engine: the worker process has ended (status 70); its last output, if any, "
        "is above"
    ]
    engine.process.stderr.close()
    engine.stop()


@pytest.mark.parametrize("is_stalled", [False, True])
def test_when_the_frontend_is_killed_the_worker_goes_even_in_a_stalled_step(
    is_stalled: bool,
) -> None:
    engine = RunningEngine("--runner", "simulated", "--fault", "stall-survivors-on-abort=600")
    with post_raw(engine, "orphan", stream=True) as stream:
        read_until(stream, b'"text"')
        if is_stalled:
            post_raw(engine, "leaver").close()
            engine.wait_for("abort_sent", "leaver")
        engine.process.kill()
        engine.worker.wait(20)
    engine.stop()


def ended(*flags: str, stdin: int | None = None) -> tuple[int, str]:
    """Its exit status and what it said, without a traceback."""
    command = [sys.executable, "-m", "reference_engine", *flags]
    done = subprocess.run(
        command, stdin=stdin, capture_output=True, text=True, timeout=60, check=False
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def test_wrong_settings_exit_2_a_port_in_use_1_and_an_ended_standard_input_0() -> None:
    wrong = {("--num-blocks", "1"): "hold one request", ("--fault", "nonsense"): "unknown fault"}
    for flags, message in wrong.items():
        status, said = ended(*flags)
        assert (status, message in said) == (2, True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, said = ended("--port", str(taken.getsockname()[1]))
    assert status == 1
    assert "cannot listen" in said
    idle = ("--port", "0", "--runner", "simulated", "--exit-with-stdin")
    assert ended(*idle, stdin=subprocess.DEVNULL) == (0, "")


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["TERM", "INT"]
)
def test_a_signal_at_the_first_moment_ends_it(number: int, status: int) -> None:
    for _ in range(3):
        engine = RunningEngine("--runner", "simulated", stderr=subprocess.PIPE)
        engine.process.send_signal(number)
        engine.silenced(status)


def test_clients_that_leave_in_mid_body_or_speak_no_http_make_no_noise() -> None:
    engine = RunningEngine("--runner", "simulated", "--allow-faults", stderr=subprocess.PIPE)
    for line in (b"POST /v1/completions", b"PUT /walkaway/faults"):
        with socket.create_connection(engine.address) as client:
            client.sendall(line + b" HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    with socket.create_connection(engine.address) as client:
        client.sendall(b"\x16\x03\x01 is TLS\r\n\r\n")
        assert b" 400 " in read_until(client, b"Invalid HTTP request")
    assert httpx.get(f"{engine.url}/health").status_code == 200
    engine.process.send_signal(signal.SIGTERM)
    engine.silenced(143)
