"""What streams of ours learn of a server in use: its step, and whether a leave can be judged."""

import random
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.client.live_stream import LiveStream
from harness.experiments.averaged import LeaveWindow
from harness.experiments.gentle_plan import StreamTurns
from harness.experiments.visitors import BusyError, Visitors, first_look
from harness.intervals import Interval
from harness.records import Outcome, RequestRow
from harness.workload.event_scale import Counted, EventScale
from tests.made_up.rows import request_row

STEP_NS = 20_000_000
STEP_S = STEP_NS / 1e9
WINDOW = LeaveWindow(poll_s=0.001, level_s=0.004, after_s=0.015)  # 20 ms in all


class Client:
    """It answers each request with the next of these rows at once."""

    def __init__(self, answers: Sequence[tuple[RequestRow, Counted | None]]) -> None:
        self.answers = list(answers)
        self.event_scale = EventScale()

    def begin(self, _spec: object, _text: str, _note: object) -> Any:
        row, counted = self.answers.pop(0)
        return SimpleNamespace(stream=SimpleNamespace(counted=counted, row=row))

    def see_through(self, conversation: Any, keep: Callable[[RequestRow], None]) -> None:
        keep(conversation.stream.row)


def session_of(*answers: tuple[RequestRow, Counted | None]) -> Any:
    return SimpleNamespace(
        client=Client(answers),
        plan=SimpleNamespace(url="http://server"),
        issue=lambda spec: spec,
        prompt=lambda _spec, n: f"prompt {n}",
        sent=0,
        keep=lambda _row: None,
    )


def answer_of(event_tokens: Sequence[int], times_ns: Sequence[int]) -> RequestRow:
    row = request_row(
        "one",
        sent_ns=0,
        ended_ns=times_ns[-1],
        outcome=Outcome.COMPLETED,
        token_times_ns=list(times_ns),
    )
    row.event_tokens, row.tokens_read = list(event_tokens), sum(event_tokens)
    return row


def times_of(events: int, tokens: int) -> range:
    return range(0, events * tokens * STEP_NS, tokens * STEP_NS)


@pytest.mark.parametrize("tokens", [1, 2, 16])
def test_a_step_is_the_time_of_a_token_however_many_an_event_brings(tokens: int) -> None:
    """Else a stream asks for too few tokens, and its own end looks like letting go."""
    row = answer_of([tokens] * 8, times_of(8, tokens))
    assert first_look(session_of((row, None))) == pytest.approx((STEP_S, tokens))


def test_the_servers_count_shows_how_many_tokens_an_event_brings() -> None:
    session = session_of((answer_of([1] * 16, times_of(16, 2)), (32, 16)))
    assert first_look(session) == pytest.approx((STEP_S, 2))
    assert session.client.event_scale.now.tokens == 2


def refusal(status: int) -> tuple[RequestRow, None]:
    row = request_row("one", sent_ns=0, ended_ns=1, outcome=Outcome.REJECTED)
    row.status_code, row.error = status, f"HTTP {status}"
    return row, None


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_that_refuses_a_request_is_asked_again(status: int) -> None:
    """Ten refusals in a row are enough."""
    answer, pauses = (answer_of([1] * 8, times_of(8, 1)), None), list[float]()
    found = first_look(session_of(*[refusal(status)] * 9, answer), pauses.append)
    assert found == pytest.approx((STEP_S, 1))
    assert pauses == [2.0] * 9
    with pytest.raises(BusyError, match=f"refused 10 short requests in a row: HTTP {status}"):
        first_look(session_of(*[refusal(status)] * 10), lambda _seconds: None)


class Left:
    """A stream that has left after so many events, each of `tokens` tokens."""

    def __init__(self, asked: int, events: int, tokens: int, step_ns: int) -> None:
        self.spec = SimpleNamespace(max_tokens=asked)
        self.token_times_ns = range(0, events * tokens * step_ns, tokens * step_ns)
        self.event_tokens = [tokens] * events
        self.tokens = events * tokens
        self.abandoned_ns = time.perf_counter_ns()

    def leave(self) -> None:
        pass

    def join(self, _timeout_s: float) -> None:
        pass


class Visiting(Visitors):
    """`left`: its only stream."""

    left: LiveStream

    def begin(self, count: int, tokens: int) -> list[LiveStream]:
        return [self.left]


def departed(step_s: float, *, step_ns: int, tokens: int) -> tuple[Visitors, Any, int]:
    """A visitor that took the step for `step_s` leaves after 8 events."""
    turns = StreamTurns(WINDOW, Interval(0.001, 0.002), most_tokens=1000)
    visitors = Visiting(session_of(), turns, random.Random(1), step_s=step_s, most=1)
    asked = turns.tokens(0.002, step_s) + 8 * tokens
    visitors.left = cast(LiveStream, Left(asked, 8, tokens, step_ns))
    return visitors, visitors.depart(1), asked - 8 * tokens


@pytest.mark.parametrize("tokens", [1, 2, 16])
def test_each_stream_shows_the_step_anew(tokens: int) -> None:
    visitors, found, left = departed(0.001, step_ns=1_200_000, tokens=tokens)
    assert visitors.step_s == pytest.approx(0.0012)
    assert found is not None
    assert found[1] == left


def test_a_leave_is_not_judged_whose_answer_ends_by_itself_in_the_window() -> None:
    """The server became twice as fast."""
    visitors, found, _ = departed(0.001, step_ns=500_000, tokens=1)
    assert found is None
    assert visitors.step_s == pytest.approx(0.0005)
