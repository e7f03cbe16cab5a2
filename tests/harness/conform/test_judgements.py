"""Conclusions of cases from figures; the cases on real servers are in tools/truth."""

import json
import random
from collections.abc import Mapping
from itertools import chain, count
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.conform.bench import Bench
from harness.conform.bystanders import compared
from harness.conform.cases.cancel_api import judge_answers
from harness.conform.cases.counts import judge_labels, rest, settled, surely_read
from harness.conform.cases.hops import judge_tax, tax
from harness.conform.cases.leaks import Health, Used, judge_ghosts, judge_growth, judge_health
from harness.conform.cases.neighbours import (
    PIECES,
    AnsweredBeforeError,
    judge_pace,
    p99_gap,
    tokens_of_a_turn,
    were_there,
)
from harness.conform.cases.next_request import SHORT, judge_lengths
from harness.conform.cases.queue import _compared, leave_queue
from harness.conform.cases.shapes import STALLED_BYTES, half_close, judge_pause
from harness.conform.finding import Finding
from harness.conform.routes import Reply
from harness.experiments.held import Count
from harness.experiments.outcome import CannotDecideError, RefusedError
from harness.records import Delivery, MetricSample, Outcome, RequestRow
from harness.store.conform_result import Failure
from harness.workload.target import MetricSource
from tests.made_up.rows import request_row


def page(name: str, labels: Mapping[str, str], value: float) -> list[MetricSample]:
    text = json.dumps(labels, sort_keys=True)
    return [MetricSample(t_ns=0, duration_ns=0, name=name, labels=text, value=value)]


def ended(name: str) -> MetricSource:
    return MetricSource(name=name, refresh="at the end", trust="exact")


def labels_moved(name: str, labels: Mapping[str, str], of: MetricSource | None) -> Finding:
    return judge_labels(page(name, labels, 3), page(name, labels, 23), of)


VLLM = "vllm:request_success_total"
DYNAMO = "dynamo_frontend_requests_total"
TRITON = "nv_inference_request_success_total"


@pytest.mark.parametrize(
    ("name", "labels", "failure"),
    [
        (VLLM, {"finished_reason": "abort", "model_name": "stop"}, None),
        (VLLM, {"finished_reason": "length"}, Failure.HARM),
        (VLLM, {"finished_reason": "stop"}, Failure.HARM),
        (DYNAMO, {"status": "error", "error_type": "cancelled"}, None),
        (DYNAMO, {"status": "success", "error_type": ""}, Failure.HARM),
        (TRITON, {"model": "generate", "version": "1"}, Failure.HARM),
    ],
)
def test_a_leave_is_no_good_end(
    name: str, labels: Mapping[str, str], failure: Failure | None
) -> None:
    assert labels_moved(name, labels, ended(name)).failure is failure


@pytest.mark.parametrize("status", ["500", "503", "5xx"])
def test_a_leave_is_no_server_error_in_any_counter(status: str) -> None:
    found = labels_moved("http_requests_total", {"status": status}, None)
    assert found.failure is Failure.HARM
    assert "by 20" in found.reason


def test_counters_that_do_not_say_how_requests_ended_decide_nothing() -> None:
    with pytest.raises(RefusedError):
        labels_moved("http_requests_total", {"status": "2xx"}, None)
    with pytest.raises(RefusedError):
        labels_moved("http_requests_total", {"status": "2xx"}, ended(VLLM))
    with pytest.raises(CannotDecideError):
        labels_moved("requests_total", {"model": "m"}, ended("requests_total"))


def test_a_thousand_leaves_bound_the_rate_of_ghosts() -> None:
    found = judge_ghosts(1000, Count(0, 8, "occupancy"))
    assert found.failure is None
    assert found.evidence["rate_upper95"] == pytest.approx(1 - 0.05 ** (1 / 1000), abs=1e-5)
    found = judge_ghosts(100, Count(2, 8, "occupancy"))
    assert found.failure is Failure.NEVER
    # P(at most 2 of 100) = 0.05 at 6.16 %, P(at least 2 of 100) = 0.05 at 0.357 %.
    assert found.evidence["rate_upper95"] == pytest.approx(0.0616, abs=1e-4)
    assert found.evidence["rate_lower95"] == pytest.approx(0.00357, abs=1e-5)
    with pytest.raises(CannotDecideError, match=r"0\.99 %"):
        judge_ghosts(300, Count(0, 8, "occupancy"))


