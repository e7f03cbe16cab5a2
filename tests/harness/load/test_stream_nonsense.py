"""What a server says is not believed at any price: it fails one request, and spoils no figure."""

import dataclasses
import json
from typing import Any

import msgspec
import pytest

from harness.load.dialect import refusal_message
from harness.load.stream import StreamMachine
from harness.records import Outcome, RequestRow, Role, WireClose
from tests.harness.load.asking import SPEC

TWO = dataclasses.replace(SPEC, n=2)
MOST = 16 * 18 + 10_000
FAR_LONGER = "the answer is far longer than was asked for"


def machine(role: Role = Role.USER, **how: Any) -> StreamMachine:
    stream = StreamMachine(
        dataclasses.replace(TWO, role=role), sent_ns=10, **{"continuous_usage": True} | how
    )
    stream.headers(200)
    return stream


def event(*texts: str, usage: Any = None, finish_reason: str | None = None, **more: Any) -> bytes:
    choices = [
        {"index": i, "text": text, "finish_reason": finish_reason} for i, text in enumerate(texts)
    ]
    chunk: dict[str, Any] = {"choices": choices} | more
    if usage is not None:
        chunk["usage"] = {"prompt_tokens": 7, "completion_tokens": usage}
    return json.dumps(chunk).encode()


def failed(stream: StreamMachine) -> RequestRow:
    row = stream.row()
    assert row.outcome is Outcome.FAILED
    assert row.completion_tokens is None
    return row


DEEP = b"[" * 100_000 + b"]" * 100_000
NO_EVENTS = {
    "invalid UTF-8": b'{"choices":[{"text":"caf\xe9"}]}',
    "a key of invalid UTF-8": b'{"error":{"\xff":1}}',
    "half a pair of surrogates": rb'{"choices":[{"text":"\ud800"}]}',
    "nested without end": b'{"error":' + DEEP + b"}",
    "nested without end where nobody looks": b'{"x":' + DEEP + b"}",
    "a number of 5,000 digits": b'{"error":' + b"9" * 5000 + b"}",
    "an answer's number of 5,000 digits": b'{"choices":[{"index":' + b"9" * 5000 + b"}]}",
    "an answer nobody asked for": b'{"choices":[{"index":1024}]}',
    "a count below nothing": event("a", usage=-1),
    "a count that no file holds": event("a", usage=2**31),
    "a count that no machine holds": event("a", usage=2**70),
    "a prompt that no machine holds": b'{"usage":{"prompt_tokens":%d}}' % 2**70,
    "half a token": event("a", usage=1.5),
    "a finish reason without end": event("a", usage=1, finish_reason="x" * 301),
}


@pytest.mark.parametrize("data", NO_EVENTS.values(), ids=NO_EVENTS)
def test_what_makes_no_sense_fails_the_request(data: bytes) -> None:
    stream = machine()
    stream.event(event("a", usage=1), 20)
    stream.event(data, 30)
    row = failed(stream)
    assert (row.tokens_read, row.ended_ns) == (1, 30)
    assert "an event of the stream makes no sense" in (row.error or "")
    assert len(row.error or "") < 400

    whole = machine()
    whole.answer(data, 30)
    assert "the answer makes no sense" in (failed(whole).error or "")

    late = machine()
    late.leave(25, think_ns=0, wire_close=WireClose.FIN)
    late.event(data, 35)
    assert late.row().tokens_after_leaving == 0


def test_an_error_that_is_nested_almost_too_deep_is_said() -> None:
    for depth in range(800, 1000):
        for data in (
            b'{"error":' * depth + b'"oh"' + b"}" * depth,
            b'{"error":' + b"[" * depth + b"]" * depth + b"}",
        ):
            assert len(refusal_message(400, data)) < 400
            stream = machine()
            stream.event(data, 20)
            assert len(failed(stream).error or "") < 400


