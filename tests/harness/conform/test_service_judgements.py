"""Conclusions from figures: of repeated requests, silences, documents, background answers and
deadlines. The cases on real servers are in tools/truth and tests/e2e."""

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.conform.cases.background import wrong_in
from harness.conform.cases.cancel_api import judge_labels_of_cancelled
from harness.conform.cases.leaks import Used, judge_growth
from harness.conform.cases.limits import Deadlines, judge_deadlines, judge_refusals
from harness.conform.cases.pooling import judge
from harness.conform.cases.prefill import Prefill, harm, judge_answers
from harness.conform.cases.resume import Resumable
from harness.conform.cases.same_request import judge_texts, left_first, uncached
from harness.conform.cases.silences import Silence, first_token_s, leave_in_silence
from harness.conform.finding import Finding
from harness.conform.judgement import Bound
from harness.conform.routes import Reply
from harness.experiments.outcome import CannotDecideError
from harness.experiments.patience import Patience
from harness.records import Outcome, RequestRow
from harness.store.conform_result import Failure
from harness.workload.abandon import RequestSpec
from tests.made_up.rows import request_row

S = 1_000_000_000
PATIENCE = Patience(2.0, 200, 2.0, 3.0)


def test_another_text_must_come_for_two_prompts() -> None:
    assert judge_texts([], 2).failure is None
    found = judge_texts([("abc", "abd"), ("x", "y")], 3)
    assert (found.failure, found.evidence["after_the_leave"]) == (Failure.HARM, "abd")
    with pytest.raises(CannotDecideError, match="only once"):
        judge_texts([("abc", "abd")], 4)


def one(outcome: Outcome, **more: Any) -> RequestRow:
    return request_row("r", sent_ns=0, ended_ns=S, outcome=outcome, **more)


ANSWERED, BROKEN = one(Outcome.COMPLETED), one(Outcome.FAILED, status_code=200)
FULL = one(Outcome.REJECTED, status_code=429)


def queueing(*rows: RequestRow, patience_s: float = 60.0) -> Any:
    """A bench on a server with a queue, whose next requests end like this."""
    coming = iter(rows)
    return SimpleNamespace(
        facts=SimpleNamespace(refuses=False),
        patience=SimpleNamespace(filler_s=patience_s),
        step_s=0.01,
        pause=lambda _: None,
        start=lambda *_: SimpleNamespace(),
        ask=lambda *_: next(coming),
        rows=lambda: rows,
    )


@pytest.mark.parametrize(
    ("rows", "patience_s", "got"),
    [([ANSWERED], 60.0, ANSWERED), ([FULL, FULL, ANSWERED], 60.0, ANSWERED), ([FULL], -1.0, FULL)],
)
def test_a_request_is_asked_again_while_a_full_server_refuses_it(
    rows: list[RequestRow], patience_s: float, got: RequestRow
) -> None:
    """Its place may come back a moment after the leave, also on a server with a queue."""
    act = left_first(queueing(*rows, patience_s=patience_s), lambda _: None)
    assert act(cast(Any, None), "a prompt")[0] is got


@pytest.mark.parametrize(
    ("rows", "failure"),
    [
        ([ANSWERED, ANSWERED], None),
        ([ANSWERED, None], Failure.NEVER),
        ([FULL, BROKEN], Failure.HARM),
    ],
)
def test_requests_after_a_leave_are_whole(
    rows: list[RequestRow | None], failure: Failure | None
) -> None:
    assert judge_answers(rows, "a request", Prefill(100, 0.5, 0.1)).failure is failure


def test_a_refusal_is_no_harm() -> None:
    with pytest.raises(CannotDecideError, match="was refused"):
        judge_answers([ANSWERED, FULL], "a request", Prefill(100, 0.5, 0.1))
    good = Finding(None, "in time", {})
    assert harm(queueing(ANSWERED, FULL), good) is good
    assert harm(queueing(ANSWERED, BROKEN), good).failure is Failure.HARM


def test_a_bypass_of_the_cache_has_a_new_name_each_time() -> None:
    assert uncached({}) is None
    salts = [uncached({"cache_salt": "{random}", "on": 1}) for _ in range(2)]
    assert salts[0] != salts[1]
    assert all(one is not None and one["on"] == 1 for one in salts)