@pytest.mark.parametrize(
    ("before", "after", "serves", "failure"),
    [
        (True, True, True, None),
        (True, False, True, Failure.NEVER),
        (False, False, True, None),  # as where it asks other servers
        (None, None, True, None),
        (True, True, False, Failure.NEVER),
        (None, None, False, Failure.NEVER),
    ],
)
def test_a_health_page_is_held_against_a_server_only_if_it_was_good_before(
    before: bool | None, after: bool | None, *, serves: bool, failure: Failure | None
) -> None:
    found = judge_health(Health(before, after), 40, serves=serves, limit_s=2.0)
    assert found.failure is failure, found.reason


def test_the_pace_is_judged_only_if_its_interval_lies_on_one_side() -> None:
    assert judge_pace([(0.010, 0.011), (0.010, 0.010), (0.011, 0.011)]).failure is None
    slow = judge_pace([(0.010, 0.021), (0.010, 0.020), (0.011, 0.022)])
    assert slow.failure is Failure.LATE
    assert slow.evidence["p99_ratio"] == pytest.approx((2.1 * 2 * 2) ** (1 / 3), abs=1e-3)
    with pytest.raises(CannotDecideError):
        judge_pace([(0.010, 0.010), (0.010, 0.030), (0.020, 0.010)])


@pytest.mark.parametrize("parted_ns", [0, 2_000])
@pytest.mark.parametrize(("flush", "tokens"), [(1, 48), (16, 48), (64, 192), (200, 600)])
def test_a_pace_is_that_of_pieces_however_large(flush: int, tokens: int, parted_ns: int) -> None:
    """All tokens of a piece come at once, or are read in two parts."""
    assert tokens_of_a_turn(flush) == tokens
    pieces = [
        [int(1e9 * number * 0.3) + (parted_ns if one > flush / 2 else 0) for one in range(flush)]
        for number in range(PIECES)
    ]
    times = list(chain(*pieces))
    assert p99_gap([row("a", token_times_ns=times)], 1e-4) == pytest.approx(0.3, rel=1e-4)
    with pytest.raises(CannotDecideError, match="one piece"):
        p99_gap([row("a", token_times_ns=pieces[0])] * 8, 0.0)


def test_where_tokens_come_singly_those_that_were_read_together_count_as_gaps() -> None:
    """Else the busiest reader's answers would show the longest gaps."""
    times = [20_000_000 * (number // 2) for number in range(200)]  # each second one is read late
    times[100:] = [one + 80_000_000 for one in times[100:]]  # one stall in 199 gaps
    assert p99_gap([row("a", token_times_ns=times)], 0.0) == pytest.approx(0.02)


def grown(*, leave: float, answer: float, handle: float = 0.0) -> list[Used]:
    """Four pairs of blocks of 10, with a little noise."""
    read = [Used(1e8, 40)]
    for number in range(4):
        used = read[-1]
        read.append(Used(used.bytes + 10 * leave + number, used.handles + 10 * handle))
        read.append(Used(read[-1].bytes + 10 * answer, read[-1].handles))
    return read


def test_a_leave_may_cost_as_much_memory_as_an_answer() -> None:
    assert judge_growth(grown(leave=50_000, answer=50_000), leaves=10).failure is None
    found = judge_growth(grown(leave=60_000, answer=50_000), leaves=10)
    assert found.failure is Failure.HARM
    assert "bytes" in found.reason
    assert "handles" not in found.reason
    found = judge_growth(grown(leave=0, answer=0, handle=1), leaves=10)
    assert found.evidence["handles_a_leave_low95"] == 1
    assert found.failure is Failure.HARM


LIVE = "req-1", Reply(200, {"id": "req-1", "status": "cancelled"})
DONE = "req-2", Reply(200, {"id": "req-2", "status": "ended"})
UNKNOWN = "req-3", Reply(404, {"error": {"message": "no such request"}})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, None),
        ({"live": ("req-1", Reply(404, {}))}, "(live) has status 404"),
        ({"twice": ("req-1", Reply(500, {}))}, "(twice) has status 500"),
        ({"twice": LIVE}, None),
        (
            {"finished": ("req-2", Reply(200, {"id": "req-2", "status": "cancelled"}))},
            "(finished) is answered like",
        ),
        (
            {"unknown": ("req-3", Reply(200, {"status": "cancelled", "id": "req-3"}))},
            "(unknown) is answered like",
        ),
    ],
)
def test_a_cancel_endpoint_tells_requests_apart(
    changed: Mapping[str, tuple[str, Reply]], said: str | None
) -> None:
    answers = {"live": LIVE, "twice": DONE, "finished": DONE, "unknown": UNKNOWN, **changed}
    found = judge_answers(answers)
    assert found.failure is (None if said is None else Failure.HARM)
    assert (said or "answered differently") in found.reason


