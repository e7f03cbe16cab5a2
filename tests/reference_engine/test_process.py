"""The engine as its users meet it: two real processes, a real socket, the official client."""

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
    running,
)

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def engine() -> Iterator[RunningEngine]:
    flags = ["--runner", "simulated", "--sim-fixed-ms", "5", "--max-num-seqs", "2"]
    with running(*flags) as started:
        yield started


@pytest.fixture
def client(engine: RunningEngine) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{engine.url}/v1", api_key="unused", max_retries=0) as client:
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
    """The kernel treats unread data like unacknowledged data; the engine must tell them apart.

    Here its buffers have room for the whole answer, so it sees no stall itself.
    """
    flags = ["--runner", "simulated", "--sim-fixed-ms", "2", "--heartbeat-s", "0"]
    limits = ["--ack-timeout-s", "1", "--stall-timeout-s", "1", "--send-buffer-bytes", str(2**20)]
    with running(*flags, *limits) as engine, lazy_client(engine, "lazy", stream=True):
        engine.wait_for("finished", "lazy")
        kept = httpx.get(f"{engine.url}/v1/requests/lazy").json()
        assert kept["cancellation"]["method"] == "stall"
