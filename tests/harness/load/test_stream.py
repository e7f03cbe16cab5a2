"""The stream machine: outcomes, counting, rows, and what it refuses."""

import dataclasses
import json
import tracemalloc
from typing import Any

import pytest

from harness.load.stream import IllegalSignalError, StreamMachine
from harness.load.ticket import Intent, Ticket
from harness.load.transitions import TRANSITIONS, Signal, State
from harness.records import Outcome, Role, TokenCounting, Way, WireClose

TICKET = Ticket(
    request_id="r1",
    arm="main",
    role=Role.USER,
    trial=None,
    user=3,
    max_tokens=9,
    intended_start_ns=5,
    intent=Intent(plan="tokens:2", planned_abandon=2, way=Way.RST),
)


def machine(*, status: int = 200, continuous_usage: bool = True) -> StreamMachine:
    stream = StreamMachine(TICKET, sent_ns=10, continuous_usage=continuous_usage)
    stream.headers(status)
    return stream


def completion(
    text: str | None, *, usage: int | None = None, finish_reason: str | None = None
) -> bytes:
    chunk: dict[str, Any] = {"choices": [{"text": text, "finish_reason": finish_reason}]}
    if usage is not None:
        chunk["usage"] = {"prompt_tokens": 7, "completion_tokens": usage}
    return json.dumps(chunk).encode()


def chat(**delta: str) -> bytes:
    return json.dumps({"choices": [{"delta": delta, "finish_reason": None}]}).encode()


def test_a_stream_read_to_its_end() -> None:
    stream = machine()
    stream.event(completion(" a", usage=1), 20)
    stream.event(completion(" b", usage=2, finish_reason="length"), 30)
    stream.event(b"[DONE]", 31)
    assert stream.outcome is None  # the body has not ended
    stream.body_ended(32)
    row = stream.row()
    assert row.outcome is Outcome.COMPLETED
    assert (row.intended_start_ns, row.sent_ns, row.first_token_ns, row.last_token_ns) == (
        5,
        10,
        20,
        30,
    )
    assert (row.ended_ns, row.abandoned_ns, row.wire_close, row.error) == (32, None, None, None)
    assert (row.tokens_read, row.token_times_ns, row.event_tokens) == (2, [20, 30], [1, 1])
    assert (row.finish_reason, row.prompt_tokens, row.completion_tokens) == ("length", 7, 2)
    assert (row.status_code, row.token_counting) == (200, TokenCounting.USAGE)


def test_an_abandoned_stream_keeps_its_t0_and_what_was_read() -> None:
    stream = machine()
    stream.event(completion(" a", usage=1), 20)
    assert stream.can_leave
    stream.leave(25, think_ns=4, wire_close=WireClose.RST)
    row = stream.row()
    assert row.outcome is Outcome.ABANDONED
    assert (row.abandoned_ns, row.ended_ns, row.think_ns) == (25, 25, 4)
    assert (row.wire_close, row.tokens_read) == (WireClose.RST, 1)
    assert (row.error, row.completion_tokens) == (None, None)


def test_leaving_before_the_first_token_or_the_headers() -> None:
    sent = StreamMachine(TICKET, sent_ns=10, continuous_usage=True)
    for stream, status_code in ((machine(), 200), (sent, None)):
        assert stream.can_leave
        stream.leave(12, think_ns=0, wire_close=WireClose.FIN)
        row = stream.row()
        assert (row.outcome, row.abandoned_ns) == (Outcome.ABANDONED, 12)
        assert (row.first_token_ns, row.last_token_ns, row.tokens_read) == (None, None, 0)
        assert row.status_code == status_code


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