def test_a_hop_may_cost_a_step_and_a_round_trip() -> None:
    direct = Finding(None, "", {"median_steps": 0.5})

    def through(steps: float | None, failure: Failure | None = None) -> Finding:
        late = Finding(failure, "no first token", {"median_steps": steps})
        return judge_tax(Delivery.STREAM, direct, late, most_steps=1.2)

    assert through(1.6).failure is None
    assert through(1.8).failure is Failure.LATE
    assert through(None, Failure.NEVER).failure is Failure.NEVER


def test_a_proxy_is_judged_by_what_its_server_passes() -> None:
    """Asked directly, the server stops streams, and unary requests never."""

    def bench(*, unary: Finding) -> Any:
        def find(spec: Any = None, **_: Any) -> Finding:
            return Finding(None, "", {"median_steps": 1.0}) if spec is None else unary

        return SimpleNamespace(
            recoveries=SimpleNamespace(find=find),
            long=lambda **_: "unary",
            end=lambda: None,
            ttft_s=0.1,
            step_s=0.1,
        )

    never = Finding(Failure.NEVER, "it never stops", {"median_steps": None})
    good = Finding(None, "", {"median_steps": 1.0})
    for direct, through, failure in (
        (never, never, None),
        (good, never, Failure.NEVER),
        (good, good, None),
    ):
        proxy, server = bench(unary=through), bench(unary=direct)
        proxy.past_the_proxy = lambda server=server: server
        found = tax(proxy)
        assert found.failure is failure
        said = "not judged: unary: asked directly, the server does not pass: it never stops"
        assert (said in found.reason) is (direct is never)


def row(answer: str, **more: Any) -> RequestRow:
    known = {"outcome": Outcome.COMPLETED, "finish_reason": "length", **more}
    return request_row("r", sent_ns=1, ended_ns=2, answer=answer, **known)


@pytest.mark.parametrize(
    ("controls", "acts", "failure"),
    [
        ("a", "a", None),
        ("aa", "bb", Failure.HARM),
        ("aa", "bc", Failure.HARM),
        ("ab", "bb", "without any leave"),
        ("aa", "ba", "not a second time"),
    ],
)
def test_another_text_must_come_twice_beside_a_control_that_repeats_itself(
    controls: str, acts: str, failure: Failure | str | None
) -> None:
    """A server whose texts depend on the batch is not blamed for it."""
    answers = iter(controls), iter(acts)

    def run() -> Finding:
        return compared(
            lambda: [row(f"once {next(answers[0])}")],
            lambda: [row(f"once {next(answers[1])}")],
            alone=lambda: [row(f"once {controls[0]}")],
            settle=lambda: None,
        )

    if failure is None or isinstance(failure, Failure):
        assert run().failure is failure
    else:
        with pytest.raises(CannotDecideError, match=failure):
            run()
    assert not [*answers[0], *answers[1]]


@pytest.mark.parametrize(
    ("act", "failure"),
    [
        ("a" * 15 + "b", None),
        ("a" * 9 + "b" * 7, "may change"),
        ("a" * 4 + "b" * 12, Failure.HARM),
    ],
)
@pytest.mark.parametrize("is_alone", [False, True])
def test_where_texts_vary_of_themselves_leaves_are_blamed_only_for_many_more(
    act: str, failure: Failure | str | None, *, is_alone: bool
) -> None:
    """One of 16 texts varies without a leave, from run to run or where its stream is alone."""
    same, other = "a" * 16, "a" * 15 + "b"
    controls = iter([same, same if is_alone else other])

    def run() -> Finding:
        return compared(
            lambda: list(map(row, next(controls))),
            lambda: list(map(row, act)),
            alone=lambda: list(map(row, other if is_alone else same)),
            settle=lambda: None,
        )

    if failure is None or isinstance(failure, Failure):
        assert run().failure is failure
    else:
        with pytest.raises(CannotDecideError, match=failure):
            run()


