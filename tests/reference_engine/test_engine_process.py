"""The engine as its users meet it: two real processes, a real socket, the official client."""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import psutil
import pytest

pytestmark = pytest.mark.e2e


class RunningEngine:
    """A started engine. Its standard input is a pipe that we hold: closing it ends the engine."""

    def __init__(self, *flags: str) -> None:
        command = [sys.executable, "-m", "reference_engine", "--port", "0", "--exit-with-stdin"]
        self.process = subprocess.Popen(
            [*command, *flags], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        ready = json.loads(self.process.stdout.readline())
        self.url: str = ready["url"]
        self.worker = psutil.Process(ready["worker_pid"])

    def stop(self) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        return self.process.wait(20)

    def events(self) -> list[dict[str, Any]]:
        answer = httpx.get(f"{self.url}/walkaway/lifecycle", params={"limit": 100_000})
        return [json.loads(line) for line in answer.text.splitlines()]

    def wait_for(self, event: str, client_request_id: str) -> dict[str, Any]:
        """Follow the log until the event is there; the test's own timeout bounds it."""
        while True:
            for entry in self.events():
                if (entry["event"], entry["client_request_id"]) == (event, client_request_id):
                    return entry

    def order(self, client_request_id: str) -> list[str]:
        mine = [e for e in self.events() if e["client_request_id"] == client_request_id]
        return [entry["event"] for entry in sorted(mine, key=lambda entry: entry["t_ns"])]

    def metric(self, name: str) -> float:
        for line in httpx.get(f"{self.url}/metrics").text.splitlines():
            if line.startswith(name + " "):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no metric {name}")


@contextmanager
def running(*flags: str) -> Iterator[RunningEngine]:
    engine = RunningEngine(*flags)
    try:
        yield engine
    finally:
        status = engine.stop()
        engine.worker.wait(10)
    assert status == 0


@pytest.fixture(scope="module")
def engine() -> Iterator[RunningEngine]:
    flags = ["--runner", "simulated", "--sim-fixed-ms", "5", "--max-num-seqs", "2"]
    with running(*flags, "--allow-faults") as started:
        yield started


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hello", "max_tokens": 3000, "ignore_eos": True, **fields}


def post_raw(engine: RunningEngine, request_id: str, **fields: Any) -> socket.socket:
    """Send a request and keep the bare socket, so that leaving is ours to do."""
    host, port = engine.url.removeprefix("http://").split(":")
    data = json.dumps(body(**fields)).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\nx-request-id: {request_id}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    connection = socket.create_connection((host, int(port)))
    connection.sendall(head.encode() + data)
    return connection


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    seen = b""
    while mark not in seen:
        part = connection.recv(65536)
        assert part, f"the connection ended before {mark!r}: {seen!r}"
        seen += part
    return seen


def test_the_official_client_works_unchanged(engine: RunningEngine) -> None:
    with openai.OpenAI(base_url=f"{engine.url}/v1", api_key="unused", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["tiny"]
        whole = client.completions.create(model="tiny", prompt="hello", max_tokens=4)
        assert whole.choices[0].finish_reason == "length"
        assert len(whole.choices[0].text.split()) == 4
        assert whole.usage is not None
        assert whole.usage.completion_tokens == 4
        with client.completions.create(
            model="tiny",
            prompt="hello",
            max_tokens=4,
            stream=True,
            stream_options={"include_usage": True},
        ) as stream:
            chunks = list(stream)
        assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 4


def test_the_official_client_chats(engine: RunningEngine) -> None:
    with openai.OpenAI(base_url=f"{engine.url}/v1", api_key="unused", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            max_completion_tokens=3,
            temperature=0,
            seed=1,
        )
        text = answer.choices[0].message.content
        assert text is not None
        with client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hi"}],
            max_completion_tokens=3,
            temperature=0,
            seed=1,
            stream=True,
        ) as stream:
            deltas = [chunk.choices[0].delta for chunk in stream]
        assert deltas[0].role == "assistant"
        assert "".join(delta.content or "" for delta in deltas) == text


def test_the_official_client_gets_openai_errors(engine: RunningEngine) -> None:
    with openai.OpenAI(base_url=f"{engine.url}/v1", api_key="unused", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError, match="at least 1"):
            client.completions.create(model="tiny", prompt="x", max_tokens=0)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "unary"])