class TestEndings:
    @pytest.mark.parametrize(
        ("status", "body", "outcome", "error"),
        [
            (429, b'{"error":{"message":"slow down"}}', "rejected", "HTTP 429: slow down"),
            (503, b"busy", "rejected", "HTTP 503: busy"),
            (500, b'{"error":"oh"}', "failed", "HTTP 500: oh"),
            (404, b'{"object":"error","message":"no such model"}', "failed", "no such model"),
            (400, b'{"detail":[1]}', "failed", 'HTTP 400: {"detail":[1]}'),
            (307, b"", "failed", "HTTP 307"),
            (500, b"\xff" * 1000, "failed", "HTTP 500: \ufffd"),
        ],
    )
    def test_refusals(self, status: int, body: bytes, outcome: str, error: str) -> None:
        stream = machine(status=status)
        assert not stream.can_leave
        stream.refusal(body, 20)
        row = stream.row()
        assert (row.outcome, row.status_code) == (outcome, status)
        assert row.error is not None
        assert error in row.error
        assert len(row.error) < 400

    @pytest.mark.parametrize(
        ("data", "error"),
        [
            (b'{"error":{"message":"out of blocks","type":"x"}}', "out of blocks"),
            (b'{"error":"out"}', "out"),
            (b"{", "makes no sense"),
            (b'{"choices":3}', "makes no sense"),
            (b"\xff", "makes no sense"),
        ],
    )
    def test_an_error_inside_the_stream(self, data: bytes, error: str) -> None:
        stream = machine()
        stream.event(completion(" a", usage=1), 20)
        stream.event(data, 30)
        row = stream.row()
        assert (row.outcome, row.ended_ns, row.tokens_read) == (Outcome.FAILED, 30, 1)
        assert row.error is not None
        assert error in row.error

    def test_a_stream_that_just_stops_has_failed(self) -> None:
        stream = machine()
        stream.event(completion(" a", usage=1), 20)
        stream.body_ended(30)
        row = stream.row()
        assert row.outcome is Outcome.FAILED
        assert row.error is not None
        assert "ended early" in row.error

    def test_a_finish_reason_or_done_alone_is_an_end(self) -> None:
        for last in (completion("", usage=0, finish_reason="stop"), b"[DONE]"):
            stream = machine()
            stream.event(last, 20)
            stream.body_ended(30)
            assert stream.outcome is Outcome.COMPLETED

    def test_a_finished_answer_stays_complete_and_cannot_be_left(self) -> None:
        for end in ("cut", "break_off", "time_out"):
            stream = machine()
            stream.event(completion(" a", usage=1, finish_reason="stop"), 20)
            assert not stream.can_leave
            getattr(stream, end)(30, *([] if end == "cut" else ["why"]))
            assert (stream.outcome, stream.row().error) == (Outcome.COMPLETED, None)

    def test_before_the_headers(self) -> None:
        ends = {"cut": Outcome.CUT_OFF, "break_off": Outcome.FAILED, "time_out": Outcome.TIMED_OUT}
        for end, outcome in ends.items():
            stream = StreamMachine(TICKET, sent_ns=10, continuous_usage=True)
            getattr(stream, end)(30, *([] if end == "cut" else ["why"]))
            assert (stream.outcome, stream.row().status_code) == (outcome, None)


class TestTable:
    def test_every_state_ends_by_whatever_a_client_cannot_prevent(self) -> None:
        for state in State:
            for signal in (Signal.TIMEOUT, Signal.BREAK, Signal.CUT):
                assert isinstance(TRANSITIONS[state][signal], Outcome)

    def test_all_outcomes_can_be_reached(self) -> None:
        reached = {target for row in TRANSITIONS.values() for target in row.values()}
        assert set(Outcome) <= reached
        assert set(State) - {State.SENT} <= reached

    def test_an_illegal_signal_raises_and_changes_nothing(self) -> None:
        stream = machine()
        with pytest.raises(IllegalSignalError, match=r"ACCEPT cannot happen to.*ACCEPTED"):
            stream.headers(200)
        assert (stream.state, stream.outcome) == (State.ACCEPTED, None)
        with pytest.raises(IllegalSignalError, match="no row"):
            stream.row()

    def test_nothing_happens_after_the_end(self) -> None:
        stream = machine()
        stream.cut(20)
        with pytest.raises(IllegalSignalError):
            stream.event(completion(" a", usage=1), 30)
        with pytest.raises(IllegalSignalError):
            stream.leave(30, think_ns=0, wire_close=WireClose.FIN)
        assert (stream.row().outcome, stream.row().ended_ns) == (Outcome.CUT_OFF, 20)
        assert stream.row().tokens_read == 0


