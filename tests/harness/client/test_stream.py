"""The stream machine: what it counts, how it ends, and what it does not believe."""

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from harness.client.dialect import dialect_of_path
from harness.client.reader import StreamReader
from harness.client.server_error import refusal_message
from harness.client.states import TRANSITIONS, IllegalSignalError, State, StreamSignal
from harness.client.stream import StreamMachine
from harness.records import Outcome, RequestRow, Role, TokenCounting, Way, WireClose
from harness.workload.abandon import RequestSpec
from harness.workload.event_scale import Calibration

SPEC = RequestSpec(
    request_id="r1",
    arm="main",
    user=3,
    max_tokens=9,
    prompt_tokens=7,
    intended_start_ns=5,
    plan="tokens:2",
    planned_abandon=2,
    way=Way.RST,
)
TWO = replace(SPEC, n=2)
MOST = 16 * 9 + 10_000
MOST_OF_TWO = 16 * 18 + 10_000
FAR_LONGER = "the answer is far longer than was asked for"
DONE = b"[DONE]"


def machine(spec: RequestSpec = SPEC, *, status: int | None = 200, **how: Any) -> StreamMachine:
    stream = StreamMachine(spec, sent_ns=10, **{"continuous_usage": True} | how)
    if status is not None:
        stream.headers(status)
    return stream


def event(*texts: str | None, usage: Any = None, finish: str | None = None, **more: Any) -> bytes:
    """A chunk with a text of each answer; a finish reason and a count of all."""
    choices = [{"index": i, "text": text, "finish_reason": finish} for i, text in enumerate(texts)]
    chunk: dict[str, Any] = {"choices": choices} | more
    if usage is not None:
        chunk["usage"] = {"prompt_tokens": 7, "completion_tokens": usage}
    return json.dumps(chunk).encode()


def chat(**delta: str) -> bytes:
    return json.dumps({"choices": [{"delta": delta, "finish_reason": None}]}).encode()


def response_event(kind: str, **more: Any) -> bytes:
    return json.dumps({"type": f"response.{kind}"} | more).encode()


def response_end(status: str, **more: Any) -> bytes:
    usage = {"input_tokens": 7, "output_tokens": 2, "total_tokens": 9}
    return response_event("done", response={"status": status, "usage": usage, "error": None} | more)


def message_event(kind: str, **more: Any) -> bytes:
    return json.dumps({"type": kind} | more).encode()


RESPONSE = [
    response_event("created", response={"status": "in_progress", "usage": None}),
    response_event("output_item.added", item={"type": "message"}, output_index=0),
    response_event("reasoning_text.delta", delta="Hm"),
    response_event("output_text.delta", delta=" word"),
    response_event("output_text.done", text=" word"),
]
MESSAGE = [
    message_event("message_start", message={"usage": {"input_tokens": 7, "output_tokens": 1}}),
    message_event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
    message_event("ping"),
    message_event("content_block_delta", delta={"type": "thinking_delta", "thinking": "Hm"}),
    message_event("content_block_delta", delta={"type": "text_delta", "text": " word"}),
    message_event("content_block_stop", index=0),
]


def message_end(why: str) -> bytes:
    usage = {"input_tokens": 7, "output_tokens": 2}
    return message_event("message_delta", delta={"stop_reason": why}, usage=usage)


def fed(stream: StreamMachine, *events: bytes) -> StreamMachine:
    for number, data in enumerate(events, 2):
        stream.event(data, 10 * number)
    return stream


def told(path: str, *events: bytes, **how: Any) -> RequestRow:
    stream = fed(machine(dialect=dialect_of_path(path), **how), *events)
    if stream.outcome is None:
        stream.body_ended(99)
    return stream.row()


def left(stream: StreamMachine) -> StreamMachine:
    stream.leave(25, think_ns=4, wire_close=WireClose.RST)
    return stream


def whole(body: bytes) -> StreamMachine:
    """A stream whose answer came in one piece."""
    stream = machine()
    stream.answer(body, 30)
    return stream


def cut(stream: StreamMachine) -> RequestRow:
    stream.cut(99)
    return stream.row()


# Outcomes


def test_a_stream_read_to_its_end() -> None:
    stream = fed(machine(), event(" a", usage=1), event(" b", usage=2, finish="length"), DONE)
    assert stream.outcome is None  # the body has not ended
    stream.body_ended(50)
    row = stream.row()
    assert row.outcome is Outcome.COMPLETED
    times = (row.intended_start_ns, row.sent_ns, row.first_token_ns, row.last_token_ns)
    assert times == (5, 10, 20, 30)
    assert (row.ended_ns, row.abandoned_ns, row.wire_close, row.error) == (50, None, None, None)
    assert (row.tokens_read, row.token_times_ns, row.event_tokens) == (2, [20, 30], [1, 1])
    assert (row.finish_reason, row.prompt_tokens, row.completion_tokens) == ("length", 7, 2)
    assert (row.status_code, row.token_counting) == (200, TokenCounting.USAGE)