@pytest.mark.parametrize(
    ("tokens", "status", "refused"),
    [
        (0, 404, None),  # a server need not have read this request
        (1, 404, "a stop was answered with status 404"),
        (0, 500, "a stop was answered with status 500"),
        (1, 204, None),
    ],
)
def test_a_stop_of_an_answer_that_showed_nothing_may_be_unknown(
    tokens: int, status: int, refused: str | None
) -> None:
    resume = SimpleNamespace(header="name", stop_path="/{id}", stop_method="DELETE")
    plan = SimpleNamespace(target=SimpleNamespace(resume=resume))
    bench = SimpleNamespace(
        session=SimpleNamespace(plan=plan), settle_s=0, step_s=0.01, pause=lambda _: None
    )
    routes = SimpleNamespace(send=lambda *_: Reply(status, {}))
    resumable = Resumable(cast(Any, bench), cast(Any, routes))
    spec = SimpleNamespace(headers={"name": "conversation"})
    left = SimpleNamespace(tokens=tokens, spec=spec, leave=lambda: None)
    resumable.leave_and_stop(cast(Any, left))
    assert resumable.refused_stop() == refused


def answer(times_s: Sequence[float], *, tokens: int, **more: Any) -> RequestRow:
    times = [int(time_s * S) for time_s in times_s]
    known = {"outcome": Outcome.COMPLETED, "token_times_ns": times, "completion_tokens": tokens}
    return request_row("r", sent_ns=0, ended_ns=times[-1] if times else S, **{**known, **more})


@pytest.mark.parametrize(
    ("times_s", "tokens", "silence"),
    [
        ([0.1, 0.2, 0.9, 1.0], 4, Silence(2, 0.7)),
        ([0.8, 0.9, 1.0], 3, Silence(0, 0.8)),
        ([0.1, 0.3, 0.9], 12, Silence(8, 0.6)),  # four tokens a piece
    ],
)
def test_the_longest_silence_is_counted_in_tokens(
    times_s: list[float], tokens: int, silence: Silence
) -> None:
    assert Silence.of(answer(times_s, tokens=tokens)) == pytest.approx(silence)


def test_an_answer_without_tokens_has_no_silence() -> None:
    with pytest.raises(CannotDecideError):
        Silence.of(answer([], tokens=0))


@pytest.mark.parametrize(("tokens", "steps"), [(12, 4.0), (0, 54.0)])
def test_a_prompt_may_be_in_flight_in_a_silence_before_the_first_token(
    tokens: int, steps: float
) -> None:
    bounds: list[Bound] = []

    def find(_: object, *, bound: Bound, **_more: object) -> Finding:
        bounds.append(bound)
        return Finding(None, "in time", {})

    bench = SimpleNamespace(step_s=0.02, patience=PATIENCE, recoveries=SimpleNamespace(find=find))
    spec = RequestSpec(user=0, max_tokens=100, prompt_tokens=24)
    leave_in_silence(cast(Any, bench), spec, Silence(tokens, 1.2), prompt_s=1.0)
    assert bounds == [Bound(steps, 4.0)]