class TestCountsThatCannotBeTrue:
    """None of them is in any sum: `tokens_read`, `event_tokens` and the server's own account."""

    @pytest.mark.parametrize("finish_reason", [None, "length"])
    def test_a_jump(self, finish_reason: str | None) -> None:
        stream = machine()
        stream.event(event("a", usage=1), 20)
        stream.event(event("a", usage=MOST + 1, finish_reason=finish_reason), 30)
        row = failed(stream)
        assert (row.tokens_read, row.event_tokens, row.ended_ns) == (1, [1], 30)
        assert row.error == f"{FAR_LONGER}: {MOST + 1} tokens by now, and `max_tokens` is 9"

    def test_a_jump_as_far_as_it_may_be(self) -> None:
        stream = machine()
        stream.event(event("a", usage=MOST), 20)
        assert (stream.outcome, stream.tokens_read) == (None, MOST)

    def test_answers_that_are_too_long_together(self) -> None:
        stream = machine(usage_per_choice=True)
        stream.event(event("a", "a", usage=MOST // 2), 20)
        assert stream.tokens_read == MOST
        stream.event(event("a", usage=MOST // 2 + 1), 30)
        assert failed(stream).event_tokens == [MOST]

    @pytest.mark.parametrize(
        "last",
        [
            [event("a", usage=MOST + 1, finish_reason="stop")],
            [event("a", finish_reason="stop"), event(usage=MOST + 1)],
            [event("a", "a", finish_reason="stop"), event(usage=MOST + 1)],
        ],
        ids=["in the last event", "after the first answer", "after all"],
    )
    def test_the_account_at_the_end(self, last: list[bytes]) -> None:
        stream = machine(continuous_usage=False)
        for data in last:
            stream.event(data, 20)
        assert FAR_LONGER in (failed(stream).error or "")

    def test_an_answer_in_one_piece(self) -> None:
        stream = machine()
        stream.answer(event("a", usage=MOST + 1, finish_reason="stop"), 20)
        row = failed(stream)
        assert row.tokens_read == 0
        assert FAR_LONGER in (row.error or "")

    def test_what_comes_late(self) -> None:
        stream = machine()
        stream.leave(25, think_ns=0, wire_close=WireClose.FIN)
        stream.event(event("a", usage=2), 35)
        stream.event(event("a", usage=MOST + 1), 35)
        row = stream.row()
        assert (row.outcome, row.tokens_after_leaving) == (Outcome.ABANDONED, 2)
        assert FAR_LONGER in (row.error or "")

    def test_counts_that_files_hold_are_kept_as_they_are(self) -> None:
        many = dataclasses.replace(SPEC, max_tokens=10_000_000, n=128)
        stream = StreamMachine(many, sent_ns=1, continuous_usage=True)
        stream.headers(200)
        stream.event(event("a", usage=2**31 - 1), 20)
        stream.cut(30)
        row = stream.row()
        assert row.event_tokens == [2**31 - 1]
        assert msgspec.json.decode(msgspec.json.encode(row), type=RequestRow) == row


class TestAnswersWithoutEnd:
    """Whatever is kept of them, they take no memory without end."""

    def test_text_whose_count_stands_still(self) -> None:
        stream = machine()
        stream.event(event("a", usage=1), 20)
        for _ in range(MOST):
            stream.event(event("a", usage=1), 30)
        assert stream.outcome is None
        stream.event(event("a", usage=1), 40)
        assert (failed(stream).tokens_read, stream.row().ended_ns) == (1, 40)

    @pytest.mark.parametrize("count", [lambda _: 1, lambda t: t], ids=["stands still", "rises"])
    def test_a_canary_s_text(self, count: Any) -> None:
        stream, event_chars, events = machine(Role.CANARY), 50_000, 0
        while stream.outcome is None:
            events += 1
            stream.event(event("a" * event_chars, usage=count(events)), events)
        answer = failed(stream).answer
        assert answer is not None
        assert 64 * MOST < len(answer) <= 64 * (MOST + 1) + event_chars

    def test_a_canary_s_empty_events_are_not_kept(self) -> None:
        stream = machine(Role.CANARY)
        for _ in range(2 * MOST):
            stream.event(b'{"choices":[{"text":""}]}', 20)
        stream.cut(30)
        assert stream.row().answer == ""
        assert stream._answer == []