@pytest.mark.parametrize(("status", "tokens"), [(200, 1), (200, 0), (None, 0)])
def test_an_abandoned_stream_keeps_its_t0_and_what_was_read(
    status: int | None, tokens: int
) -> None:
    stream = fed(machine(status=status), *[event(" a", usage=1)] * tokens)
    assert stream.can_leave
    row = left(stream).row()
    assert (row.outcome, row.status_code) == (Outcome.ABANDONED, status)
    assert (row.abandoned_ns, row.ended_ns, row.think_ns) == (25, 25, 4)
    assert (row.wire_close, row.tokens_read) == (WireClose.RST, tokens)
    assert (row.error, row.completion_tokens) == (None, None)
    assert (row.tokens_after_leaving, row.server_ended_ns) == (None, None)


@pytest.mark.parametrize(
    ("status", "body", "outcome", "error"),
    [
        (429, b'{"error":{"message":"slow down"}}', "rejected", "HTTP 429: slow down"),
        (503, b"busy", "rejected", "HTTP 503: busy"),
        (529, b'{"type":"error","error":{"message":"full"}}', "rejected", "HTTP 529: full"),
        (503, b"<html>\r\n<title>Too busy</title>", "rejected", "HTTP 503: Too busy"),
        (500, b'{"error":"oh"}', "failed", "HTTP 500: oh"),
        (404, b'{"object":"error","message":"no such model"}', "failed", "no such model"),
        (400, b'{"detail":[1]}', "failed", 'HTTP 400: {"detail":[1]}'),
        (307, b"", "failed", "HTTP 307"),
        (500, b"\xff" * 1000, "failed", "HTTP 500: \ufffd"),
    ],
)
def test_refusals(status: int, body: bytes, outcome: str, error: str) -> None:
    stream = machine(status=status)
    assert not stream.can_leave
    stream.refusal(body, 20)
    row = stream.row()
    assert (row.outcome, row.status_code) == (outcome, status)
    assert error in (row.error or "")
    assert len(row.error or "") < 400


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (lambda stream: stream.cut(30), Outcome.CUT_OFF),
        (lambda stream: stream.break_off(30, "why"), Outcome.FAILED),
        (lambda stream: stream.time_out(30, "why"), Outcome.TIMED_OUT),
        (lambda stream: stream.body_ended(30), Outcome.FAILED),
    ],
    ids=["cut", "break off", "time out", "body ended"],
)
def test_ends_that_no_client_can_prevent(
    end: Callable[[StreamMachine], None], outcome: Outcome
) -> None:
    for last in ([event("", usage=1, finish="stop")], [event("a", usage=1), DONE]):
        finished = fed(machine(), *last)
        assert not finished.can_leave
        end(finished)
        assert (finished.outcome, finished.row().error) == (Outcome.COMPLETED, None)
    reading = fed(machine(), event(" a", usage=1))
    end(reading)
    assert reading.outcome is outcome


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (lambda stream: stream.cut(30), Outcome.CUT_OFF),
        (lambda stream: stream.break_off(30, "why"), Outcome.FAILED),
        (lambda stream: stream.time_out(30, "why"), Outcome.TIMED_OUT),
        (lambda stream: stream.body_ended(30), Outcome.COMPLETED),
    ],
    ids=["cut", "break off", "time out", "body ended"],
)
@pytest.mark.parametrize("usage", [None, 0])
def test_a_finish_reason_before_any_text_is_no_end_of_a_stream_that_breaks(
    usage: int | None, end: Callable[[StreamMachine], None], outcome: Outcome
) -> None:
    role = {"role": "assistant", "content": ""}
    first: dict[str, Any] = {"choices": [{"delta": role, "finish_reason": "stop"}]}
    stream = fed(machine(), event(usage=usage, **first))
    assert stream.can_leave
    end(stream)
    assert stream.outcome is outcome
    finished = fed(machine(), event(**first), event(usage=4))
    assert not finished.can_leave


@pytest.mark.parametrize(
    ("rest", "outcome", "error"),
    [
        (b"data: [DONE]\n", Outcome.COMPLETED, None),
        (b"data: [DONE]", Outcome.COMPLETED, None),
        (b'data: {"choices":[{"finish_reason":"stop"}]}', Outcome.COMPLETED, None),
        (b"data: [DON", Outcome.FAILED, "why"),
        (b'data: {"choices":[{"finish_rea', Outcome.FAILED, "why"),
        (b'error: {"message": "engine died"}', Outcome.FAILED, "engine died"),
        (b'event: error\ndata: {"message": "engine died"}\n', Outcome.FAILED, "engine died"),
    ],
)
def test_what_has_come_before_a_break_is_read(
    rest: bytes, outcome: Outcome, error: str | None
) -> None:
    stream = machine()
    reader = StreamReader(stream, None)
    reader.read(b"data: %b\n\n%b" % (chat(content="a"), rest), 20)
    reader.read_rest(30)
    if stream.outcome is None:
        stream.break_off(30, "why")
    assert (stream.outcome, stream.error, stream.tokens_read) == (outcome, error, 1)