def test_a_server_that_draws_its_words_has_no_text_to_compare() -> None:
    """As a mocker does: not even the first words of two answers to one prompt are equal."""
    answers = iter(("once a", "then b", "now c"))
    with pytest.raises(RefusedError, match="no greedy text"):
        compared(
            lambda: [row(next(answers))],
            lambda: [row(next(answers))],
            alone=list,
            settle=lambda: None,
        )


@pytest.mark.parametrize("cut", [row("a", outcome=Outcome.FAILED), row("a", finish_reason=None)])
def test_a_stream_that_is_cut_is_red_at_once(cut: RequestRow) -> None:
    found = compared(lambda: [row("a")], lambda: [cut], alone=list, settle=lambda: None)
    assert found.failure is Failure.HARM


def test_a_pause_is_judged_only_if_the_server_saw_it() -> None:
    assert judge_pause(row("abc"), row("abc"), row("abc"), STALLED_BYTES) is None
    with pytest.raises(CannotDecideError, match="buffers"):
        judge_pause(row("abc"), row("abc"), row("abc"), STALLED_BYTES - 1)
    assert "1 came" in str(judge_pause(row("abc"), row("abc"), row("a"), 0))
    assert judge_pause(row("abc"), row("abc"), row("xyz"), STALLED_BYTES) is None
    some, others, fewer = (row(text, completion_tokens=len(text)) for text in ("abc", "xyz", "xy"))
    assert judge_pause(some, others, others, STALLED_BYTES) is None
    assert "2 came" in str(judge_pause(some, others, fewer, 0))
    with pytest.raises(CannotDecideError, match="in their lengths"):
        judge_pause(some, fewer, some, STALLED_BYTES)
    broken = row("a", outcome=Outcome.FAILED, error="the connection was closed")
    assert judge_pause(row("abc"), row("abc"), broken, 0) is None


@pytest.mark.parametrize(
    ("reason", "later", "failure"),
    [
        ("length", 32, None),
        (None, 32, None),  # many servers give no reason
        (None, 2, Failure.NEVER),
        ("abort", 2, Failure.NEVER),
    ],
)
def test_a_half_closed_client_with_all_its_tokens_is_answered_whole(
    reason: str | None, later: int, failure: Failure | None
) -> None:
    left = row("a", outcome=Outcome.ABANDONED, tokens_read=8, finish_reason=reason)
    left.tokens_after_leaving = later
    stream = SimpleNamespace(wait_tokens=lambda *_: True, leave=lambda _: None, join=lambda _: left)
    bench: Any = SimpleNamespace(
        start=lambda _: stream,
        short=lambda _: None,
        settle_s=1.0,
        step_s=0.01,
        known=SimpleNamespace(never_stops=None),
        recoveries=SimpleNamespace(find=lambda **_: Finding(Failure.NEVER, "never", {})),
    )
    assert half_close(bench).failure is failure


def test_a_page_is_read_until_it_is_final_or_the_settle_time_is_over() -> None:
    bench = cast(Bench, SimpleNamespace(settle_s=60.0, pause=lambda _s: None))
    moved = iter([0, 5, 20, 21])
    assert settled(bench, lambda: next(moved), lambda seen: seen >= 20) == 20
    bench.settle_s = 0.0
    assert settled(bench, lambda: 5, lambda seen: seen >= 20) == 5


@pytest.mark.parametrize(
    ("error", "tokens"),
    [(None, 64), (0.0, 64), (0.05, 60), (65 / 64, 0)],
    ids=["exact", "no error", "estimated", "one event"],
)
def test_only_tokens_that_were_surely_read_must_be_counted(
    error: float | None, tokens: int
) -> None:
    assert surely_read(row("a", tokens_read=64, tokens_error=error)) == tokens


