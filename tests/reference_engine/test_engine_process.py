"""The engine as its users meet it: two real processes, a real socket, the official client."""

import json
import socket
from collections.abc import Iterator

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.reference_engine.running_engine import (
    RunningEngine,
    body,
    post_raw,
    read_until,
    running,
)

pytestmark = pytest.mark.e2e

ABORTED = "vllm:request_success_total"


@pytest.fixture(scope="module")
def engine() -> Iterator[RunningEngine]:
    flags = ["--runner", "simulated", "--sim-fixed-ms", "5", "--max-num-seqs", "2"]
    with running(*flags, "--allow-faults") as started:
        yield started


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
        assert client.models.retrieve("tiny").id == "tiny"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("other")
        with pytest.raises(openai.BadRequestError, match=">= 1"):
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


def test_a_pipelining_client_is_cut_off_and_its_leaving_seen(engine: RunningEngine) -> None:
    fillers = [post_raw(engine, f"before-pipe-{i}") for i in range(2)]
    for i, _ in enumerate(fillers):
        engine.wait_for("first_token", f"before-pipe-{i}")
    pipe = post_raw(engine, "pipe")
    engine.wait_for("arrived", "pipe")
    pipe.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    assert engine.wait_for("finished", "pipe")["reason"] == "abort"
    assert "disconnected" in engine.order("pipe")
    pipe.close()
    for filler in fillers:
        filler.close()


def test_three_hundred_at_once_and_two_hundred_leave(engine: RunningEngine) -> None:
    before = engine.metric(ABORTED, finished_reason="abort")
    with httpx.Client() as client:
        stayers = [post_raw(engine, f"stays-{i}", max_tokens=1, stream=True) for i in range(100)]
        leavers = [post_raw(engine, f"leaves-{i}", stream=bool(i % 2)) for i in range(200)]
        engine.wait_for("arrived", "leaves-199")
        for leaver in leavers:
            leaver.close()
        for stayer in stayers:
            read_until(stayer, b"[DONE]")
            stayer.close()
        while engine.metric(ABORTED, finished_reason="abort") < before + 200:
            client.get(f"{engine.url}/health")
    mine = [e for e in engine.events() if (e["client_request_id"] or "").startswith("leaves-")]
    aborted = [e for e in mine if (e["event"], e["reason"]) == ("finished", "abort")]
    assert len(aborted) == len({e["client_request_id"] for e in aborted}) == 200
    assert engine.metric("walkaway_engine_free_blocks") == 4096


def test_metrics_are_what_was_done(engine: RunningEngine) -> None:
    text = httpx.get(f"{engine.url}/metrics").text
    before = {f.name: f for f in text_string_to_metric_families(text)}
    httpx.post(f"{engine.url}/v1/completions", json=body(prompt="12345", max_tokens=7))
    text = httpx.get(f"{engine.url}/metrics").text
    after = {f.name: f for f in text_string_to_metric_families(text)}

    def change(name: str, **labels: str) -> float:
        values = [
            next(s.value for s in families[name].samples if labels.items() <= s.labels.items())
            for families in (before, after)
        ]
        return values[1] - values[0]

    assert change("vllm:generation_tokens") == 7
    assert change("vllm:prompt_tokens") == 5
    assert change("walkaway_engine_steps") == 7
    assert change("vllm:request_success", finished_reason="length") == 1
    assert change("vllm:request_success", finished_reason="abort") == 0
    assert after["vllm:kv_cache_usage_perc"].samples[0].value == 0
    assert after["walkaway_engine_batch_slots"].samples[0].value == 2


def test_continuous_usage_counts_up(engine: RunningEngine) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = httpx.post(
        f"{engine.url}/v1/completions",
        json=body(max_tokens=3, stream=True, stream_options=options),
    )
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    counts = [json.loads(line)["usage"]["completion_tokens"] for line in lines]
    assert counts == [1, 2, 3, 3, 3], "three tokens, the finish reason, the final usage"
    assert answer.headers["x-request-id"].startswith("req-"), "without one of the client's, ours"


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
        (b"{", 400, "JSON that ends too early"),
        (b'{"model": "tiny", "prompt": "x", "max_tokens": -1}', 400, ">= 1 - at `$.max_tokens`"),
        (b'{"model": "nope", "prompt": "x"}', 404, "does not exist"),
        (b"x" * (1024 * 1024 + 1), 413, "at most 1048576 bytes"),
        (json.dumps({"model": "tiny", "prompt": "x" * 5000}).encode(), 400, "context holds 4096"),
        (b'{"model": "tiny", "prompt": "x", "logit_bias": ' + b"[" * 100_000, 400, "body"),
    ],
    ids=["json", "max_tokens", "model", "body", "context", "depth"],
)
def test_bad_bodies_get_openai_errors_and_the_engine_goes_on(
    engine: RunningEngine, raw: bytes, status: int, message: str
) -> None:
    url, headers = f"{engine.url}/v1/completions", {"x-request-id": "bad"}
    answer = httpx.post(url, content=raw, headers=headers)
    assert (answer.status_code, answer.headers["x-request-id"]) == (status, "bad")
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
    for after in ("-1", "x", "9" * 30, "1" * 5000, "٣"):
        refused = httpx.get(f"{engine.url}/walkaway/steps", params={"after": after})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "after")


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
