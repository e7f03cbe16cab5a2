"""The server's own counters, if it has any, and what they say about clients that left.

Counters are read on the idle server, before and after: while nothing runs, none of them is late. A
counter that a target's description does not believe (`trust = "stuck"`) is judged like any other.
"""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, Literal, TypeVar

from harness.client.live_stream import LiveStream
from harness.conform.bench import Bench
from harness.conform.bystanders import MOST_AT_ONCE, leave_after, leave_each, leaver, read_whole
from harness.conform.case import case, reports
from harness.conform.finding import Evidence, Finding, found
from harness.conform.routes import Routes
from harness.experiments.outcome import CannotDecideError, RefusedError
from harness.experiments.patience import QUEUED_STEPS
from harness.records import GAUGES, Delivery, MetricSample, RequestRow
from harness.store.conform_result import Failure, Level
from harness.workload.target import MetricSource

LEAVES: Final = 20
ABORTS: Final = ("aborted", "frontend_cancelled")
POLL_S: Final = 0.1
LONGEST_WAIT_S: Final = 12.0  # for a gauge to show a load
LOAD_TOKENS: Final = 32  # of an answer of that load, at least
QUEUE_WAIT_S: Final = 2.0  # for the gauge of the queue, once all slots are full
Values = Mapping[str, float]
T = TypeVar("T")

# Labels that say how a request ended, and their values.
_OF_ENDS: Final = re.compile("reason|status|outcome|result|error")
_LEFT: Final = re.compile("abort|cancel|disconnect|499", re.IGNORECASE)
_WELL: Final = re.compile("stop|length|success|complete", re.IGNORECASE)
_SERVER_ERROR: Final = re.compile(r"5(\d\d|xx)", re.IGNORECASE)


@case(
    "count/aborts",
    Level.MUST,
    "A counter of aborted requests counts each client that left, once.",
    wire="20 streams are closed after 8 tokens; the metrics page is read before and after.",
    passes="the counter moves by 20",
    methods="C",
    remedy="count each client that left once",
    why="A counter that stands still, or counts double, hides what cancellation costs.",
    needs=("metrics",),
    quick=True,
    caught=reports("vllm-project/vllm#31503 sgl-project/sglang#34132 sgl-project/sglang#37605"),
)
def aborts(bench: Bench) -> Finding:
    moved, rows = _moved_by(bench, ABORTS, lambda: leave_after(bench, LEAVES, 8))
    wrong = [f"{role} moved by {value:g}" for role, value in moved.items() if value != len(rows)]
    return found(
        f"each of {len(rows)} clients that left was counted once",
        f"{wrong[0]} when {len(rows)} clients left" if wrong else None,
        {f"{role}_moved": value for role, value in moved.items()},
        Failure.HARM if all(moved.values()) else Failure.NEVER,
    )


@case(
    "count/tokens",
    Level.MUST,
    "Tokens that were generated for a client that left are counted.",
    wire="20 streams are closed after 64 tokens; the metrics page is read before and after.",
    passes="the counter of generated tokens moves by all tokens that the clients surely read, or "
    "more",
    methods="C",
    remedy="count tokens when they are generated, also for clients that left",
    why="Otherwise waste is invisible: the server was busy, and its counter says that it was not.",
    needs=("metrics",),
    caught=reports("vllm-project/vllm#55634 waybarrios/vllm-mlx#456"),
)
def tokens(bench: Bench) -> Finding:
    moved, read = _moved_by(
        bench,
        ["generated_tokens"],
        lambda: sum(map(surely_read, leave_after(bench, LEAVES, 64))),
        is_final=lambda moved, read: moved["generated_tokens"] >= read,
    )
    counted = moved["generated_tokens"]
    if read <= 0:
        raise CannotDecideError("too few tokens were surely read: many come in one event")
    return found(
        f"{counted:g} tokens were counted, and {read} were surely read",
        f"{counted:g} tokens were counted, but {read} were surely read" if counted < read else None,
        {"tokens_read": read, "generated_tokens_moved": counted},
        Failure.HARM if counted else Failure.NEVER,
    )