@pytest.mark.parametrize(
    "last",
    [
        {"delta": {"content": "b", "finish_reason": "stop"}},
        {"delta": {"content": "b"}, "finishReason": "STOP"},
        {"delta": {"content": "b"}, "stop_reason": "length"},
    ],
)
def test_a_finish_reason_that_the_quick_reader_passed_over_counts(last: dict[str, Any]) -> None:
    for end in ("body_ended", "break_off", "time_out"):
        stream = fed(machine(continuous_usage=False), chat(content="a"), event(choices=[last]))
        assert stream.can_leave  # nothing has looked at it
        getattr(stream, end)(*((50,) if end == "body_ended" else (50, "why")))
        assert (stream.outcome, stream.tokens_read) == (Outcome.COMPLETED, 2)


@pytest.mark.parametrize(
    "account",
    [
        {"usage": {"prompt_tokens": 7, "completion_tokens": 2}},
        {"x_groq": {"usage": {"prompt_tokens": 7, "completion_tokens": 2}}},
        {"message": {"usage": {"input_tokens": 7, "output_tokens": 2}}},
        {"usageMetadata": {"promptTokenCount": 7, "candidatesTokenCount": 2}},
        {"prompt_eval_count": 7, "eval_count": 2},
        {"choices": [{"delta": {}, "usage": {"prompt_tokens": 7, "completion_tokens": 2}}]},
    ],
)
@pytest.mark.parametrize("after", [True, False])
def test_an_account_counts_wherever_it_is_also_after_the_end(
    account: dict[str, Any], after: bool
) -> None:
    stream = fed(machine(continuous_usage=False), chat(content="a"), chat(content="b"))
    closing = json.dumps(account).encode()
    fed(stream, *((DONE, closing) if after else (closing, DONE))).body_ended(99)
    row = stream.row()
    assert (row.outcome, row.tokens_read) == (Outcome.COMPLETED, 2)
    assert (row.prompt_tokens, row.completion_tokens) == (7, 2)


@pytest.mark.parametrize(
    "found",
    [
        {"prompt_tokens_details": {"cached_tokens": 6}},
        {"cached_tokens": 6},  # as Moonshot's
        {"prompt_tokens_details": None, "prompt_cache_hit_tokens": 6},  # as DeepSeek's
    ],
)
def test_what_the_prefix_cache_had_is_known_by_any_of_its_names(found: dict[str, Any]) -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 1, **found}
    closing = json.dumps({"choices": [], "usage": usage}).encode()
    stream = fed(machine(continuous_usage=False), chat(content="a"), closing, DONE)
    stream.body_ended(99)
    assert (stream.row().prompt_tokens, stream.row().cached_tokens) == (9, 6)


def test_an_empty_answer_says_what_its_stream_was() -> None:
    stream = fed(machine(), response_event("output_text.delta", delta="a"), event(usage=4), DONE)
    stream.body_ended(99)
    assert stream.outcome is Outcome.COMPLETED
    assert 'set `dialect = "responses"`' in stream.why_empty


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        ("client_timeout", Outcome.TIMED_OUT),
        ("server_shutdown", Outcome.FAILED),
        (None, Outcome.FAILED),
    ],
)
def test_an_abort_unasked_is_never_completed(
    tokens: int, reason: str | None, outcome: Outcome
) -> None:
    """Nor was read what the aborting server counts but did not send."""
    why = {} if reason is None else {"cancellation_info": {"reason": reason}}
    abort = event("", usage=3, finish="abort", **why)
    row = fed(machine(), *[event(" a", usage=1)] * tokens, abort).row()
    assert (row.outcome, row.finish_reason) == (outcome, "abort")
    assert (row.tokens_read, row.token_times_ns) == (tokens, [20] * tokens)
    assert (row.ended_ns, row.abandoned_ns) == (20 + 10 * tokens, None)
    assert row.error == f"the server aborted the request: {reason or 'no reason given'}"


def test_all_outcomes_and_states_can_be_reached_and_every_state_ends() -> None:
    reached = {target for row in TRANSITIONS.values() for target in row.values()}
    assert set(Outcome) <= reached
    assert set(State) - {State.SENT} <= reached
    for state in State:
        for signal in (StreamSignal.TIMEOUT, StreamSignal.BREAK, StreamSignal.CUT):
            assert isinstance(TRANSITIONS[state][signal], Outcome)


