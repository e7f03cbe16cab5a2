"""Turns on the wire, in three dialects: what each sends of its session."""

import json
from collections.abc import Callable
from typing import Any

from harness.client.session import LoadSession
from harness.client.turns import LiveTurns
from harness.records import Outcome, RequestRow
from harness.workload.abandon import AbandonPlan, StayPlan, ToolCallPlan
from harness.workload.session import SessionSettings
from tests.harness.client.asking import plan_of
from tests.harness.client.conftest import Exchange, Serve
from tests.harness.workload.mixes import load_of, tokens

TOLD: dict[str, Any] = {"turns": [9], "first_tokens": [40], "turn_tokens": [20], "think_s": 0}
Events = Callable[[Exchange], list[dict[str, Any]]]


def turns_at(
    url: str, plan: AbandonPlan, dialect: str, **target: Any
) -> tuple[LiveTurns, list[RequestRow]]:
    session = SessionSettings(
        dialect=dialect,  # type: ignore[arg-type]
        **TOLD | {"correction_tokens": [20], "answer_tokens": [3]},
    )
    load = load_of(
        plan,
        think="none",
        prompt_tokens=[40, 999],
        shared_prefix_tokens=15,
        stay_tokens=3,
        session=session,
    )
    rows: list[RequestRow] = []
    whole = plan_of(url, target=target, load=load)
    live = LoadSession(
        whole, api_key=None, tell=rows.append, enough=lambda: None, give_up=lambda _why: None
    )
    return LiveTurns(live, user=0), rows


def speaking(events: Events) -> Callable[[Exchange], None]:
    """All events at once, then silence until the client has left."""

    def script(x: Exchange) -> None:
        x.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        for event in events(x):
            x.send(b"data: " + json.dumps(event).encode() + b"\n\n")
        assert x.client_left_within(30)

    return script


def chat_words(x: Exchange) -> list[dict[str, Any]]:
    return [
        {
            "choices": [{"index": 0, "delta": {"content": f" w{n}"}}],
            "usage": {"completion_tokens": n},
        }
        for n in (1, 2)
    ]


def bodies(server: Any) -> list[dict[str, Any]]:
    return [x.body for x in server.exchanges.values()]


def test_what_was_read_of_a_stopped_answer_stays_in_the_chat(serve: Serve) -> None:
    server = serve(speaking(chat_words))
    turns, rows = turns_at(server.url, tokens(2), "chat")
    assert [turns.prepare()() for _ in range(2)] == [0, 0]
    first, second = bodies(server)
    assert {x.target for x in server.exchanges.values()} == {"/v1/chat/completions"}
    system, question = first["messages"]
    assert (system["role"], question["role"]) == ("system", "user")
    assert [len(one["content"]) for one in (system, question)] == [15, 25]
    assert second["messages"][:2] == first["messages"]
    assert second["messages"][2] == {"role": "assistant", "content": " w1 w2"}
    assert [one["role"] for one in second["messages"][3:]] == ["user"]
    assert rows[0].answer is None  # a row does not keep the text
    assert [row.follows for row in rows] == [None, Outcome.ABANDONED]
    assert rows[1].history_tokens == 40 + 2


def test_an_answer_stopped_before_its_first_token_leaves_one_message(serve: Serve) -> None:
    server = serve(lambda x: x.client_left_within(30))
    turns, _ = turns_at(server.url, tokens(0), "messages")
    for _ in range(2):
        turns.prepare()()
        server.wait_for_arrivals(1)  # its client may have left before
    first, second = bodies(server)
    assert len(first["system"]) == 15
    [question] = first["messages"]
    [both] = second["messages"]
    assert both["content"].startswith(question["content"] + "\n\n")
    assert len(both["content"]) == 25 + 2 + 20


def response_of(x: Exchange) -> list[dict[str, Any]]:
    words = [{"type": "response.output_text.delta", "delta": f" w{n}"} for n in (1, 2, 3)]
    response = {
        "id": f"resp-{len(x.body['input'])}",
        "status": "completed",
        "usage": {
            "input_tokens": 40,
            "output_tokens": 3,
            "input_tokens_details": {"cached_tokens": 16},
        },
    }
    return [*words, {"type": "response.completed", "response": response}]


def test_a_kept_response_is_followed_by_its_id_and_a_forgotten_one_told_again(
    serve: Serve,
) -> None:
    def script(x: Exchange) -> None:
        if x.body.get("previous_response_id") == "resp-20":
            body = b'{"error":{"message":"response resp-20 not found"}}'
            x.send(b"HTTP/1.1 404 Not Found\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            return
        x.accept()
        for event in response_of(x):
            x.chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
        x.send(b"0\r\n\r\n")

    server = serve(script)
    turns, rows = turns_at(server.url, StayPlan(plan="never"), "responses", keeps_responses=True)
    for _ in range(3):
        turns.prepare()()
    first, second, refused, again = bodies(server)
    assert [one["role"] for one in first["input"]] == ["system", "user"]
    assert (second["previous_response_id"], len(second["input"])) == ("resp-2", 20)
    assert refused["previous_response_id"] == "resp-20"
    assert "previous_response_id" not in again
    roles = [one["role"] for one in again["input"]]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]
    outcomes = [row.outcome for row in rows]
    assert outcomes == [*[Outcome.COMPLETED] * 2, Outcome.FAILED, Outcome.COMPLETED]
    assert rows[3].repeats == rows[2].request_id
    assert rows[3].follows is Outcome.COMPLETED
    assert [row.cached_tokens for row in rows] == [16, 16, None, 16]


def test_a_server_that_keeps_nothing_is_told_all(serve: Serve) -> None:
    server = serve(speaking(lambda x: [*response_of(x)[:2]]))
    turns, _ = turns_at(server.url, tokens(2), "responses")
    turns.prepare()()
    turns.prepare()()
    _, second = bodies(server)
    assert "previous_response_id" not in second
    assert [one["role"] for one in second["input"]] == ["system", "user", "assistant", "user"]


def saying(events: list[dict[str, Any]]) -> Events:
    return lambda _x: events


def chat_call(n: int) -> dict[str, Any]:
    call = {"index": 0, "function": {"arguments": f"a{n}"}}
    return {"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]}


def response_call(n: int) -> dict[str, Any]:
    return {"type": "response.function_call_arguments.delta", "delta": f"a{n}"}


def message_call(n: int) -> dict[str, Any]:
    delta = {"type": "input_json_delta", "partial_json": f"a{n}"}
    return {"type": "content_block_delta", "delta": delta}


def test_a_tool_call_is_left_while_it_streams(serve: Serve) -> None:
    """Text before the call does not count."""
    said: dict[str, tuple[dict[str, Any], Callable[[int], dict[str, Any]]]] = {
        "chat": ({"choices": [{"index": 0, "delta": {"content": "hm"}}]}, chat_call),
        "responses": ({"type": "response.output_text.delta", "delta": "hm"}, response_call),
        "messages": (
            {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "hm"}},
            message_call,
        ),
    }
    for dialect, (text, call) in said.items():
        server = serve(speaking(saying([text, text, *map(call, range(4))])))
        plan = ToolCallPlan(plan="tool_call", tokens=[4])
        turns, rows = turns_at(server.url, plan, dialect)
        turns.prepare()()
        [row], [body] = rows, bodies(server)
        assert (row.outcome, row.plan, row.tokens_read) == (Outcome.ABANDONED, "tool_call:4", 6)
        assert "write_file" in json.dumps(body["tools"])
        assert body["tool_choice"] in ("required", {"type": "any"})