@pytest.mark.parametrize(("first_ns", "took_s"), [(S // 2, 0.5), (None, 1.0)])
def test_a_prompt_takes_until_the_first_token_or_the_end(
    first_ns: int | None, took_s: float
) -> None:
    """Of an answer without more tokens, for which a server could wait before it writes."""
    asked: list[RequestSpec] = []

    def ask(spec: RequestSpec) -> RequestRow:
        asked.append(spec)
        return one(Outcome.COMPLETED, first_token_ns=first_ns)

    spec = RequestSpec(user=0, max_tokens=64, prompt_tokens=24)
    assert first_token_s(cast(Any, SimpleNamespace(ask=ask)), spec) == took_s
    assert asked[0].max_tokens < 4


def test_documents_of_a_client_that_left_may_not_hold_up_the_next_one() -> None:
    stays = [1.0, 1.1, 0.9]
    assert judge("rerank", 64, 0.05, stays=stays, left=[0.1, 0.1, 0.9]).failure is None
    assert judge("rerank", 64, 0.05, stays=stays, left=[0.8, 0.1, 0.9]).failure is Failure.NEVER
    with pytest.raises(CannotDecideError, match="waits only"):
        judge("rerank", 64, 0.05, stays=[0.06, 0.05, 0.07], left=[0.06, 0.05, 0.07])


def refused(message: str, status: int = 400) -> Reply:
    return Reply(status, {"error": {"message": message}})


ENDED, NOT_BACKGROUND = Reply(200, {"status": "completed"}), refused("not a background answer")


@pytest.mark.parametrize(
    ("ended", "foreground", "now", "said"),
    [
        (ENDED, NOT_BACKGROUND, "completed", None),
        (refused("it has ended"), NOT_BACKGROUND, "completed", None),
        (NOT_BACKGROUND, NOT_BACKGROUND, "completed", "refused like one without `background`"),
        (ENDED, ENDED, "completed", "without `background` has status 200"),
        (ENDED, NOT_BACKGROUND, "cancelled", "that was completed made it cancelled"),
        (refused("oh", 500), NOT_BACKGROUND, "completed", "has status 500"),
        (ENDED, None, "completed", None),
    ],
)
def test_cancels_of_ended_and_foreground_answers_are_told_apart(
    ended: Reply, foreground: Reply | None, now: str, said: str | None
) -> None:
    replies = {"ended": ended} | ({} if foreground is None else {"foreground": foreground})
    wrong = wrong_in(replies, was="completed", now=now)
    assert (wrong is None) if said is None else re.search(re.escape(said), str(wrong))


def test_a_cancelled_answer_that_looks_whole_is_harm() -> None:
    assert judge_labels_of_cancelled({"stream": "abort", "unary": None}).failure is None
    found = judge_labels_of_cancelled({"stream": "abort", "unary": "stop"})
    assert (found.failure, found.reason.split(": ")[1]) == (Failure.HARM, "unary is stop")


def test_what_is_refused_may_not_slow_the_next_prompt() -> None:
    alone, soon = [0.4, 0.5, 0.4], [0.01]
    assert judge_refusals(alone, [0.5, 0.4, 0.4], soon, step_s=0.02).failure is None
    later = [0.9, 0.7, 0.8]
    found = judge_refusals(2 * alone, 2 * later, soon, step_s=0.02)
    assert (found.failure, found.evidence["after_refusal_ms"]) == (Failure.LATE, 800)
    for varying in ([0.4, 1.2, 0.4], [0.4, 0.9, 0.5]):
        with pytest.raises(CannotDecideError, match="it varies: by itself from 400 to"):
            judge_refusals(2 * varying, 2 * [0.9, 0.4, 0.8], soon, step_s=0.02)
    with pytest.raises(CannotDecideError, match="too short"):
        judge_refusals([0.04], [0.09], soon, step_s=0.02)


def ended(deadline_s: float, took_s: float, tokens: int, reason: str | None = "abort") -> Any:
    outcome = Outcome.COMPLETED if tokens == 2 else Outcome.FAILED
    row = request_row(
        "r",
        sent_ns=S,
        ended_ns=S + int(took_s * S),
        outcome=outcome,
        completion_tokens=tokens,
        finish_reason="length" if tokens == 2 else reason,
    )
    return deadline_s, row


WHOLE, EXPIRED = ended(1.0, 0.9, 2), ended(0.5, 0.52, 0)


@pytest.mark.parametrize(
    ("rows", "held", "failure"),
    [
        ([WHOLE, EXPIRED], 0, None),
        ([WHOLE, EXPIRED], 1, Failure.NEVER),
        ([WHOLE, EXPIRED, ended(0.5, 0.4, 0)], 0, Failure.HARM),  # too early
        ([WHOLE, EXPIRED, ended(0.5, 1.8, 0)], 0, Failure.NEVER),
        ([WHOLE, EXPIRED, ended(0.5, 1.8, 2)], 0, Failure.NEVER),
        ([WHOLE, EXPIRED, ended(0.5, 0.51, 1, "length")], 0, Failure.HARM),
        ([WHOLE, EXPIRED, ended(0.5, 0.51, 1, None)], 0, None),
    ],
)
def test_deadlines_are_kept_from_both_sides(
    rows: list[tuple[float, RequestRow]], held: int, failure: Failure | None
) -> None:
    found = judge_deadlines(Deadlines.of(rows, early_s=0.04, settle_s=1.0), held)
    assert found.failure is failure, found.reason


@pytest.mark.parametrize("one", [WHOLE, EXPIRED])
def test_deadlines_on_one_side_decide_nothing(one: tuple[float, RequestRow]) -> None:
    with pytest.raises(CannotDecideError, match="one side"):
        judge_deadlines(Deadlines.of([one, one], early_s=0.04, settle_s=1.0), 0)


def test_what_each_answer_keeps_is_said_though_a_leave_keeps_no_more() -> None:
    read = [Used(1e8 + number * 10 * 50_000 + number % 2, 40) for number in range(9)]
    found = judge_growth(read, leaves=10)
    assert found.failure is None
    assert "each answer, left or not, keeps at least 5e+04 bytes" in found.reason