def surely_read(row: RequestRow) -> int:
    """The fewest tokens that an estimate allows, where events had to be estimated."""
    return max(0, int(row.tokens_read * (1 - (row.tokens_error or 0.0))))


@case(
    "count/label",
    Level.MUST,
    "A client that left is neither a success nor a failure of the server.",
    wire="20 requests are left, half of them streams after 8 tokens, half unary; the metrics page "
    "is read before and after.",
    passes="no series of a good end (stop, length, success) or of a server error (5xx) moves",
    methods="C",
    remedy="give requests whose clients left a label of their own",
    why="Success rates and alarms rest on these labels.",
    needs=("metrics",),
    caught=reports("sgl-project/sglang#33507 raullenchai/Rapid-MLX#2553 JustVugg/colibri#1074"),
)
def label(bench: Bench) -> Finding:
    def judged() -> Finding:
        before = bench.pages.samples()
        leave_after(bench, LEAVES // 2, 8)
        leave_after(bench, LEAVES // 2, 8, delivery=Delivery.UNARY)
        bench.pause(bench.settle_s)
        ended = bench.session.plan.target.metrics.get("ended")
        return judge_labels(before, bench.pages.samples(), ended)

    finding = judged()
    if finding.failure is not None and judged().failure is None:
        raise CannotDecideError(f"{finding.reason}, but not a second time")
    return finding


def judge_labels(
    before: Sequence[MetricSample], after: Sequence[MetricSample], ended: MetricSource | None
) -> Finding:
    """`ended`: the counter of ended requests. Raises RefusedError without such a counter, and
    CannotDecideError if its labels do not say how a request ended."""
    earlier = {(one.name, one.labels): one.value for one in before}
    wrong: Evidence = {}
    is_unknown = False
    for one in after:
        change = one.value - earlier.get((one.name, one.labels), 0.0)
        labels = json.loads(one.labels)
        is_ending = ended is not None and one.name == ended.name
        way = how_ended(one.name, labels) if is_ending else None
        if change > 0 and (way == "well" or is_server_error(labels)):
            wrong[f"{one.name}{one.labels}"] = change
        is_unknown |= is_ending and change > 0 and way is None
    if not wrong and (ended is None or all(one.name != ended.name for one in after)):
        raise RefusedError("no counter says how requests ended")
    if not wrong and is_unknown:
        raise CannotDecideError("the labels of ended requests do not say how they ended")
    shown = ", ".join(f"{series} moved by {change:g}" for series, change in wrong.items())
    good = "no leave was counted as a good end or as a server error"
    return found(good, shown or None, wrong, Failure.HARM)


def how_ended(name: str, labels: Mapping[str, str]) -> Literal["left", "well"] | None:
    values = [value for key, value in labels.items() if _OF_ENDS.search(key)]
    if any(map(_LEFT.search, values)):
        return "left"
    return "well" if any(map(_WELL.search, values or [name])) else None


def is_server_error(labels: Mapping[str, str]) -> bool:
    codes = [value for key, value in labels.items() if "status" in key or "code" in key]
    return any(map(_SERVER_ERROR.fullmatch, codes))


@case(
    "done/read-to-eof",
    Level.MUST,
    "A client that closes its connection after `[DONE]` did not cancel anything.",
    wire="20 streams are read to the end of the connection, and 20 more are closed at `[DONE]`; "
    "the metrics page is read before and after.",
    passes="no counter of aborted requests moves",
    methods="C",
    remedy="count no abort after the last token of an answer",
    why="Most clients close at `[DONE]`: counted as cancels, they drown the real ones.",
    needs=("metrics", "http"),
    caught=reports("vllm-project/aibrix#2224 envoyproxy/ai-gateway#2563"),
)
def read_to_eof(bench: Bench) -> Finding:
    routes = Routes(bench.session.plan, bench.known)

    def close_at_done() -> None:
        prompts = [f"{number}: the letter begins" for number in range(LEAVES)]
        acts = [partial(routes.close_at_done, prompt, max_tokens=8) for prompt in prompts]
        some = bench.crowd(MOST_AT_ONCE)
        for first in range(0, LEAVES, some):
            bench.together(acts[first : first + some])

    def both() -> None:
        read_whole(bench, LEAVES, 8)
        close_at_done()

    # Some servers show the counter only when it has counted.
    _moved_by(
        bench,
        ABORTS,
        lambda: leave_after(bench, 1, 8),
        is_final=lambda moved, _: all(moved.values()),
    )
    at_eof, _ = _moved_by(bench, ABORTS, both)
    at_done = at_eof
    if most := max(at_eof.values()):  # which of the two moved it?
        at_eof, _ = _moved_by(bench, ABORTS, lambda: read_whole(bench, LEAVES, 8))
        at_done, _ = _moved_by(bench, ABORTS, close_at_done)
        if most > 1 and not any([*at_eof.values(), *at_done.values()]):  # 1: the leave above, late
            raise CannotDecideError("whole answers were counted as aborted, but not a second time")
    evidence: Evidence = {f"{role}_moved_at_eof": value for role, value in at_eof.items()}
    evidence |= {f"{role}_moved_at_done": value for role, value in at_done.items()}
    wrong = [
        f"{role} moved by {value:g} for {LEAVES} answers that were closed {where}"
        for where, moved in (("after the end", at_eof), ("at [DONE]", at_done))
        for role, value in moved.items()
        if value
    ]
    return found(
        f"none of {2 * LEAVES} whole answers was counted as aborted",
        f"whole answers are counted as aborted: {wrong[0]}" if wrong else None,
        evidence,
        Failure.HARM,
    )


@case(
    "gauge/rest",
    Level.SHOULD,
    "Gauges of an idle server read idle after its clients have left.",
    wire="Streams run in all slots, and as many requests queue, until gauges show it; then the "
    "queued ones are closed, and then the others. The metrics page is read before, meanwhile, and "
    "after the settle time.",
    passes="no request waits on the idle server at the beginning; each gauge that moved shows "
    "no more load than before",
    methods="C",
    remedy="lower the gauges on each path on which a request ends",
    why="Routers and autoscalers steer by these gauges.",
    needs=("metrics",),
    caught=reports("vllm-project/production-stack#1072 llm-d/llm-d-router#1739"),
)
def rest(bench: Bench) -> Finding:
    before = settled(bench, bench.pages.counters, _is_idle)  # gauges may be late
    gauges = [role for role in GAUGES if role in before]
    if not gauges:
        raise RefusedError("the server shows no gauge")
    if (stuck := _waits_on_idle(bench, before)) is not None:
        return stuck
    moved = _moved_by_a_queue(bench, before, gauges)
    if not moved:
        raise CannotDecideError(
            f"no gauge ({', '.join(gauges)}) moved while {bench.crowded} streams ran"
        )
    after = settled(bench, bench.pages.counters, lambda now: not _worse(moved, before, now))
    wrong = [
        f"{role} was {before[role]:g} and reads {after.get(role, 0):g} at rest"
        for role in _worse(moved, before, after)
    ]
    evidence: Evidence = {f"{role}_before": before[role] for role in moved}
    evidence |= {f"{role}_after": after.get(role) for role in moved}
    good = f"as before: {', '.join(moved)}"
    if unmoved := [role for role in gauges if role not in moved]:
        good += f"; the load did not move {', '.join(unmoved)}"
    return found(good, "; ".join(wrong) or None, evidence, Failure.NEVER)


def _is_idle(now: Values) -> bool:
    return not now.get("running") and not now.get("waiting")


def _worse(roles: Sequence[str], before: Values, now: Values) -> list[str]:
    """The gauges that show more load than before, or nothing that can be. Late gauges may have
    shown the case before this one."""

    def is_worse(role: str) -> bool:
        if role not in now or now[role] < 0:
            return True
        rise = now[role] - before[role]
        return rise < 0 if role == "free_blocks" else rise > 0

    return [role for role in roles if is_worse(role)]


def _waits_on_idle(bench: Bench, before: Values) -> Finding | None:
    """A gauge of waiting requests that is above 0 though a short request is served at once."""
    waiting = before.get("waiting", 0.0)
    if waiting <= 0 or before.get("running", 0.0) > 0:
        return None
    row = bench.whole(bench.short(1))
    after = bench.pages.counters().get("waiting", 0.0)
    first_s = ((row.first_token_ns or row.ended_ns) - row.sent_ns) / 1e9
    if after < waiting or first_s > bench.ttft_s + QUEUED_STEPS * bench.step_s:
        return None  # another client's request waits
    said = f"the gauge of waiting requests reads {after:g}, but a short request is served at once"
    return Finding(Failure.NEVER, said, {"waiting_before": waiting})


def _moved_by_a_queue(bench: Bench, before: Values, gauges: Sequence[str]) -> list[str]:
    """Which gauges full slots and a queue have moved; at the end all clients have left, first the
    clients in the queue."""
    streams: list[LiveStream] = []
    moved = _load_until_shown(bench, before, gauges, streams)
    if queued := [one for one in streams if not one.tokens and not one.has_ended]:
        leave_each(bench, queued, within_s=bench.step_s)
    bench.pause(bench.ttft_s + bench.step_s)
    if running := [one for one in streams if not one.has_ended]:
        leave_each(bench, running)
    return moved


def _load_until_shown(
    bench: Bench, before: Values, gauges: Sequence[str], streams: list[LiveStream]
) -> list[str]:
    """Starts `streams`; returns the gauges that moved. Some gauges move only every few seconds:
    answers that end by then are replaced."""
    wanted = 2 * bench.slots if bench.facts.has_queue else bench.crowded
    asked = leaver(bench, LOAD_TOKENS)
    until_s = time.monotonic() + LONGEST_WAIT_S
    moved: list[str] = []
    while time.monotonic() < until_s:
        still_open = sum(not stream.has_ended for stream in streams)
        streams += [bench.start(asked) for _ in range(wanted - still_open)]
        bench.pause(POLL_S)
        busy = bench.pages.counters()
        moved = [role for role in gauges if busy.get(role) != before[role]]
        if moved and ("waiting" in moved or "waiting" not in gauges):
            break
        begun = sum(one.tokens > 0 or one.has_ended for one in streams)
        if moved and begun >= bench.crowded:  # all slots have been full
            until_s = min(until_s, time.monotonic() + QUEUE_WAIT_S)
    return moved


def _moved_by(
    bench: Bench,
    roles: Sequence[str],
    act: Callable[[], T],
    is_final: Callable[[Values, T], bool] = lambda _moved, _done: False,
) -> tuple[dict[str, float], T]:
    """How far counters have moved when the settle time is over, or once that is final; and what
    `act` has returned."""
    before = bench.pages.counters()
    done = act()

    def moved() -> dict[str, float]:
        now = bench.pages.counters()
        return {role: now[role] - before.get(role, 0.0) for role in roles if role in now}

    found = settled(bench, moved, lambda found: bool(found) and is_final(found, done))
    if not found:
        raise RefusedError(f"the server shows no counter `{roles[0]}`")
    return found, done


def settled(bench: Bench, read: Callable[[], T], is_final: Callable[[T], bool]) -> T:
    """What is read when it is final, or when the settle time is over."""
    until_s = time.monotonic() + bench.settle_s
    while not is_final(seen := read()) and time.monotonic() < until_s:
        bench.pause(min(POLL_S, max(0.0, until_s - time.monotonic())))
    return seen