def test_an_illegal_signal_raises_and_changes_nothing() -> None:
    stream = machine()
    with pytest.raises(IllegalSignalError, match=r"ACCEPT cannot happen to.*ACCEPTED"):
        stream.headers(200)
    assert (stream.state, stream.outcome) == (State.ACCEPTED, None)
    with pytest.raises(IllegalSignalError, match="no row"):
        stream.row()
    cut(stream)
    with pytest.raises(IllegalSignalError):
        stream.event(event(" a", usage=1), 30)
    with pytest.raises(IllegalSignalError):
        left(stream)
    row = stream.row()
    assert (row.outcome, row.ended_ns, row.tokens_read) == (Outcome.CUT_OFF, 99, 0)


# Counting


@pytest.mark.parametrize(
    ("continuous_usage", "events", "event_tokens", "counting"),
    [
        (True, [event(" a b c", usage=3), event(" d", usage=4)], [3, 1], "usage"),
        (True, [event("", usage=1)], [1], "usage"),  # half of a character
        (True, [event(" a", usage=1), event(" b"), event(" c", usage=9)], [1, 1, 7], "events"),
        (False, [chat(role="assistant"), chat(content=""), event(""), event(None)], [], "events"),
        (False, [event(" a", " b"), event(" c")], [2, 1], "events"),
        (False, [chat(content="a"), chat(reasoning_content="hm")], [1, 1], "events"),
        (False, [event(" a"), event("", finish="stop"), event(usage=2), DONE], [1], "events"),
    ],
)
def test_tokens_are_not_events(
    continuous_usage: bool, events: list[bytes], event_tokens: list[int], counting: TokenCounting
) -> None:
    stream = fed(machine(continuous_usage=continuous_usage), *events)
    assert (stream.state is State.ACCEPTED) is (not event_tokens)
    row = cut(stream)
    assert (row.event_tokens, row.tokens_read) == (event_tokens, sum(event_tokens))
    assert row.token_counting == counting
    if DONE in events:
        assert row.completion_tokens == 2  # the last account is kept


@pytest.mark.parametrize(("per_choice", "usages"), [(False, [1, 2, 4, 5]), (True, [1, 1, 3, 2])])
def test_a_count_of_the_whole_request_or_of_each_answer(
    per_choice: bool, usages: list[int]
) -> None:
    stream = machine(TWO, usage_per_choice=per_choice)
    for t_ns, usage in enumerate(usages):
        choice = {"index": t_ns % 2, "text": " a", "finish_reason": None}
        stream.event(event(usage=usage, choices=[choice]), t_ns)
    row = cut(stream)
    assert (row.tokens_read, row.event_tokens, row.n) == (5, [1, 1, 2, 1], 2)


@pytest.mark.parametrize("last", [event(" a", usage=2, finish="stop"), DONE])
def test_several_answers_have_finished_when_all_have(last: bytes) -> None:
    """Or with the end of a server that knows no n."""
    stream = fed(machine(TWO), event(" a", usage=1, finish="length"))
    could_leave = [stream.can_leave]
    stream.event(last, 30)
    could_leave.append(stream.can_leave)
    assert could_leave == [True, False]
    stream.body_ended(40)
    assert stream.outcome is Outcome.COMPLETED


@pytest.mark.parametrize(("spec", "gaps"), [(SPEC, [None, 1, 19]), (TWO, [None, None, 20])])
def test_the_gap_is_between_the_latest_tokens_of_one_answer(
    spec: RequestSpec, gaps: list[int | None]
) -> None:
    stream, seen = machine(spec), []
    for usage, t_ns in ((1, 20), (2, 21), (3, 40)):
        stream.event(event(" a", usage=usage), t_ns)
        seen.append(stream.last_gap_ns)
    assert seen == gaps


def test_a_token_of_a_long_answer_takes_few_bytes() -> None:
    stream, num_tokens = machine(), 2000
    events = [event(" a", usage=number + 1) for number in range(num_tokens)]
    tracemalloc.start()
    try:
        for number, data in enumerate(events):
            stream.event(data, 10**15 + number * 20_000_000)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert stream.tokens_read == num_tokens
    assert held / num_tokens < 24


@pytest.mark.parametrize(
    "choice",
    [
        {"text": "é!"},
        {"delta": {"content": "é!"}},
        {"delta": {"reasoning_content": "é!"}},
        {"text": "é!", "delta": {"content": "é!", "token_id": 7}},  # as Together's
    ],
)
@pytest.mark.parametrize(("role", "kept"), [(Role.CANARY, "é!é!"), (Role.USER, None)])
def test_the_text_of_canaries_is_kept(
    choice: dict[str, object], role: Role, kept: str | None
) -> None:
    stream = machine(replace(SPEC, role=role), continuous_usage=False)
    last = {**choice, "finish_reason": "length"}
    fed(stream, event(choices=[choice]), event(choices=[last])).body_ended(50)
    assert stream.row().answer == kept