@pytest.mark.parametrize("stale", [{"running": 1.0}, {"waiting": 3.0}, {"kv_usage": 0.02}])
def test_gauges_that_still_show_the_case_before_accuse_nobody(stale: dict[str, float]) -> None:
    left = row("a", outcome=Outcome.ABANDONED)
    stream: Any = SimpleNamespace(has_ended=False, tokens=1, join=lambda _: left)
    stream.leave = lambda: setattr(stream, "has_ended", True)
    started: list[Any] = []
    reads = count()

    def counters() -> dict[str, float]:
        running = float(sum(not one.has_ended for one in started))
        shown = {"running": running, "waiting": running, "kv_usage": running / 8}
        return shown | stale if next(reads) < 3 else shown

    def start(_: object) -> Any:
        started.append(stream)
        return stream

    bench: Any = SimpleNamespace(
        pages=SimpleNamespace(counters=counters),
        facts=SimpleNamespace(has_queue=False),
        known=SimpleNamespace(never_stops=None),
        crowded=1,
        rng=random.Random(0),
        settle_s=60.0,
        ttft_s=0.01,
        step_s=0.01,
        long=lambda: None,
        short=lambda _: None,
        whole=lambda _: row("a"),
        pause=lambda _: None,
        start=start,
    )
    found = rest(bench)
    assert found.failure is None, found.reason


@pytest.mark.parametrize(("took_s", "cached"), [(0.9, False), (0.3, False), (0.01, True)])
def test_a_cache_of_answers_is_seen_where_each_answer_comes_at_once(
    took_s: float, *, cached: bool
) -> None:
    rows = [
        request_row("greedy", sent_ns=0, ended_ns=int(1e9 * one), outcome=Outcome.COMPLETED)
        for one in (0.01, took_s)
    ]
    assert were_there(rows, 0.5) is cached


@pytest.mark.parametrize(("took_s", "why"), [(0.01, AnsweredBeforeError), (0.9, CannotDecideError)])
def test_a_request_that_need_not_queue_leaves_and_a_cache_of_answers_is_the_reason(
    took_s: float, why: type[CannotDecideError]
) -> None:
    has_left = []
    row = request_row("greedy", sent_ns=0, ended_ns=int(1e9 * took_s), outcome=Outcome.COMPLETED)
    stream: Any = SimpleNamespace(has_ended=True, row=row, join=lambda _s: row)
    queued: Any = SimpleNamespace(row=None, tokens=3, leave=lambda: has_left.append(True))
    with pytest.raises(CannotDecideError) as raised:
        leave_queue(queued, [stream], usual_s=1.0)
    assert raised.type is why
    assert has_left


def answers(*lengths: int, reason: str = "length") -> list[RequestRow]:
    return [
        request_row(
            "a",
            sent_ns=0,
            ended_ns=1,
            outcome=Outcome.COMPLETED,
            completion_tokens=one,
            finish_reason=reason,
        )
        for one in lengths
    ]


@pytest.mark.parametrize(
    ("control", "rows", "failure"),
    [
        (answers(8, 8), answers(8, 8, 3), Failure.HARM),
        (answers(8, 8), answers(8, 8) + answers(3, reason="stop"), None),
        (
            answers(8) + answers(2, reason="stop"),
            answers(8) + answers(*[3] * 8, reason="stop"),
            None,
        ),
        (answers(*[8] * 8), answers(*[3] * 24, reason="stop"), Failure.HARM),
    ],
    ids=["cut short", "one ends by itself", "as in the control", "all end, in the control none"],
)
def test_an_answer_that_ends_by_itself_is_cut_short_only_if_most_are(
    control: list[RequestRow], rows: list[RequestRow], failure: Failure | None
) -> None:
    assert judge_lengths(control, rows).failure is failure


def test_answers_that_all_end_by_themselves_have_no_length_to_compare() -> None:
    ends = answers(*[SHORT] * 4, reason="stop")
    with pytest.raises(CannotDecideError, match="`stop`"):
        judge_lengths(ends, ends)


@pytest.mark.parametrize(
    ("alone", "watched", "differs"),
    [
        (1.0, 3.0, False),
        (1.0, 6.0, True),
        (21.1, 16.4, False),  # llama.cpp, which computes for those who have left its queue
        (16.3, 25.8, False),
        (20.0, 60.0, True),
        (60.0, 20.0, True),
    ],
)
def test_watching_changes_what_it_changes_by_more_than_it_varies(
    alone: float, watched: float, *, differs: bool
) -> None:
    both = (Finding(Failure.LATE, "late", {"median_steps": one}) for one in (alone, watched))
    assert (_compared("queue", *both) is not None) is differs