@pytest.mark.parametrize("phase", ["queued", "running"])
def test_leaving_frees_everything(engine: RunningEngine, stream: bool, phase: str) -> None:
    name = f"leaver-{stream}-{phase}"
    fillers = (
        [post_raw(engine, f"filler-{name}-{i}") for i in range(2)] if phase == "queued" else []
    )
    for i, _ in enumerate(fillers):
        engine.wait_for("first_token", f"filler-{name}-{i}")
    leaver = post_raw(engine, name, stream=stream)
    engine.wait_for("arrived" if phase == "queued" else "first_token", name)
    leaver.close()
    finished = engine.wait_for("finished", name)
    assert finished["reason"] == "abort"
    stages = ["disconnected", "abort_sent", "abort_received", "removed", "blocks_freed", "finished"]
    expected = ["arrived"] + (["admitted", "first_token"] if phase == "running" else []) + stages
    assert engine.order(name) == expected
    assert finished["num_generated"] < 3000
    for filler in fillers:
        filler.close()
    for i, _ in enumerate(fillers):
        engine.wait_for("finished", f"filler-{name}-{i}")
    assert engine.metric("vllm:num_requests_running") == 0
    assert engine.metric("walkaway_engine_free_blocks") == 4096


def test_a_reset_is_a_leaving_too(engine: RunningEngine) -> None:
    leaver = post_raw(engine, "reset", stream=True)
    read_until(leaver, b"data: ")
    engine.wait_for("first_token", "reset")
    leaver.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    leaver.close()
    assert engine.wait_for("finished", "reset")["reason"] == "abort"


@pytest.mark.parametrize(
    ("raw", "status", "message"),
    [
        (b"{", 400, "truncated"),
        (b'{"model": "tiny", "prompt": "x", "max_tokens": -1}', 400, "at least 1"),
        (b'{"model": "nope", "prompt": "x"}', 404, "does not exist"),
        (b"x" * (1024 * 1024 + 1), 413, "at most 1048576 bytes"),
        (json.dumps({"model": "tiny", "prompt": "x" * 5000}).encode(), 400, "context holds 4096"),
    ],
    ids=["json", "max_tokens", "model", "body", "context"],
)
def test_bad_bodies_get_openai_errors_and_the_engine_goes_on(
    engine: RunningEngine, raw: bytes, status: int, message: str
) -> None:
    answer = httpx.post(f"{engine.url}/v1/completions", content=raw)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]
    good = httpx.post(f"{engine.url}/v1/completions", json=body(max_tokens=1))
    assert good.status_code == 200


def test_wrong_paths_and_methods_are_openai_errors(engine: RunningEngine) -> None:
    assert httpx.get(f"{engine.url}/v2").json()["error"]["type"] == "invalid_request_error"
    assert httpx.get(f"{engine.url}/v1/completions").status_code == 405


def test_faults_over_http(engine: RunningEngine) -> None:
    url = f"{engine.url}/walkaway/faults"
    try:
        assert httpx.put(url, json={"delay-abort": 0.25}).json()["delay-abort"] == 0.25
        leaver = post_raw(engine, "delayed", stream=True)
        engine.wait_for("first_token", "delayed")
        leaver.close()
        engine.wait_for("finished", "delayed")
        times = {
            e["event"]: e["t_ns"] for e in engine.events() if e["client_request_id"] == "delayed"
        }
        # The event loop's timers count in whole milliseconds.
        assert times["abort_sent"] - times["disconnected"] >= 0.249e9
        assert httpx.put(url, json={"lose-abort": 7}).status_code == 400
    finally:
        assert httpx.put(url, json={}).json()["delay-abort"] == 0.0


def test_without_permission_there_are_no_faults() -> None:
    with running("--runner", "simulated") as engine:
        assert httpx.get(f"{engine.url}/walkaway/faults").status_code == 404


def test_the_log_says_what_happened_and_pages(engine: RunningEngine) -> None:
    httpx.post(f"{engine.url}/v1/completions", json=body(max_tokens=2))
    first = httpx.get(f"{engine.url}/walkaway/lifecycle", params={"limit": 2})
    assert len(first.text.splitlines()) == 2
    assert first.headers["x-walkaway-next-after"] == "2"
    steps = httpx.get(f"{engine.url}/walkaway/steps", params={"limit": 1})
    assert json.loads(steps.text)["step"] == 1
    refused = httpx.get(f"{engine.url}/walkaway/steps", params={"after": "-1"})
    assert refused.status_code == 400


def test_when_the_worker_dies_the_frontend_says_so_and_goes() -> None:
    engine = RunningEngine("--runner", "simulated")
    stream = post_raw(engine, "orphan", stream=True)
    read_until(stream, b'"text"')
    engine.worker.kill()
    read_until(stream, b"worker process has ended")
    stream.close()
    assert engine.process.wait(20) == 1
    engine.stop()


def test_when_the_frontend_is_killed_the_worker_goes() -> None:
    engine = RunningEngine("--runner", "simulated")
    engine.process.kill()
    engine.worker.wait(20)
    engine.stop()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--fault", "nonsense"], "unknown fault"),
        (["--num-blocks", "1"], "must hold one request"),
        (["--runner", "magic"], "invalid choice"),
    ],
)
def test_settings_that_cannot_work_exit_2(flags: list[str], message: str) -> None:
    command = [sys.executable, "-m", "reference_engine", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_a_message() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "reference_engine", "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "cannot listen" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_torch_runner_serves() -> None:
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