FOUR = Calibration(4.0, 0.1)


@pytest.mark.parametrize(
    ("tokens", "events", "event_tokens"),
    [
        (4.0, 2, [4, 4]),
        (4.0, 4, [4, 4, 1]),  # no more than were asked for: 9
        (4.0, 12, [4, 4, *[1] * 4]),  # but one for each event
        (1.5, 5, [2, 1, 2, 1, 2]),
        (1.0, 3, [1, 1, 1]),
    ],
)
def test_an_event_is_taken_for_as_many_tokens_as_in_other_answers(
    tokens: float, events: int, event_tokens: list[int]
) -> None:
    how: dict[str, Any] = {"continuous_usage": False, "calibration": Calibration(tokens, 0.1)}
    row = cut(fed(machine(**how), *[event("a")] * events))
    assert (row.event_tokens, row.tokens_read) == (event_tokens, sum(event_tokens))
    assert row.token_counting is TokenCounting.CALIBRATED
    assert (row.tokens_per_event, row.tokens_error) == (tokens, 0.1)


@pytest.mark.parametrize(
    ("events", "counting", "event_tokens"),
    [
        ([event("a", usage=3), event("b", usage=5)], TokenCounting.USAGE, [3, 2]),
        ([event("a", usage=0), event("b", usage=0)], TokenCounting.CALIBRATED, [4, 4]),
        ([event("a", usage=2), event("b")], TokenCounting.CALIBRATED, [2, 4]),
    ],
)
def test_a_servers_own_count_is_better(
    events: list[bytes], counting: TokenCounting, event_tokens: list[int]
) -> None:
    row = cut(fed(machine(calibration=FOUR), *events))
    assert (row.token_counting, row.event_tokens) == (counting, event_tokens)


def test_token_ids_count_tokens() -> None:
    with_ids = [event(choices=[{"text": "a", "token_ids": ids}]) for ids in ([7, 8], [9])]
    row = cut(fed(machine(continuous_usage=False, calibration=FOUR), *with_ids))
    assert (row.token_counting, row.event_tokens) == (TokenCounting.IDS, [2, 1])
    mixed = cut(fed(machine(continuous_usage=False), *with_ids, event("b")))
    assert (mixed.token_counting, mixed.event_tokens) == (TokenCounting.EVENTS, [2, 1, 1])


@pytest.mark.parametrize("ids", [7, 1.5, True, "789", {"a": 1}, None])
def test_token_ids_that_are_no_list_count_nothing(ids: Any) -> None:
    events = [event(choices=[{"text": "a", "token_ids": ids}])] * 2
    row = cut(fed(machine(continuous_usage=False), *events))
    assert (row.token_counting, row.event_tokens) == (TokenCounting.EVENTS, [1, 1])


HIDDEN = {"completion_tokens_details": {"reasoning_tokens": 38}}


@pytest.mark.parametrize(
    ("first", "account", "counted"),
    [
        ({"content": "a"}, {"completion_tokens": 40} | HIDDEN, (2, 2)),
        ({"reasoning": "hm"}, {"completion_tokens": 40} | HIDDEN, (40, 2)),
        ({"content": "a"}, {"completion_tokens": 40, "reasoning_tokens": 38}, (2, 2)),
        # counted apart, as by xAI
        ({"content": "a"}, {"completion_tokens": 2} | HIDDEN, (2, 2)),
        (
            {"content": "a"},
            {"prompt_tokens": 8, "completion_tokens": 60, "total_tokens": 106} | HIDDEN,
            (60, 2),
        ),
        ({"content": "a"}, {"completion_tokens": 0}, None),
        # shown within the text
        ({"content": "a"}, {"completion_tokens": 3, "reasoning_tokens": 2}, (3, 2)),
    ],
)
def test_reasoning_that_is_not_shown_is_in_no_count_of_an_event(
    first: dict[str, str], account: dict[str, Any], counted: tuple[int, int] | None
) -> None:
    last = event(choices=[{"delta": {}, "finish_reason": "stop"}])
    stream = fed(machine(continuous_usage=False), chat(**first), chat(content="b"), last)
    stream.event(json.dumps({"choices": [], "usage": account}).encode(), 50)
    assert stream.counted is None  # it has not ended
    stream.body_ended(60)
    assert stream.counted == counted


