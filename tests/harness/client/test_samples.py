"""Streams with the fields that clients and servers document decode to the texts that are stated.

OpenAI's and Anthropic's API references and the servers' own documents have these fields; the bytes
are ours. Then any JSON value takes the place of any other, and any cut any place.
"""

import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.client.dialect import dialect_of_path
from harness.client.reader import StreamReader
from harness.client.stream import StreamMachine
from harness.records import Outcome, RequestRow, Role
from tests.harness.client.asking import SPEC, cut
from tests.harness.client.odd_streams import ALL, CHAT, COMPLETIONS, HEAD, MESSAGES, RESPONSES, Odd

Json = dict[str, Any]


class Sample(NamedTuple):
    """`events`: with the name of each ("" for none). `text`: of all, reasoning included. `counts`:
    of the prompt, of the answer, and of the events that were read as tokens."""

    events: Sequence[tuple[str, Json]]
    text: str
    reason: str | None
    counts: tuple[int | None, int | None, int]
    path: str = CHAT
    error: str | None = None


def chunk(delta: Json, reason: Any = None, **more: Any) -> tuple[str, Json]:
    one = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
    head = {"id": "chatcmpl-9", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return "", {**head, "choices": [one], **more}


def closing(prompt: int, answer: int, **details: Any) -> tuple[str, Json]:
    usage = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
    return "", {"id": "chatcmpl-9", "model": "m", "choices": [], "usage": {**usage, **details}}


def tool(**fields: Any) -> Json:
    return {"tool_calls": [{"index": 0, **fields}]}


def so_far(tokens: int) -> Json:
    return {"usage": {"prompt_tokens": 9, "completion_tokens": tokens, "total_tokens": 9 + tokens}}


def of(kind: str, **fields: Any) -> tuple[str, Json]:
    return kind, {"type": kind, **fields}


def block(number: int, **delta: Any) -> tuple[str, Json]:
    return of("content_block_delta", index=number, delta=delta)


OPENAI = {
    "OpenAI: chat": Sample(
        [
            chunk(
                {"role": "assistant", "content": "", "refusal": None},
                service_tier="default",
                system_fingerprint="fp_44709d6fcb",
                obfuscation="fX3k",
            ),
            chunk({"content": "Hello"}, obfuscation="a9"),
            chunk({"content": "!"}, obfuscation="b7c"),
            chunk({}, "stop", usage=None),
            closing(9, 3, completion_tokens_details={"reasoning_tokens": 0}),
        ],
        *("Hello!", "stop", (9, 3, 2)),
    ),
    "OpenAI: a tool is called": Sample(
        [
            chunk(
                {
                    "role": "assistant",
                    "content": None,
                    **tool(
                        id="call_DdmO",
                        type="function",
                        function={"name": "get_weather", "arguments": ""},
                    ),
                }
            ),
            *(chunk(tool(function={"arguments": text})) for text in ('{"', "city", '":"Rome"}')),
            chunk({}, "tool_calls"),
            closing(60, 17),
        ],
        *('get_weather{"city":"Rome"}', "tool_calls", (60, 17, 4)),
    ),
    "OpenAI: Responses": Sample(
        [
            of(
                "response.created", response={"id": "resp_1", "status": "in_progress", "output": []}
            ),
            of("response.in_progress", response={"id": "resp_1", "status": "in_progress"}),
            of("response.output_item.added", item={"type": "message", "role": "assistant"}),
            of("response.content_part.added", part={"type": "output_text", "text": ""}),
            of("response.output_text.delta", item_id="msg_1", delta="Hi", obfuscation="Zk"),
            of("response.output_text.delta", item_id="msg_1", delta=" there", logprobs=[]),
            of("response.output_text.done", item_id="msg_1", text="Hi there"),
            of("response.content_part.done", part={"type": "output_text", "text": "Hi there"}),
            of("response.output_item.done", item={"content": [{"text": "Hi there"}]}),
            of(
                "response.completed",
                response={
                    "id": "resp_1",
                    "status": "completed",
                    "output": [{"type": "message", "content": [{"text": "Hi there"}]}],
                    "usage": {"input_tokens": 37, "output_tokens": 11, "total_tokens": 48},
                    "error": None,
                    "incomplete_details": None,
                },
            ),
        ],
        *("Hi there", "stop", (37, 11, 2)),
        path=RESPONSES,
    ),
}
LLAMA_CPP: list[tuple[str, str | None, Json]] = [
    (" a", None, {"__verbose": {"content": " a", "tokens": [1], "stop": False}}),
    (" b", None, {"__verbose": {"content": " b", "tokens": [2], "stop": False}}),
    (
        "",
        "length",
        {
            "usage": {"completion_tokens": 2, "prompt_tokens": 5, "total_tokens": 7},
            "timings": {"prompt_n": 5, "predicted_n": 2, "predicted_ms": 31.5},
            "__verbose": {"content": "", "prompt": "Hello", "stop_type": "limit"},
        },
    ),
]
SERVERS = {
    "vLLM: reasoning, with a count in each event": Sample(
        [
            chunk({"role": "assistant", "content": ""}, prompt_token_ids=None, **so_far(0)),
            chunk({"reasoning": "We", "reasoning_content": "We"}, **so_far(1)),
            chunk({"reasoning": " add", "reasoning_content": " add"}, **so_far(2)),
            chunk({"content": "4"}, **so_far(4)),
            chunk({"content": ""}, "stop", stop_reason=None, **so_far(5)),
            closing(9, 5),
        ],
        *("We add4", "stop", (9, 5, 3)),
    ),
    "vLLM: a tool is called": Sample(
        [
            chunk({"role": "assistant", "content": ""}),
            chunk(
                tool(
                    id="chatcmpl-tool-1",
                    type="function",
                    function={"name": "get_weather"},
                )
            ),
            chunk(tool(function={"arguments": '{"city": '})),
            chunk(tool(function={"arguments": '"Rome"}'})),
            chunk({"content": ""}, "tool_calls", stop_reason=128008),
        ],
        *('get_weather{"city": "Rome"}', "tool_calls", (None, None, 3)),
    ),
    "vLLM: an error in the stream": Sample(
        [
            chunk({"content": "a"}),
            ("", {"object": "error", "message": "EngineCore died", "type": "x", "code": 500}),
        ],
        *("a", None, (None, None, 1)),
        error="EngineCore died",
    ),
    "SGLang": Sample(
        [
            chunk({"role": "assistant", "content": "", "reasoning_content": None}),
            chunk({"role": None, "content": None, "reasoning_content": "Hm", "tool_calls": None}),
            chunk(
                {"role": None, "content": " Paris", "reasoning_content": None}, matched_stop=None
            ),
            chunk({"role": None, "content": None, "reasoning_content": None}, "stop"),
            closing(31, 7, prompt_tokens_details=None, reasoning_tokens=1),
        ],
        *("Hm Paris", "stop", (31, 7, 2)),
    ),
    "llama.cpp: completions, timed and verbose": Sample(
        [
            (
                "",
                {
                    "choices": [
                        {"text": text, "index": 0, "logprobs": None, "finish_reason": reason}
                    ],
                    "created": 1,
                    "model": "m",
                    "system_fingerprint": "b1-1",
                    "object": "text_completion",
                    "id": "chatcmpl-x",
                    **more,
                },
            )
            for text, reason, more in LLAMA_CPP
        ],
        *(" a b", "length", (5, 2, 2)),
        path=COMPLETIONS,
    ),
    "llama.cpp: an error after the head": Sample(
        [("", {"error": {"code": 500, "message": "Compute error.", "type": "server_error"}})],
        *("", None, (None, None, 0)),
        error="Compute error.",
    ),
    "Ollama: an empty finish reason, its role in every event": Sample(
        [
            chunk({"role": "assistant", "content": "Hi"}, ""),
            chunk({"role": "assistant", "content": "!"}, ""),
            chunk({"role": "assistant", "content": ""}, "stop"),
            closing(26, 3),
        ],
        *("Hi!", "stop", (26, 3, 2)),
    ),
}
ANTHROPIC = {
    "Anthropic: thinking, then text": Sample(
        [
            of(
                "message_start",
                message={
                    "id": "msg_1",
                    "type": "message",
                    "role": "assistant",
                    "content": [],
                    "stop_reason": None,
                    "usage": {"input_tokens": 25, "output_tokens": 1},
                },
            ),
            of(
                "content_block_start",
                index=0,
                content_block={"type": "thinking", "thinking": "", "signature": ""},
            ),
            of("ping"),
            block(0, type="thinking_delta", thinking="27 * 3"),
            block(0, type="signature_delta", signature="EqQBCgIYAhIM1gbcDa9GJwZA2b3hGgxBdjrk"),
            of("content_block_stop", index=0),
            of("content_block_start", index=1, content_block={"type": "text", "text": ""}),
            block(1, type="text_delta", text=" is 81"),
            of("content_block_stop", index=1),
            of(
                "message_delta",
                delta={"stop_reason": "end_turn", "stop_sequence": None},
                usage={"output_tokens": 15},
            ),
            of("message_stop"),
        ],
        *("27 * 3 is 81", "stop", (25, 15, 2)),
        path=MESSAGES,
    ),
    "Anthropic: a tool is used": Sample(
        [
            of("message_start", message={"id": "msg_2", "usage": {"input_tokens": 472}}),
            of(
                "content_block_start",
                index=0,
                content_block={"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}},
            ),
            block(0, type="input_json_delta", partial_json=""),
            block(0, type="input_json_delta", partial_json='{"location":'),
            block(0, type="input_json_delta", partial_json=' "Rome"}'),
            of("content_block_stop", index=0),
            of("message_delta", delta={"stop_reason": "tool_use"}, usage={"output_tokens": 89}),
            of("message_stop"),
        ],
        *('{"location": "Rome"}', "tool_use", (472, 89, 2)),
        path=MESSAGES,
    ),
    "Anthropic: overloaded": Sample(
        [
            of("message_start", message={"id": "msg_3", "usage": {"input_tokens": 25}}),
            block(0, type="text_delta", text="Hel"),
            of("error", error={"type": "overloaded_error", "message": "Overloaded"}),
        ],
        *("Hel", None, (25, None, 1)),
        path=MESSAGES,
        error="Overloaded",
    ),
}
SAMPLES = OPENAI | SERVERS | ANTHROPIC
DONE = b"data: [DONE]\n\n"


def as_bytes(events: Sequence[tuple[str, Any]], path: str) -> bytes:
    parts = [
        (f"event: {name}\n" if name else "") + f"data: {json.dumps(value)}\n\n"
        for name, value in events
    ]
    return "".join(parts).encode() + (DONE if path in (CHAT, COMPLETIONS) else b"")


def row_of(received: Sequence[bytes], path: str, **how: Any) -> RequestRow:
    spec = replace(SPEC, role=Role.CANARY, max_tokens=200)
    stream = StreamMachine(
        spec, sent_ns=0, **({"continuous_usage": False} | how), dialect=dialect_of_path(path)
    )
    stream.headers(200)
    reader = StreamReader(stream, None)
    for part in received:
        reader.read(part, 1)
    if stream.outcome is None:
        reader.end()
    return replace_end(stream.row())


def replace_end(row: RequestRow) -> RequestRow:
    row.ended_ns = 0  # the reader's clock is the system's
    return row


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_a_sample_decodes_to_its_texts(sample: Sample) -> None:
    row = row_of([as_bytes(sample.events, sample.path)], sample.path)
    assert (row.answer, row.finish_reason) == (sample.text, sample.reason)
    prompt, answer, events = sample.counts
    assert (row.prompt_tokens, row.completion_tokens, row.tokens_read) == (prompt, answer, events)
    assert (row.outcome, row.error) == (
        Outcome.FAILED if sample.error else Outcome.COMPLETED,
        sample.error,
    )
    assert row.unread is None


def test_a_count_in_each_event_decides() -> None:
    sample = SAMPLES["vLLM: reasoning, with a count in each event"]
    row = row_of([as_bytes(sample.events, CHAT)], CHAT, continuous_usage=True)
    assert (row.tokens_read, row.event_tokens) == (5, [1, 1, 2, 1])


STREAMS = [as_bytes(one.events, one.path) for one in SAMPLES.values()]
PATHS = [one.path for one in SAMPLES.values()]
plain = [odd for odd in ALL if odd.head is HEAD]
cuts = st.lists(st.integers(0, 5000), max_size=12)


@settings(max_examples=60)
@given(st.sampled_from(range(len(STREAMS))), cuts)
def test_however_a_sample_is_cut_the_row_is_the_same(number: int, places: list[int]) -> None:
    stream, path = STREAMS[number], PATHS[number]
    assert row_of(cut(stream, places), path) == row_of([stream], path)


@settings(max_examples=120)
@given(st.sampled_from(plain), cuts)
def test_however_an_odd_stream_is_cut_the_row_is_the_same(odd: Odd, places: list[int]) -> None:
    stream = b"".join(odd.parts)
    whole = row_of([stream], odd.path)
    assert row_of(cut(stream, places), odd.path) == whole
    assert row_of(cut(stream, range(min(len(stream), 3000))), odd.path) == whole
    assert row_of(odd.parts, odd.path) == whole


# Any value in any field.

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 7, 1023, 1024, 2**31 - 1, 2**31, 2**63, -(2**70), 2**200),
    *(0.5, 12.0, -0.0, 1e308, float("inf"), float("nan")),
    *("", " ", "x", "12", "-1", "inf", "stop", "error", "null", "abort", "ping", "[DONE]"),
    *("\ud83d", "\0", "x" * 400),
    *([], [[]], [None], [7], ["x"], [{}], {}, {"": None}, {"x": "y"}, {"text": "x"}),
    *({"error": {}}, {"message": "x"}, {"type": "error"}, {"type": ["x"], "delta": {"text": 7}}),
    *({"error": {"code": 0}}, {"code": 1e999}, {"usage": 7}, {"status_code": "1013"}),
]
FIELDS = [
    *("text", "type", "content", "error", "message", "delta", "code", "x", "choices", "usage"),
    *("finish_reason", "stop_reason", "done", "data", "response", "base_resp", "ok", "detail"),
    *("status", "candidates", "event", "fault", "eval_count", "output", "x_groq"),
]
nested = st.recursive(
    st.sampled_from(VALUES),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=3)
    ),
    max_leaves=6,
)


