import json
from typing import Any

import pytest

from reference_engine.api.bodies import NEUTRAL
from reference_engine.api.openai import Generation, read_chat, read_completion
from reference_engine.api.schemas import ApiError
from reference_engine.config import EngineConfig, EngineConfigError
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
        ({"model": "x" * 257}, 400, r"length <= 256 - at `\$.model`"),
        ({"max_tokens": 0}, 400, r"Expected `int` >= 1 - at `\$.max_tokens`"),
        ({"max_tokens": "ten"}, 400, r"Expected `int \| null`, got `str` - at `\$.max_tokens`"),
        ({"max_tokens": True}, 400, "got `bool`"),
        ({"max_tokens": 10**400}, 400, "max_tokens"),
        ({"max_tokens": 60}, 400, "has 5 and 60 more are asked for"),
        ({"prompt": "x" * 64}, 400, "context holds 64 tokens; the prompt has 64"),
        ({"prompt": "\N{EURO SIGN}" * 22}, 400, "the prompt has 66"),
        ({"prompt": [5] * 64}, 400, "the prompt has 64"),
        ({"prompt": ""}, 400, "must not be empty"),
        ({"prompt": []}, 400, "must not be empty"),
        ({"prompt": [""]}, 400, "must not be empty"),
        ({"prompt": [[]]}, 400, "must not be empty"),
        ({"prompt": [1, 9999]}, 400, "from 0 to 2047"),
        ({"prompt": [-1]}, 400, "from 0 to 2047"),
        ({"prompt": [1, True]}, 400, "got `bool`"),
        ({"prompt": ["a", "b"]}, 400, "one prompt a request, not a list of 2"),
        ({"prompt": [[1], [2]]}, 400, "one prompt a request, not a list of 2"),
        ({"prompt": [1, "b"]}, 400, "one prompt a request, not a list of 2"),
        ({"temperature": 3}, 400, r"<= 2.0 - at `\$.temperature`"),
        ({"temperature": -0.1}, 400, ">= 0.0"),
        ({"temperature": False}, 400, "got `bool`"),
        ({"n": 0}, 400, r">= 1 - at `\$.n`"),
        ({"n": 17}, 400, r"<= 16 - at `\$.n`"),
        ({"n": True}, 400, "got `bool`"),
        ({"n": 2, "best_of": 3}, 400, "best_of: this engine supports only n, which is 2"),
        ({"priority": 2**31}, 400, r"<= 2147483647 - at `\$.priority`"),
        ({"priority": -(2**31) - 1}, 400, "priority"),
        ({"priority": 1.5}, 400, "got `float`"),
        ({"deadline_s": 0}, 400, r"> 0.0 - at `\$.deadline_s`"),
        ({"deadline_s": -0.0}, 400, "deadline_s"),
        ({"deadline_s": 86401}, 400, "<= 86400"),
        ({"keep_alive_s": 0.01}, 400, r">= 0.1 - at `\$.keep_alive_s`"),
        ({"keep_alive_s": "1"}, 400, "keep_alive_s"),
        ({"stop": ["a"] * 5}, 400, r"length <= 4 - at `\$.stop`"),
        ({"stop": [""]}, 400, r"length >= 1 - at `\$.stop\[0\]`"),
        ({"stop": "x" * 257}, 400, "length <= 256"),
        ({"seed": 2**63}, 400, r"at `\$.seed`"),
        ({"user": "x" * 257}, 400, "user"),
        ({"metadata": {str(i): "" for i in range(17)}}, 400, "length <= 16"),
        ({"metadata": {"k": "x" * 513}}, 400, "metadata"),
        ({"metadata": {"k" * 65: "x"}}, 400, "metadata"),
        ({"metadata": {"k": 1}}, 400, "metadata"),
        ({"logprobs": 0}, 400, "logprobs: this engine supports only false"),
        ({"echo": True}, 400, "echo: this engine supports only false"),
        ({"top_p": True}, 400, "top_p: this engine supports only 1"),
        ({"presence_penalty": False}, 400, "presence_penalty: this engine supports only 0"),
        ({"tool_choice": "required"}, 400, 'only "none" or "auto"'),
        ({"max_tokns": 5}, 400, "max_tokns"),
        ({"stream_options": {"usage": True}}, 400, "usage"),
    ],
)
def test_fields_that_cannot_be_served_are_refused(
    fields: dict[str, Any], status: int, message: str
) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        completion(**fields)
    assert caught.value.status == status


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b"null",
        b"{} {}",
        b'{"model": "tiny"}',
        b'{"model": "tiny", "prompt": "\xff"}',
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": "x", "\xff": 1}',
        b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "x", "temperature": 1e999}',
        b'{"model": "tiny", "prompt": "x", "top_p": 1e999}',
        b'{"model": "tiny", "prompt": "x", "top_p": ' + b"9" * 5000 + b"}",
        b'{"model": "tiny", "prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b'{"model": "tiny", "prompt": "x", "tools": ' + b"[" * 100_000,
        b'{"model": "tiny", "prompt": "x", "' + b"a" * 100_000 + b'": 1}',
    ],
    ids=lambda data: repr(data[-20:]),
)
def test_bytes_that_are_no_body_are_refused(data: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        read_completion(data, CONFIG, TOKENIZER)
    assert caught.value.status == 400
    assert len(str(caught.value)) + len(caught.value.param or "") < 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop": ["", "a"]}, "stop"),
        ({"metadata": {"k": 5}}, "metadata"),
        ({"metadata": {"k" * 65: ""}}, "metadata"),
        ({"stream_options": {"include_usage": 1}}, "stream_options"),
        ({"max_tokns": 5}, "max_tokns"),
        ({"model": None}, "model"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"top_p": 0.5}, "top_p"),
    ],
)
def test_an_error_has_the_name_of_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**fields)
    assert caught.value.param == param