@pytest.mark.parametrize("text", ["", "a"])
def test_a_count_of_nothing_is_none_where_text_has_come(text: str) -> None:
    none = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    ends = [event(text, usage=0, finish="stop"), json.dumps({"usage": none}).encode(), DONE]
    row = told("/v1/completions", *ends, continuous_usage=False)
    assert row.outcome is Outcome.COMPLETED
    assert row.prompt_tokens == 7
    assert row.completion_tokens == (None if text else 0)
    row = told("/v1/completions", *ends[1:], event(text, finish="stop"), continuous_usage=False)
    assert row.prompt_tokens is None
    row = whole(event(text, usage=0, finish="stop")).row()
    assert (row.tokens_read, row.completion_tokens) == ((1, None) if text else (0, 0))


def test_what_comes_after_leaving_is_counted_apart() -> None:
    stream = left(fed(machine(), event(" a", usage=1)))
    late = [event(" b", usage=3), b"half of a chunk", event("", usage=9, finish="abort"), DONE]
    fed(stream, *late).body_ended(40)
    row = stream.row()
    assert (row.tokens_read, row.tokens_after_leaving) == (1, 2)
    assert (row.abandoned_ns, row.ended_ns, row.server_ended_ns) == (25, 25, 40)
    assert (row.finish_reason, row.completion_tokens) == ("abort", None)
    only_ended = left(machine())
    only_ended.body_ended(40)
    assert only_ended.row().tokens_after_leaving == 0


# A server's nonsense is named, and costs neither the answer before it nor the one after it.

DEEP = b"[" * 100_000 + b"]" * 100_000
# The data; how many tokens it brings; what the row says of it.
ODD: dict[str, tuple[bytes, int, str | None]] = {
    "no JSON": (b"{", 0, "'{' is no JSON"),
    "choices that are none": (b'{"choices":3}', 0, "`choices` is 3"),
    "a choice that is none": (b'{"choices":[4]}', 0, "a choice is 4"),
    "a list": (b"[7]", 0, "7 is no object"),
    "invalid UTF-8": (b'{"choices":[{"text":"caf\xe9"}]}', 1, None),
    "half a pair of surrogates": (rb'{"choices":[{"text":"\ud800"}]}', 1, None),
    "a line end in a text": (b'{"choices":[{"text":"a\nb"}]}', 1, None),
    "nested without end": (b'{"x":' + DEEP + b"}", 0, "is no JSON"),
    "an answer's number of 5,000 digits": (
        b'{"choices":[{"text":"a","index":' + b"9" * 5000 + b"}]}",
        *(1, None),
    ),
    "an answer too many": (b'{"choices":[{"text":"a","index":1024}]}', 1, None),
    "a count below nothing": (event("a", usage=-1), 1, "`usage.completion_tokens` is -1"),
    "a count that no file holds": (event("a", usage=2**31), 1, f"is {2**31}"),
    "a count that no machine holds": (event("a", usage=2**70), 1, f"is {2**70}"),
    "a prompt that no machine holds": (
        b'{"usage":{"prompt_tokens":%d}}' % 2**70,
        *(0, "`usage.prompt_tokens` is"),
    ),
    "half a token": (event("a", usage=1.5), 1, "`usage.completion_tokens` is 1.5"),
    "usage that is none": (b'{"choices":[{"text":"a"}],"usage":[1]}', 1, "`usage` is [1]"),
    "a reason that is none": (
        b'{"choices":[{"text":"a","finish_reason":7}]}',
        *(1, "`finish_reason` is 7"),
    ),
}


def test_an_event_of_nothing_is_no_error() -> None:
    stream = fed(machine(), b"null", b"", b" ", b"{}", b"[]", event("a", usage=1))
    assert (stream.outcome, stream.tokens_read) == (None, 1)
    assert cut(stream).unread is None
    assert whole(b"null").row().outcome is Outcome.FAILED


@pytest.mark.parametrize(("data", "tokens", "unread"), ODD.values(), ids=ODD)
def test_what_makes_no_sense_is_named_and_costs_no_answer(
    data: bytes, tokens: int, unread: str | None
) -> None:
    stream = fed(machine(), event("a", usage=1), data, data, event("b", finish="stop"), DONE)
    stream.body_ended(99)
    row = stream.row()
    assert (row.outcome, row.tokens_read) == (Outcome.COMPLETED, 2 + 2 * tokens)
    assert (unread is None) is (row.unread is None)
    assert (unread or "") in (row.unread or "")
    assert len(row.unread or "") < 300
    at_once = whole(data).row()
    assert (at_once.outcome, at_once.tokens_read) == (
        Outcome.COMPLETED if tokens else Outcome.FAILED,
        tokens,
    )
    assert (unread or "") in (at_once.error or at_once.unread or "")
    late = fed(left(machine()), data)
    assert late.row().tokens_after_leaving == tokens


@pytest.mark.parametrize("last", [[], [DONE]])
def test_nonsense_alone_is_no_answer(last: list[bytes]) -> None:
    stream = fed(machine(), b"(oops)", b"more of it", *last)
    if stream.outcome is None:
        stream.body_ended(99)
    row = stream.row()
    assert (row.outcome, row.tokens_read) == (Outcome.FAILED, 0)
    assert "could not be read: '(oops)' is no JSON" in (row.error or "")


