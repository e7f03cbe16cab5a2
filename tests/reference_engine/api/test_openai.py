"""From a request's body to a `Generation`: what is read, and what is refused and how."""

import json
from typing import Any

import msgspec
import pytest

from reference_engine.api.bodies import NEUTRAL, CompletionBody
from reference_engine.api.openai import Generation, read_chat, read_completion
from reference_engine.api.schemas import ApiError
from reference_engine.config import EngineConfig
from reference_engine.model.tokenizer import FIRST_WORD, Message, WordTokenizer, encode_bytes

CONFIG = EngineConfig(max_model_len=64, num_blocks=64)
TOKENIZER = WordTokenizer(2048)
HELLO = TOKENIZER.encode("hello")
EMPTY_PROMPTS: list[Any] = ["", [], [""], [[]]]


def completion(**fields: Any) -> Generation:
    body = {"model": "tiny", "prompt": "hello", **fields}
    return read_completion(json.dumps(body).encode(), CONFIG, TOKENIZER)


def chat(**fields: Any) -> Generation:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}
    return read_chat(json.dumps(body).encode(), CONFIG, TOKENIZER)


def test_a_byte_is_a_token_and_defaults_are_openais() -> None:
    generation = completion()
    assert len(generation.prompt_token_ids) == 5
    assert (generation.sampling.max_tokens, generation.sampling.temperature) == (16, 1.0)
    assert not generation.stream


def test_the_prompt_can_be_shown_as_it_was_given_and_no_more_than_4096_characters_of_it() -> None:
    given = completion(), completion(prompt=[7, 8]), chat()
    assert [one.prompt for one in given] == ["hello", "[7, 8]", "user: hi"]
    roomy = EngineConfig(max_model_len=8192, num_blocks=1024)
    data = json.dumps({"model": "tiny", "prompt": "p" * 5000}).encode()
    assert read_completion(data, roomy, TOKENIZER).prompt == "p" * 4096


def test_without_a_seed_the_engines_and_the_prompt_decide() -> None:
    other = EngineConfig(max_model_len=64, num_blocks=64, seed=1)
    elsewhere = read_completion(b'{"model": "tiny", "prompt": "hello"}', other, TOKENIZER)
    assert completion().sampling.seed == completion().sampling.seed != elsewhere.sampling.seed
    assert completion(prompt="other").sampling.seed != completion().sampling.seed
    assert completion(seed=7).sampling.seed == 7


def test_a_chat_answer_may_fill_the_context() -> None:
    prompt = "user: hi\nassistant:"
    assert chat().prompt_token_ids == TOKENIZER.encode(prompt)
    assert chat().sampling.max_tokens == 64 - len(prompt)
    newer = chat(max_tokens=3, max_completion_tokens=4)
    assert newer.sampling.max_tokens == 4, "the newer name counts"


def test_content_parts_stop_and_an_earlier_answer_are_read() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    nulls = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "tool_calls"))
    answer = {"role": "assistant", "content": "hm", **nulls}
    generation = chat(messages=[answer, {"role": "user", "content": parts}], stop="x")
    prompt = "assistant: hm\nuser: ab\nassistant:"
    assert generation.prompt_token_ids == TOKENIZER.encode(prompt)
    assert generation.sampling.stop == ("x",)


def test_extensions_are_read() -> None:
    generation = completion(n=3, best_of=3, priority=-5, deadline_s=2, keep_alive_s=0.5)
    assert (generation.n, generation.priority) == (3, -5)
    assert (generation.deadline_s, generation.keep_alive_s) == (2.0, 0.5)


