import json
from typing import Any

import pytest

from reference_engine.config import EngineConfig, EngineConfigError
from reference_engine.frontend.errors import ApiError
from reference_engine.frontend.openai_api import Generation, read_chat, read_completion
from reference_engine.model.tokenizer import FIRST_WORD, Tokenizer

CONFIG = EngineConfig(max_model_len=64, num_blocks=64)
TOKENIZER = Tokenizer(2048)


def completion(**fields: Any) -> Generation:
    body = {"model": "tiny", "prompt": "hello", **fields}
    return read_completion(json.dumps(body).encode(), CONFIG, TOKENIZER)


def test_a_byte_is_a_token_and_defaults_are_openais() -> None:
    generation = completion()
    assert len(generation.prompt_token_ids) == 5
    assert (generation.sampling.max_tokens, generation.sampling.temperature) == (16, 1.0)
    assert not generation.stream


def test_without_a_seed_the_engines_and_the_prompt_decide() -> None:
    other = EngineConfig(max_model_len=64, num_blocks=64, seed=1)
    data = json.dumps({"model": "tiny", "prompt": "hello"}).encode()
    seeds = [
        read_completion(data, config, TOKENIZER).sampling.seed for config in (CONFIG, CONFIG, other)
    ]
    assert seeds[0] == seeds[1] != seeds[2]
    assert completion(prompt="other").sampling.seed != seeds[0]
    assert completion(seed=7).sampling.seed == 7


def test_nulls_are_as_good_as_nothing() -> None:
    fields = ("ignore_eos", "stream", "stop", "tools", "tool_choice", "top_logprobs", "n", "suffix")
    assert completion(**dict.fromkeys(fields)) == completion()


def test_a_chat_answer_may_fill_the_context() -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    generation = read_chat(json.dumps(body).encode(), CONFIG, TOKENIZER)
    prompt = "user: hi\nassistant:"
    assert generation.prompt_token_ids == TOKENIZER.encode(prompt)
    assert generation.sampling.max_tokens == 64 - len(prompt)


def test_content_parts_and_stop_are_read() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": parts}], "stop": "x"}
    generation = read_chat(json.dumps(body).encode(), CONFIG, TOKENIZER)
    assert generation.prompt_token_ids == TOKENIZER.encode("user: ab\nassistant:")
    assert generation.sampling.stop == ("x",)


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"model": "gpt"}, 404, "serves `tiny`"),
        ({"max_tokens": 0}, 400, "max_tokens: must be at least 1, not 0"),
        ({"max_tokens": -3}, 400, "not -3"),
        ({"max_tokens": "ten"}, 400, r"Expected `int | null`, got `str` - at `\$.max_tokens`"),
        ({"max_tokens": 60}, 400, "asks for 60 more"),
        ({"prompt": "x" * 64}, 400, "context holds 64 tokens; the prompt has 64"),
        ({"prompt": ""}, 400, "must not be empty"),
        ({"prompt": [1, 9999]}, 400, "from 0 to 2047"),
        ({"temperature": 3}, 400, "from 0 to 2.0"),
        ({"temperature": -0.1}, 400, "from 0 to 2.0"),
        ({"n": 2}, 400, "n: this engine supports only 1"),
        ({"stop": ["a"] * 5}, 400, "at most 4"),
        ({"stop": [""]}, 400, "1 to 256 bytes"),
        ({"seed": 2**63}, 400, "64-bit"),
        ({"max_tokns": 5}, 400, "max_tokns"),
        ({"stream_options": {"usage": True}}, 400, "usage"),
    ],
)
def test_what_cannot_be_served_is_refused(
    fields: dict[str, Any], status: int, message: str
) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        completion(**fields)
    assert caught.value.status == status


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b'{"model": "tiny"}', b"null"])
def test_what_is_no_body_is_refused(data: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        read_completion(data, CONFIG, TOKENIZER)
    assert caught.value.status == 400


def test_every_word_is_readable_and_different() -> None:
    words = {TOKENIZER.text_of(token) for token in range(FIRST_WORD, 2048)}
    assert len(words) == 2048 - FIRST_WORD
    assert all(word[0] == " " and word[1:].isalpha() for word in words)
    assert TOKENIZER.text_of(2) == ""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"max_num_batched_tokens": 4}, "would starve"),
        ({"num_blocks": 8}, "must hold one request"),
    ],
)
def test_an_engine_that_cannot_work_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineConfigError, match=message):
        EngineConfig(**settings)