def test_nonsense_has_an_end() -> None:
    stream = fed(
        machine(), event("a", usage=1), *[b"?"] * 1000, event("b", usage=2), *[b"?"] * 1000
    )
    assert stream.outcome is None
    assert "1000 events without a token make no sense" in (fed(stream, b"?").row().error or "")


def test_a_finish_reason_without_end_is_shortened() -> None:
    row = fed(machine(), event("a", usage=1, finish="x" * 301), DONE)
    row.body_ended(99)
    assert (row.row().outcome, row.row().finish_reason) == (Outcome.COMPLETED, "x" * 300)


def test_an_error_inside_the_stream_is_the_rows() -> None:
    data = b'{"error":{"message":"out of blocks","type":"x"}}'
    for row in (fed(machine(), event(" a", usage=1), data).row(), whole(data).row()):
        assert (row.outcome, row.ended_ns, row.error) == (Outcome.FAILED, 30, "out of blocks")


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b'{"choices":[]}', "the answer has no text, finish reason or count of tokens"),
        (b'{"error":{"\xff":1}}', '{"\ufffd":1}'),
        (b'{"error":' + b"9" * 5000 + b"}", "Infinity"),
        (b'{"choices":[{"text":"a","finish_reason":"abort"}]}', "the server aborted"),
        (b'{"detail":"warming up"}', "warming up"),
        (b'{"base_resp":{"status_code":1013,"status_msg":"engine died"}}', "engine died"),
        (b'{"ok":false,"message":"engine died"}', "engine died"),
        (b"<title>502 Bad Gateway</title>", "502 Bad Gateway"),
        (b'{"type":"response.created","response":{}}', 'set `dialect = "responses"`'),
    ],
)
def test_an_answer_in_one_piece_that_is_none(body: bytes, error: str) -> None:
    row = whole(body).row()
    assert row.outcome is Outcome.FAILED
    assert error in (row.error or "")


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        (
            {"title": "Bad Request", "errors": {"$": ["The property 'x' could not be mapped"]}},
            "Bad Request: The property 'x' could not be mapped",
        ),
        (
            {"statusCode": 400, "error": "Bad Request", "message": ["property x is bad", "y too"]},
            "Bad Request: property x is bad; y too",
        ),
        ({"message": "Invalid", "errors": [{"field": "x", "message": "no"}]}, "Invalid: no"),
        ({"title": "Too many", "errors": {}, "status": 400}, "Too many"),
        ({"message": "no x", "errors": ["no x"]}, "no x"),
    ],
)
def test_a_refusal_says_more_than_its_title(refusal: dict[str, Any], words: str) -> None:
    assert refusal_message(400, msgspec.json.encode(refusal)) == f"HTTP 400: {words}"


def test_an_error_that_is_nested_almost_too_deep_is_said() -> None:
    for depth in range(800, 1000):
        for data in (
            b'{"error":' * depth + b'"oh"' + b"}" * depth,
            b'{"error":' + b"[" * depth + b"]" * depth + b"}",
        ):
            assert len(refusal_message(400, data)) < 400
            stream = fed(machine(), data)
            if stream.outcome is None:  # it could not even be read
                stream.body_ended(99)
            assert stream.outcome is Outcome.FAILED
            assert len(stream.error or "") < 400


@pytest.mark.parametrize("finish", [None, "length"])
def test_a_count_that_jumps_too_far_is_in_no_sum(finish: str | None) -> None:
    """Neither `tokens_read` nor `event_tokens` nor the server's own account."""
    jump = event("a", usage=MOST + 1, finish=finish)
    row = fed(machine(), event("a", usage=1), jump).row()
    assert (row.outcome, row.completion_tokens) == (Outcome.FAILED, None)
    assert (row.tokens_read, row.event_tokens, row.ended_ns) == (1, [1], 30)
    assert row.error == f"{FAR_LONGER}: {MOST + 1} tokens by now, and `max_tokens` is 9"
    assert fed(machine(), event("a", usage=MOST)).outcome is None
    at_once = whole(jump).row()
    assert (at_once.outcome, at_once.tokens_read) == (Outcome.FAILED, 0)
    late = fed(left(machine()), event("a", usage=2), jump).row()
    assert (late.outcome, late.tokens_after_leaving) == (Outcome.ABANDONED, 2)
    for error in (at_once.error, late.error):
        assert FAR_LONGER in (error or "")


def test_answers_that_are_too_long_together() -> None:
    half = MOST_OF_TWO // 2
    stream = fed(machine(TWO, usage_per_choice=True), event("a", "a", usage=half))
    assert (stream.outcome, stream.tokens_read) == (None, MOST_OF_TWO)
    row = fed(stream, event("a", usage=half + 1)).row()
    assert (row.outcome, row.event_tokens) == (Outcome.FAILED, [MOST_OF_TWO])