def test_a_field_that_is_missing_has_its_name_in_the_error() -> None:
    with pytest.raises(ApiError) as caught:
        read_completion(b'{"model": "tiny"}', CONFIG, TOKENIZER)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_fields_without_an_implementation_are_accepted_where_they_change_nothing(name: str) -> None:
    for value in NEUTRAL[name]:
        assert completion(**{name: value}) == completion()
    with pytest.raises(ApiError, match=f"{name}: this engine supports only"):
        completion(**{name: "something else"})


@pytest.mark.parametrize(
    "fields",
    [
        {"store": False},
        {"parallel_tool_calls": True},
        {"parallel_tool_calls": False},
        {"top_k": -1},
        {"top_k": 0},
        {"min_p": 0.0},
        {"repetition_penalty": 1.0},
        {"min_tokens": 0},
    ],
    ids=str,
)
def test_defaults_of_other_servers_clients_are_accepted(fields: dict[str, Any]) -> None:
    assert completion(**fields) == completion()


@pytest.mark.parametrize(
    "prompt", [["hello"], TOKENIZER.encode("hello"), [TOKENIZER.encode("hello")]]
)
def test_a_list_with_one_prompt_is_that_prompt(prompt: Any) -> None:
    assert completion(prompt=prompt) == completion(prompt="hello")


def test_extensions_are_read() -> None:
    generation = completion(n=3, best_of=3, priority=-5, deadline_s=2, keep_alive_s=0.5)
    assert (generation.n, generation.priority) == (3, -5)
    assert (generation.deadline_s, generation.keep_alive_s) == (2.0, 0.5)


def test_the_last_of_two_equal_names_counts() -> None:
    data = b'{"model": "tiny", "prompt": "x", "max_tokens": 3, "max_tokens": 4}'
    assert read_completion(data, CONFIG, TOKENIZER).sampling.max_tokens == 4


def chat(**fields: Any) -> Generation:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}
    return read_chat(json.dumps(body).encode(), CONFIG, TOKENIZER)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": []}, "messages", "length >= 1"),
        ({"messages": [{"role": "user"}] * 1025}, "messages", "length <= 1024"),
        (
            {"messages": [{"role": "user", "content": "x" * 64}]},
            "messages",
            "messages: this model's context holds 64",
        ),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages", "king"),
        ({"messages": [{"role": "user", "contents": "x"}]}, "messages", "contents"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]},
            "messages",
            "image_url",
        ),
        ({"max_completion_tokens": 60}, "max_completion_tokens", "max_completion_tokens: this"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", ">= 1"),
        ({"max_tokens": 60}, "max_tokens", "max_tokens: this"),
        ({"prompt": "x"}, "prompt", "unknown field"),
    ],
    ids=str,
)
def test_a_chat_is_refused_by_the_names_that_it_used(
    fields: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_an_answer_can_be_sent_back_as_a_message() -> None:
    nulls = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "tool_calls"))
    answer = {"role": "assistant", "content": "hm", **nulls}
    assert chat(messages=[answer]).prompt_token_ids == TOKENIZER.encode("assistant: hm\nassistant:")


def test_the_newer_name_for_the_length_counts() -> None:
    assert chat(max_tokens=3, max_completion_tokens=4).sampling.max_tokens == 4


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
