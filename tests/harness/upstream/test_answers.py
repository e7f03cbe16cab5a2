"""Answers in each dialect, as the project's client and OpenAI's own read them, and by shape."""

import json
from typing import Any

import openai
import pytest

from harness.records import Delivery, Outcome
from harness.upstream.orders import Order
from tests.harness.client.asking import Client
from tests.harness.upstream.behind import ROUTES, Caller, Running, upstream

WORDS = "".join(f" w{n}" for n in range(1, 10))


@pytest.mark.parametrize("delivery", [Delivery.STREAM, Delivery.UNARY])
@pytest.mark.parametrize("dialect", ROUTES)
def test_the_projects_client_reads_it_whole(dialect: str, delivery: Delivery) -> None:
    with upstream() as server:
        target = {"path": ROUTES[dialect], "continuous_usage": False}
        client = Client(server.url, target=target)
        row = client.ask(delivery=delivery)
        client.client.close()
        assert (row.outcome, row.error, row.unread) == (Outcome.COMPLETED, None, None)
        assert (row.finish_reason, row.completion_tokens, row.prompt_tokens) == ("length", 9, 1)
        seen = server.over("r1")  # its X-Request-Id
        assert seen["dialect"] == dialect
        assert seen["is_stream"] == (delivery is Delivery.STREAM)
        assert seen["arrived_ns"] > row.sent_ns
        assert seen["tokens"] == 9
        if delivery is Delivery.STREAM:
            assert row.tokens_read == 9
            pairs = zip(seen["token_times_ns"], row.token_times_ns, strict=True)
            assert all(made_ns < read_ns for made_ns, read_ns in pairs)


def test_openais_client_reads_chat_completions_and_responses() -> None:
    with (
        upstream() as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client,
    ):
        said: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "two words"}]}]
        usage: Any = {"include_usage": True}
        chat: Any = client.chat.completions
        chunks = list(
            chat.create(model="a", messages=said, max_tokens=9, stream=True, stream_options=usage)
        )
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == WORDS
        assert [c.choices[0].finish_reason for c in chunks[-3:-1]] == [None, "length"]
        assert (chunks[-1].choices, chunks[-1].usage.total_tokens) == ([], 11)
        whole = chat.create(model="a", messages=said, max_tokens=9)
        assert (whole.model, whole.choices[0].message.content) == ("a", WORDS)
        texts = list(client.completions.create(model="a", prompt="x", max_tokens=9, stream=True))
        assert "".join(one.choices[0].text for one in texts) == WORDS
        assert all(one.usage is None for one in texts)
        with client.responses.stream(model="a", input="x", max_output_tokens=9) as stream:
            events = list(stream)
        assert [one.sequence_number for one in events] == list(range(len(events)))
        assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
        answer = client.responses.create(model="a", input="x", max_output_tokens=10)
        assert (answer.output_text, answer.status) == (f"{WORDS} w10", "incomplete")
        assert answer.usage is not None
        assert answer.usage.output_tokens == 10
        assert [one.id for one in client.models.list()] == ["upstream"]


def test_a_stream_of_messages_has_the_events_of_anthropics_in_their_order() -> None:
    with upstream() as server:
        events = events_of(server, "messages", Order(id="x", tokens=3))
    kinds = [event["type"] for event in events]
    assert kinds == [
        *("message_start", "content_block_start", "ping"),
        *["content_block_delta"] * 3,
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert events[0]["message"]["usage"] == {"input_tokens": 7, "output_tokens": 1}
    deltas = [event["delta"]["text"] for event in events[3:6]]
    assert deltas == [" w1", " w2", " w3"]
    assert events[7]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[7]["usage"] == {"output_tokens": 3}


@pytest.mark.parametrize("dialect", ROUTES)
def test_usage_may_be_left_out_or_come_late(dialect: str) -> None:
    with upstream() as server:
        options = {"stream_options": {"include_usage": True}}
        order = Order(id="none", tokens=2, usage="no")
        events = events_of(server, dialect, order, **options)
        assert not any(used for event in events for used in usages(event))
        seen = server.over("none")
        assert (seen["usage_ns"], seen["why"]) == (None, "stop")
        events = events_of(server, dialect, Order(id="late", tokens=2, end_ms=50), **options)
        assert any(used for event in events for used in usages(event))
        seen = server.over("late")
        assert seen["usage_ns"] - seen["last_token_ns"] > 45_000_000
        assert seen["usage_ns"] <= seen["ended_ns"]
        events_of(server, dialect, Order(id="unasked", tokens=2))
        is_always = dialect in ("responses", "messages")
        assert (server.over("unasked")["usage_ns"] is not None) == is_always


def usages(event: dict[str, Any]) -> list[Any]:
    places = (event, event.get("response") or {}, event.get("message") or {})
    return [place.get("usage") for place in places]


def events_of(server: Running, dialect: str, order: Order, **more: Any) -> list[dict[str, Any]]:
    """Of HTTP/1.0, whose stream has no chunks and ends with the connection."""
    caller = Caller(server.port, order, dialect=dialect, version="1.0", **more)
    head, _, body = caller.to_the_end().partition(b"\r\n\r\n")
    caller.close()
    assert b"transfer-encoding" not in head
    lines = [line.removeprefix(b"data: ") for line in body.splitlines() if line[:5] == b"data:"]
    return [json.loads(line) for line in lines if line != b"[DONE]"]