@pytest.mark.parametrize(
    "last",
    [
        [event("a", usage=MOST_OF_TWO + 1, finish="stop")],
        [event("a", finish="stop"), event(usage=MOST_OF_TWO + 1)],
        [event("a", "a", finish="stop"), event(usage=MOST_OF_TWO + 1)],
    ],
    ids=["in the last event", "after the first answer", "after all"],
)
def test_an_account_at_the_end_that_cannot_be_true(last: list[bytes]) -> None:
    row = fed(machine(TWO, continuous_usage=False), *last).row()
    assert row.outcome is Outcome.FAILED
    assert FAR_LONGER in (row.error or "")


def test_counts_that_files_hold_are_kept_as_they_are() -> None:
    many = machine(replace(SPEC, max_tokens=10_000_000, n=128))
    row = cut(fed(many, event("a", usage=2**31 - 1)))
    assert row.event_tokens == [2**31 - 1]
    assert msgspec.json.decode(msgspec.json.encode(row), type=RequestRow) == row


@pytest.mark.parametrize(
    ("continuous_usage", "usage", "tokens"), [(False, None, MOST), (True, 1, MOST)]
)
def test_events_without_end_fail_before_they_take_the_memory(
    continuous_usage: bool, usage: int | None, tokens: int
) -> None:
    """Events whose count stands still, too."""
    stream = fed(machine(continuous_usage=continuous_usage), *[event("a", usage=usage)] * MOST)
    stream.event(event("", usage=usage), 0)
    assert stream.outcome is None
    row = fed(stream, *[event("a", usage=usage)] * (1 + tokens % 2)).row()
    assert (row.outcome, row.tokens_read) == (Outcome.FAILED, tokens)
    assert f"{FAR_LONGER}: {MOST + 1} tokens by now" in (row.error or "")


@pytest.mark.parametrize("count", [lambda _: 1, lambda n: n], ids=["stands still", "rises"])
def test_a_canarys_text_is_bounded(count: Callable[[int], int]) -> None:
    stream, event_chars, events = machine(replace(SPEC, role=Role.CANARY)), 50_000, 0
    while stream.outcome is None:
        events += 1
        stream.event(event("a" * event_chars, usage=count(events)), events)
    answer = stream.row().answer or ""
    assert 64 * MOST < len(answer) <= 64 * (MOST + 1) + event_chars


def test_a_canarys_empty_events_are_not_kept() -> None:
    stream = fed(machine(replace(SPEC, role=Role.CANARY)), *[event("")] * (2 * MOST))
    assert cut(stream).answer == ""
    assert stream._length.texts == []


# Other dialects

TOO_LONG = {"incomplete_details": {"reason": "max_output_tokens"}}


@pytest.mark.parametrize(
    ("path", "events", "end", "reason"),
    [
        ("/v1/responses", RESPONSE, response_end("completed"), "stop"),
        ("/v1/responses", RESPONSE, response_end("incomplete", **TOO_LONG), "length"),
        ("/v1/messages", MESSAGE, message_end("end_turn"), "stop"),
        ("/v1/messages", MESSAGE, message_end("max_tokens"), "length"),
        ("/v1/messages", MESSAGE, message_end("refusal"), "refusal"),
    ],
)
def test_other_dialects_count_texts_and_say_why_they_end(
    path: str, events: list[bytes], end: bytes, reason: str
) -> None:
    row = told(path, *events, end, message_event("message_stop"))
    assert (row.outcome, row.finish_reason) == (Outcome.COMPLETED, reason)
    assert (row.tokens_read, row.prompt_tokens, row.completion_tokens) == (2, 7, 2)
    assert row.token_counting is TokenCounting.EVENTS


@pytest.mark.parametrize(
    ("path", "events", "error"),
    [
        ("/v1/responses", [*RESPONSE, response_end("cancelled")], "aborted the request"),
        ("/v1/responses", [response_end("failed", error={"message": "no room"})], "no room"),
        ("/v1/responses", [b'{"type":"error","message":"no room"}'], "no room"),
        ("/v1/responses", RESPONSE, "neither a finish reason nor"),
        ("/v1/messages", [*MESSAGE, b'{"type":"error","error":{"message":"full"}}'], "full"),
        ("/v1/messages", MESSAGE, "neither a finish reason nor"),
        ("/v1/messages", [b'{"delta":{"text":[7]}}'], "neither a finish reason nor"),
    ],
)
def test_other_dialects_tell_a_failure(path: str, events: list[bytes], error: str) -> None:
    row = told(path, *events)
    assert row.outcome is Outcome.FAILED
    assert error in (row.error or "")
