"""The stream machine counts: tokens of one answer and of several, and how many are too many."""

import dataclasses
import json
import tracemalloc
from typing import Any

from harness.load.stream import State, StreamMachine
from harness.records import Outcome, TokenCounting
from tests.harness.load.streams import SPEC, completion, machine


def chat(**delta: str) -> bytes:
    return json.dumps({"choices": [{"delta": delta, "finish_reason": None}]}).encode()


class TestCounting:
    def test_several_tokens_in_an_event(self) -> None:
        stream = machine()
        stream.event(completion(" a b c", usage=3), 20)
        stream.event(completion(" d", usage=4), 30)
        stream.cut(40)
        assert stream.row().event_tokens == [3, 1]
        assert stream.tokens_read == 4

    def test_half_a_character_is_a_token_where_the_server_counts(self) -> None:
        stream = machine()
        stream.event(completion("", usage=1), 20)
        assert stream.tokens_read == 1

    def test_a_role_or_an_empty_text_is_no_token(self) -> None:
        stream = machine(continuous_usage=False)
        stream.event(chat(role="assistant"), 20)
        stream.event(chat(content=""), 21)
        stream.event(completion("", usage=None), 22)
        stream.event(completion(None), 23)
        assert (stream.tokens_read, stream.state) == (0, State.ACCEPTED)
        stream.event(chat(content="a"), 24)
        stream.event(chat(reasoning_content="hm"), 25)
        assert stream.tokens_read == 2

    def test_a_missing_count_makes_the_row_an_estimate(self) -> None:
        stream = machine()
        stream.event(completion(" a", usage=1), 20)
        stream.event(completion(" b"), 30)
        stream.event(completion(" c", usage=9), 40)
        stream.cut(50)
        row = stream.row()
        assert (row.tokens_read, row.token_counting) == (3, TokenCounting.EVENTS)

    def test_without_continuous_usage_events_count_and_the_last_account_is_kept(self) -> None:
        stream = machine(continuous_usage=False)
        stream.event(completion(" a"), 20)
        stream.event(completion("", finish_reason="stop"), 30)
        stream.event(b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}', 31)
        stream.event(b"[DONE]", 32)
        stream.body_ended(33)
        row = stream.row()
        assert (row.tokens_read, row.completion_tokens) == (1, 2)
        assert row.token_counting is TokenCounting.EVENTS

    def test_the_gap_between_the_latest_tokens(self) -> None:
        stream = machine()
        stream.event(completion(" a", usage=1), 20)
        assert stream.last_gap_ns is None
        stream.event(completion(" b", usage=2), 35)
        assert stream.last_gap_ns == 15


def test_a_token_of_a_long_answer_takes_few_bytes() -> None:
    stream, num_tokens = machine(), 2000
    events = [completion(" a", usage=number + 1) for number in range(num_tokens)]
    tracemalloc.start()
    try:
        for number, event in enumerate(events):
            stream.event(event, 10**15 + number * 20_000_000)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert stream.tokens_read == num_tokens
    assert held / num_tokens < 24


def several(*choices: tuple[int, str | None], usage: int | None = None) -> bytes:
    """A chunk with more of several answers: their indices and finish reasons."""
    chunk: dict[str, Any] = {
        "choices": [{"index": i, "text": " a", "finish_reason": reason} for i, reason in choices]
    }
    if usage is not None:
        chunk["usage"] = {"prompt_tokens": 7, "completion_tokens": usage}
    return json.dumps(chunk).encode()


class TestSeveralAnswers:
    @staticmethod
    def machine(*, per_choice: bool = False, continuous_usage: bool = True) -> StreamMachine:
        spec = dataclasses.replace(SPEC, n=2)
        stream = StreamMachine(
            spec,
            sent_ns=10,
            continuous_usage=continuous_usage,
            usage_per_choice=per_choice,
        )
        stream.headers(200)
        return stream

    def test_the_gap_is_between_tokens_of_one_answer(self) -> None:
        stream = self.machine()
        for usage, t_ns in ((1, 20), (2, 21), (3, 40)):
            assert stream.last_gap_ns is None
            stream.event(completion(" a", usage=usage), t_ns)
        assert stream.last_gap_ns == 20

    def test_it_has_finished_when_all_have(self) -> None:
        stream = self.machine()
        stream.event(several((0, "length"), usage=1), 20)
        could_leave = [stream.can_leave]
        stream.event(several((1, "stop"), usage=2), 30)
        could_leave.append(stream.can_leave)
        assert could_leave == [True, False]
        stream.body_ended(40)
        assert (stream.outcome, stream.tokens_read) == (Outcome.COMPLETED, 2)
        assert stream.row().n == 2

    def test_a_count_of_the_whole_request(self) -> None:
        stream = self.machine()
        for t, (answer, usage) in enumerate([(0, 1), (1, 2), (0, 4), (1, 5)]):
            stream.event(several((answer, None), usage=usage), t)
        stream.cut(9)
        assert (stream.tokens_read, stream.row().event_tokens) == (5, [1, 1, 2, 1])

    def test_a_count_of_each_answer(self) -> None:
        stream = self.machine(per_choice=True)
        for t, (answer, usage) in enumerate([(0, 1), (1, 1), (0, 3), (1, 2)]):
            stream.event(several((answer, None), usage=usage), t)
        stream.cut(9)
        assert (stream.tokens_read, stream.row().event_tokens) == (5, [1, 1, 2, 1])

    def test_without_a_count_each_text_is_a_token(self) -> None:
        stream = self.machine(continuous_usage=False)
        stream.event(several((0, None), (1, None)), 20)
        stream.event(several((1, None)), 30)
        assert stream.tokens_read == 3

    def test_a_server_that_knows_no_n_ends_with_its_done(self) -> None:
        stream = self.machine()
        stream.event(several((0, "length"), usage=1), 20)
        stream.event(b"[DONE]", 21)
        stream.body_ended(22)
        assert stream.outcome is Outcome.COMPLETED


def test_an_answer_that_never_ends_fails_before_it_takes_the_memory() -> None:
    stream = machine(continuous_usage=False)
    most = 16 * SPEC.max_tokens + 10_000
    for t_ns in range(most):
        stream.event(completion("a"), t_ns)
    assert stream.outcome is None
    stream.event(completion("a"), most)
    row = stream.row()
    assert (row.outcome, row.tokens_read) == (Outcome.FAILED, most)
    assert row.error is not None
    assert "far longer than was asked for: 10145 tokens by now" in row.error
