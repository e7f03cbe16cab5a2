"""The stream machine: outcomes, rows, and what it refuses."""

import json
from typing import Any

import pytest

from harness.load.stream import TRANSITIONS, IllegalSignalError, Signal, State, StreamMachine
from harness.records import Outcome, TokenCounting, WireClose
from tests.harness.load.streams import SPEC, completion, machine


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
    sent = StreamMachine(SPEC, sent_ns=10, continuous_usage=True)
    for stream, status_code in ((machine(), 200), (sent, None)):
        assert stream.can_leave
        stream.leave(12, think_ns=0, wire_close=WireClose.FIN)
        row = stream.row()
        assert (row.outcome, row.abandoned_ns) == (Outcome.ABANDONED, 12)
        assert (row.first_token_ns, row.last_token_ns, row.tokens_read) == (None, None, 0)
        assert row.status_code == status_code


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
            stream = StreamMachine(SPEC, sent_ns=10, continuous_usage=True)
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


class TestAfterLeaving:
    def test_what_came_is_counted_apart(self) -> None:
        stream = machine()
        stream.event(completion(" a", usage=1), 20)
        stream.leave(25, think_ns=0, wire_close=WireClose.FIN)
        stream.event(completion(" b", usage=3), 35)
        stream.event(b"half of a chunk", 35)
        stream.event(completion("", usage=9, finish_reason="abort"), 35)
        stream.event(b"[DONE]", 35)
        stream.body_ended(40)
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
        stream.body_ended(40)
        assert stream.row().tokens_after_leaving == 0