def places_in(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    if isinstance(value, dict):
        for key, one in value.items():
            yield from places_in(one, (*at, key))
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from places_in(one, (*at, number))


def at_place(value: Any, at: tuple[Any, ...]) -> Any:
    for key in at:
        value = value[key]
    return value


def with_value(event: Any, at: tuple[Any, ...], value: Any) -> Any:
    if not at:
        return value
    changed = copy.deepcopy(event)
    inner = changed
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    return changed


def check_costs_nothing(
    sample: Sample, number: int, at: tuple[Any, ...], value: Any, *, by_usage: bool
) -> None:
    """The events before it give what they gave, whatever it is; at the end there is a row that
    files can hold."""
    kind, event = sample.events[number]
    events = [*sample.events[:number], (kind, with_value(event, at, value))]
    how = {"continuous_usage": by_usage}
    before = row_of([as_bytes(events[:number], "")], sample.path, **how)
    whole = [*events, *sample.events[number + 1 :]]
    row = row_of([as_bytes(whole, sample.path)], sample.path, **how)
    cut_off = row_of([as_bytes(events, "")], sample.path, **how)
    for one in (row, cut_off):
        assert (one.answer or "").startswith(before.answer or "")
        assert one.token_times_ns[: len(before.token_times_ns)] == before.token_times_ns
        assert len(one.error or "") < 700
        assert msgspec.json.decode(msgspec.json.encode(one), type=RequestRow) == one


@pytest.mark.parametrize("name", SAMPLES)
def test_any_value_in_any_field_raises_nothing_and_costs_no_answer_before_it(name: str) -> None:
    sample, seen = SAMPLES[name], set[str]()
    for number, (_, event) in enumerate(sample.events):
        for at in places_in(event):
            if (place := str(at)) not in seen:  # the same field of another event
                seen.add(place)
                for value in VALUES:
                    check_costs_nothing(sample, number, at, value, by_usage=number % 2 == 0)


@settings(max_examples=200)
@given(st.data(), st.sampled_from(sorted(SAMPLES)), nested, st.booleans())
def test_so_do_values_in_values(data: st.DataObject, name: str, value: Any, by_usage: bool) -> None:
    number = data.draw(st.integers(0, len(SAMPLES[name].events) - 1))
    at = data.draw(st.sampled_from(list(places_in(SAMPLES[name].events[number][1]))))
    check_costs_nothing(SAMPLES[name], number, at, value, by_usage=by_usage)


@settings(max_examples=300)
@given(st.data(), st.sampled_from(sorted(SAMPLES)), st.sampled_from(FIELDS), nested)
def test_a_field_that_is_added_anywhere_raises_nothing_and_costs_no_answer_before_it(
    data: st.DataObject, name: str, field: str, value: Any
) -> None:
    """In an event, a choice, a delta, an error, an account."""
    number = data.draw(st.integers(0, len(SAMPLES[name].events) - 1))
    event = SAMPLES[name].events[number][1]
    places = [at for at in places_in(event) if isinstance(at_place(event, at), dict)]
    at = (*data.draw(st.sampled_from(places)), field)
    check_costs_nothing(SAMPLES[name], number, at, value, by_usage=number % 2 == 0)


@settings(max_examples=200)
@given(nested)
def test_an_answer_in_one_piece_of_any_value_raises_nothing(value: Any) -> None:
    for path in (CHAT, RESPONSES, MESSAGES):
        for told in (value, {"choices": [value]}, {"output": value, "status": "completed"}):
            stream = StreamMachine(
                SPEC, sent_ns=0, continuous_usage=False, dialect=dialect_of_path(path)
            )
            stream.headers(200)
            stream.answer(json.dumps(told).encode(), 1)
            assert stream.row().outcome in (Outcome.COMPLETED, Outcome.FAILED, Outcome.TIMED_OUT)