def aborted(reason: str | None) -> bytes:
    chunk: dict[str, Any] = {"choices": [{"text": "", "finish_reason": "abort"}]}
    if reason is not None:
        chunk["cancellation_info"] = {"reason": reason, "message": "m"}
    return json.dumps(chunk).encode()


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        ("client_timeout", Outcome.TIMED_OUT),
        ("server_shutdown", Outcome.FAILED),
        ("rate_limit", Outcome.FAILED),
        ("api", Outcome.FAILED),
        (None, Outcome.FAILED),
    ],
)
def test_an_abort_that_nobody_here_asked_for_is_never_completed(
    reason: str | None, outcome: Outcome
) -> None:
    stream = machine()
    stream.event(completion(" a", usage=1), 20)
    stream.event(aborted(reason), 30)
    row = stream.row()
    assert row.outcome is outcome
    assert row.finish_reason == "abort"
    assert (row.tokens_read, row.ended_ns, row.abandoned_ns) == (1, 30, None)
    assert row.error == f"the server aborted the request: {reason or 'no reason given'}"


def test_an_abort_before_the_first_token_has_failed_too() -> None:
    stream = machine()
    stream.event(aborted("api"), 30)
    assert stream.row().outcome is Outcome.FAILED
    assert stream.row().first_token_ns is None


def test_tokens_that_an_aborting_server_did_not_send_were_not_read() -> None:
    stream = machine()
    stream.event(completion(" a", usage=1), 20)
    stream.event(completion("", usage=3, finish_reason="abort"), 30)
    assert (stream.row().tokens_read, stream.row().token_times_ns) == (1, [20])


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
        ticket = dataclasses.replace(TICKET, intent=Intent(n=2))
        stream = StreamMachine(
            ticket,
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


class TestAfterLeaving:
    def test_what_came_is_counted_apart(self) -> None:
        stream = machine()
        stream.event(completion(" a", usage=1), 20)
        stream.leave(25, think_ns=0, wire_close=WireClose.FIN)
        stream.late_event(completion(" b", usage=3))
        stream.late_event(b"half of a chunk")
        stream.late_event(completion("", usage=9, finish_reason="abort"))
        stream.late_event(b"[DONE]")
        stream.late_end(40)
        row = stream.row()
        assert (row.tokens_read, row.tokens_after_leaving) == (1, 2)
        assert (row.abandoned_ns, row.ended_ns, row.server_ended_ns) == (25, 25, 40)
        assert (row.finish_reason, row.completion_tokens) == ("abort", None)

    def test_nothing_told_is_nothing_known(self) -> None:
        stream = machine()
        stream.leave(25, think_ns=0, wire_close=WireClose.FIN)
        row = stream.row()
        assert (row.tokens_after_leaving, row.server_ended_ns) == (None, None)

    def test_nothing_but_the_end_is_no_token(self) -> None:
        stream = machine()
        stream.leave(25, think_ns=0, wire_close=WireClose.FIN)
        stream.late_end(40)
        assert stream.row().tokens_after_leaving == 0


def test_an_answer_that_never_ends_fails_before_it_takes_the_memory() -> None:
    stream = machine(continuous_usage=False)
    most = 16 * TICKET.max_tokens + 10_000
    for t_ns in range(most):
        stream.event(completion("a"), t_ns)
    assert stream.outcome is None
    stream.event(completion("a"), most)
    row = stream.row()
    assert (row.outcome, row.tokens_read) == (Outcome.FAILED, most)
    assert row.error is not None
    assert "far longer than was asked for: 10145 tokens by now" in row.error