@pytest.mark.parametrize("prompt", [["hello"], HELLO, [HELLO]])
def test_a_list_with_one_prompt_is_that_prompt(prompt: Any) -> None:
    given = completion(prompt=prompt)
    assert msgspec.structs.replace(given, prompt="hello") == completion(prompt="hello")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "gpt"}, "serves `tiny`"),
        ({"model": "x" * 257}, r"length <= 256 - at `\$.model`"),
        ({"max_tokens": 0}, r"Expected `int` >= 1 - at `\$.max_tokens`"),
        ({"max_tokens": True}, "got `bool`"),
        ({"max_tokens": 10**400}, "max_tokens"),
        ({"max_tokens": 60}, "has 5 and 60 more are asked for"),
        ({"prompt": "x" * 64}, "context holds 64 tokens; the prompt has 64"),
        ({"prompt": [5] * 64}, "the prompt has 64"),
        *(({"prompt": nothing}, "must not be empty") for nothing in EMPTY_PROMPTS),
        *(({"prompt": ids}, "from 0 to 2047") for ids in ([1, 2048], [-1])),
        *(
            ({"prompt": two}, "one prompt a request, not a list of 2")
            for two in (["a", "b"], [[1], [2]], [1, "b"])
        ),
        ({"temperature": 3}, r"<= 2.0 - at `\$.temperature`"),
        ({"n": 17}, r"<= 16 - at `\$.n`"),
        ({"best_of": 3, "n": 2}, "best_of: this engine supports only n, which is 2"),
        ({"priority": 2**31}, r"<= 2147483647 - at `\$.priority`"),
        ({"deadline_s": 0}, r"> 0.0 - at `\$.deadline_s`"),
        ({"keep_alive_s": 0.01}, r">= 0.1 - at `\$.keep_alive_s`"),
        ({"stop": ["a"] * 5}, r"length <= 4 - at `\$.stop`"),
        ({"stop": ["", "a"]}, r"length >= 1 - at `\$.stop\[0\]`"),
        ({"metadata": {"k": 1}}, "metadata"),
        ({"echo": True}, "echo: this engine supports only false"),
        ({"top_p": True}, "top_p: this engine supports only 1"),
        ({"max_tokns": 5}, "unknown field `max_tokns`"),
    ],
)
def test_fields_that_cannot_be_served_are_refused_by_name(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        completion(**fields)
    assert caught.value.status == (404 if message == "serves `tiny`" else 400)
    assert caught.value.param == next(iter(fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "length >= 1"),
        ({"messages": [{"role": "user", "content": "x" * 64}]}, "messages: this model's context"),
        ({"messages": [{"role": "king", "content": "x"}]}, "king"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]},
            "image_url",
        ),
        ({"max_completion_tokens": 60}, "max_completion_tokens: this"),
        ({"max_tokens": 60}, "max_tokens: this"),
    ],
    ids=str,
)
def test_a_chat_is_refused_by_the_names_that_it_used(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, next(iter(fields)))


START = b'{"model": "tiny", "prompt": "x", '


@pytest.mark.parametrize(
    ("data", "param"),
    [
        *((data, None) for data in (b"", b"{", b"[]", b"\xff", b"null")),
        (b'{"model": "tiny"}', "prompt"),
        (b"{} {}", "prompt"),
        (b'{"model": "tiny", "prompt": "\xff"}', None),
        (b'{"model": "tiny", "prompt": "\\ud800"}', None),
        (START + b'"\xff": 1}', None),
        (START + b'"temperature": NaN}', None),
        (START + b'"temperature": 1e999}', "temperature"),
        (START + b'"top_p": 1e999}', "top_p"),
        (START + b'"top_p": ' + b"9" * 5000 + b"}", "top_p"),
        (START + b'"seed": ' + b"9" * 5000 + b"}", "seed"),
        (START + b'"tools": ' + b"[" * 100_000, None),
        (START + b'"' + b"a" * 100_000 + b'": 1}', None),
    ],
    ids=lambda data: repr(data[-20:]) if data else "",
)
def test_bytes_that_are_no_body_are_refused(data: bytes, param: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        read_completion(data, CONFIG, TOKENIZER)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", sorted(NEUTRAL[CompletionBody]))
def test_fields_without_an_implementation_are_accepted_where_they_change_nothing(name: str) -> None:
    for value in (None, *NEUTRAL[CompletionBody][name]):
        assert completion(**{name: value}) == completion()
        if type(value) is int:
            assert completion(**{name: float(value)}) == completion()
    with pytest.raises(ApiError, match=f"{name}: this engine supports only"):
        completion(**{name: "something else"})


def test_a_required_call_is_of_the_first_tool() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("read", "write")]
    assert chat(tools=tools).tool is chat(tools=tools, tool_choice="none").tool is None
    assert chat(tools=tools, tool_choice="required").tool == "read"
    for wrong in ({"tool_choice": "required"}, {"tool_choice": "required", "tools": []}):
        with pytest.raises(ApiError, match="`required` needs a tool in `tools`"):
            chat(**wrong)


def test_an_answer_in_a_chat_is_the_tokens_again_that_it_was() -> None:
    ids = [FIRST_WORD, 1000, 2047]
    text = "".join(map(TOKENIZER.text_of, ids))
    asked = TOKENIZER.encode_chat([Message("user", "hm")])
    for said in (text, text.lstrip()):
        chat = [Message("user", "hm"), Message("assistant", said), Message("user", "go on")]
        assert TOKENIZER.encode_chat(chat)[: len(asked) + 3] == [*asked, *ids]
    other = [Message("assistant", "Hm, no-one said this")]
    assert TOKENIZER.encode_chat(other) == encode_bytes(
        "assistant: Hm, no-one said this\nassistant:"
    )


def test_every_word_is_readable_and_different() -> None:
    words = {TOKENIZER.text_of(token) for token in range(FIRST_WORD, 2048)}
    assert len(words) == 2048 - FIRST_WORD
    assert all(word[0] == " " and word[1:].isalpha() for word in words)
    assert TOKENIZER.text_of(2) == ""
