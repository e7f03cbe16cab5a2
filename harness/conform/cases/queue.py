"""Clients leave the queue: what is computed for them, what it does to others, and whether watching
the server changes that."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from harness.client.live_stream import LiveStream
from harness.conform.bench import Bench
from harness.conform.bystanders import (
    UNLIKE_TEXTS,
    UnlikeTextsError,
    compared,
    leaver,
    one_by_one,
    rows_of,
    start_greedy,
)
from harness.conform.case import case
from harness.conform.cases.neighbours import (
    AnsweredBeforeError,
    check_computed,
    end_of,
    prompts,
)
from harness.conform.cases.stream import unary_leave
from harness.conform.finding import Finding
from harness.experiments.full_slots import SlotTry
from harness.experiments.idle_server import MOST_WAITING
from harness.experiments.outcome import CannotDecideError, RefusedError
from harness.experiments.patience import READY_S
from harness.experiments.streams import is_refused
from harness.records import Outcome, Protocol, RequestRow, Role, Way
from harness.store.conform_result import Failure, Level

ENDER_S: Final = 0.4  # the least for a stream whose end frees a slot: others leave meanwhile
LEAVE_STEPS: Final = 8  # in which others leave the queue
QUEUED_TOKENS: Final = 32  # of the answers that nobody is to compute
GREEDY_TOKENS: Final = 60
QUICK_GREEDY_TOKENS: Final = 40
LEAVERS: Final = 3
# Watched and unwatched tries may differ by this. Where a server is late in both, its lateness
# itself varies.
MOST_DIFFERENCE_STEPS: Final = 4.0
MOST_DIFFERENCE_TIMES: Final = 2.0
WATCHED_TRIES: Final = 4  # of each of the four runs
MASS: Final = 8  # times the slots: the requests that queue
MOST_QUEUED: Final = 512
MOST_LEAVING: Final = MOST_WAITING // 2  # half of the requests that leave the queue
MOST_GREEDY: Final = 16


@case(
    "queue/leave",
    Level.MUST,
    "Nothing is computed for clients that left the queue.",
    wire="All slots are full; twice as many requests queue, or as many as may, and a short one "
    "behind them. The "
    "requests before it close their connections; then a running stream ends.",
    passes="the short request's first token comes at most 4 steps after that end at the median of "
    "the tries, and at most 12 in each",
    methods="P",
    remedy="take a request out of the queue when its connection closes",
    why="Under overload most users leave while they queue. A server that computes their prompts "
    "first stays overloaded when they are gone.",
    quick=True,
    caught=(
        "https://github.com/ggml-org/llama.cpp/issues/13262",
        "https://github.com/ray-project/ray/pull/21438",
    ),
)
def queue_leave(bench: Bench) -> Finding:
    bench.check_queues()
    if not bench.lets_wait(2):
        raise RefusedError("the server lets too few requests wait: none can wait behind another")
    return bench.recoveries.by_turns(lambda _number: [_leave_queue(bench)], is_alone=True)


def _leave_queue(bench: Bench) -> SlotTry:
    bench.filling.fill(bench.slots - 1)
    tokens = bench.full_slots.ender_tokens(1) + LEAVE_STEPS
    tokens = max(tokens, int(ENDER_S / bench.step_s))
    ender = bench.start(bench.short(tokens, role=Role.FILLER))
    if not ender.wait_tokens(1, READY_S):
        raise CannotDecideError("a stream of the set-up did not begin")
    asked = bench.short(QUEUED_TOKENS, role=Role.USER)
    before = min(2 * bench.crowd(MOST_LEAVING), bench.facts.most_waiting - 1)
    queued = [bench.start(asked) for _ in range(before)]
    bench.pause(bench.step_s)
    probe = bench.full_slots.queue_probe()
    check_queued(queued)
    bench.full_slots.note_steps()
    for stream in queued:
        stream.leave()
        bench.pause(bench.rng.random() * bench.step_s / len(queued))
    if ender.has_ended:
        raise CannotDecideError("the stream whose end frees a slot ended too early")
    ended = bench.full_slots.await_end(ender)
    return bench.full_slots.time_probe(probe, lambda: ended.last_token_ns)


def check_queued(queued: list[LiveStream]) -> None:
    """Raises CannotDecideError if one of them was served or refused."""
    for stream in queued:
        if stream.row is not None:
            why = stream.row.error or stream.row.outcome
            raise CannotDecideError(f"a request that should queue was refused: {why}")
        if stream.tokens:
            raise CannotDecideError("a request that should queue was served: slots were free")


@case(
    "queue/bystander",
    Level.MUST,
    "A client that leaves the queue ends no running stream.",
    wire="Greedy streams in all slots; requests queue behind them and close their connections, one "
    "after the other. The control is the same without the requests that queue. Both run a second "
    "time if a text differs.",
    passes="every running stream is answered whole, with the text of the control",
    methods="B",
    remedy="abort by the request, not by its slot or its place",
    why="An abort that names a slot instead of a request hits the stream that runs there.",
    quick=True,
    caught=("https://github.com/ikawrakow/ik_llama.cpp/issues/1929",),
)
def queue_bystander(bench: Bench) -> Finding:
    bench.check_queues()
    try:
        return _compared_beside(bench, are_new=False)
    except AnsweredBeforeError:
        bench.cleaning.rest()
        return _compared_beside(bench, are_new=True)
    except UnlikeTextsError:
        return Finding(None, f"every running stream is whole; {UNLIKE_TEXTS}", {})


def _compared_beside(bench: Bench, *, are_new: bool) -> Finding:
    """`are_new`: each run has other prompts, whose answers are alike in their ends alone."""
    tokens = _greedy_tokens(bench)

    def numbers() -> range:
        return prompts(bench, bench.crowd(MOST_GREEDY), are_new=are_new)

    control, act = (partial(_beside, bench, numbers, leavers=leavers) for leavers in (0, LEAVERS))
    alone, settle = (lambda: one_by_one(bench, numbers(), tokens)), bench.cleaning.rest
    if are_new:
        return compared(control, act, end_of, alone=alone, what="end", settle=settle)
    return compared(control, act, alone=alone, settle=settle)


def _greedy_tokens(bench: Bench) -> int:
    return QUICK_GREEDY_TOKENS if bench.is_quick else GREEDY_TOKENS


def _was_cut(stream: LiveStream) -> bool:
    return stream.row is not None and stream.row.outcome is not Outcome.COMPLETED


def leave_queue(queued: LiveStream, streams: Sequence[LiveStream], *, usual_s: float) -> None:
    """`usual_s`: how long the answers of the streams before it take. Raises AnsweredBeforeError or
    CannotDecideError if the queued request did not have to wait for these streams."""
    try:
        if all(stream.has_ended for stream in streams):
            check_computed(rows_of(streams), usual_s)
        if not any(_was_cut(stream) for stream in streams):  # else its slot was free for this one
            check_queued([queued])
    finally:
        queued.leave()


def _beside(bench: Bench, numbers: Callable[[], range], *, leavers: int) -> list[RequestRow]:
    bench.filling.fill(bench.slots - bench.crowd(MOST_GREEDY))
    tokens = _greedy_tokens(bench)
    streams = start_greedy(bench, numbers(), tokens)
    if not all(stream.wait_tokens(1, READY_S) for stream in streams):
        raise CannotDecideError("the streams do not run at once")
    for _ in range(leavers):
        queued = bench.start(leaver(bench, role=Role.USER))
        bench.pause(bench.ttft_s + 3 * bench.step_s)
        leave_queue(queued, streams, usual_s=tokens * bench.step_s)
    return rows_of(streams)


@case(
    "queue/mass",
    Level.MUST,
    "A client that dies with running and queued requests ends nothing else.",
    wire="All slots are full and eight times as many requests queue, or as many as may, all from "
    "one client, whose connections are reset at once, as a kernel does for a process that died.",
    passes="as many requests as slots run at once afterwards",
    methods="O R",
    remedy="let many requests end in one step",
    why="A crash of a gateway is a mass cancellation. Limits on aborts in a step, or a loop over a "
    "list that shrinks, end in a dead engine or in requests that nobody reads.",
    caught=(
        "https://github.com/vllm-project/vllm/issues/49118",
        "https://github.com/vllm-project/vllm/pull/52211",
        "https://github.com/sgl-project/sglang/pull/20182",
    ),
)
def queue_mass(bench: Bench) -> Finding:
    bench.check_queues()
    bench.lets_wait(MASS)
    queues = min(MASS * bench.slots, MOST_QUEUED, bench.facts.most_waiting)
    # Over gRPC the requests of one client share a connection, and end with it as cancels.
    way = Way.RST if bench.session.plan.protocol is Protocol.HTTP else None
    left = 0

    def die() -> int:
        nonlocal left
        running = bench.filling.fill()
        asked = leaver(bench, role=Role.USER)
        asked_for = [bench.start(asked) for _ in range(queues)]
        bench.pause(bench.ttft_s + 4 * bench.step_s)
        queued = [one for one in asked_for if not is_refused(one)]  # there may be less room
        check_queued(queued or asked_for)
        for stream in [*running, *queued]:
            stream.leave(way)
        left = len(running) + len(queued)
        return left

    held = bench.occupancy.held(die)
    evidence: dict[str, float | str | None] = {"left": left, "held": held}
    if held > 0:
        return Finding(Failure.NEVER, f"{held} of {bench.slots} slots are still held", evidence)
    return Finding(None, f"{evidence['left']} requests left at once, no slot is held", evidence)


@case(
    "watch/polling",
    Level.SHOULD,
    "Watching a server does not change how it cancels.",
    wire="unary/leave and queue/leave, each twice: while nobody reads the metrics page, and while "
    "it is read every 0.1 s.",
    passes="both have the same verdict, and medians at most 4 steps, or a factor of 2, apart",
    methods="P",
    remedy="keep the metrics page apart from the look-out for disconnects",
    limit_s=300.0,
    why="A dashboard must not be what keeps requests of clients that left alive, nor what ends "
    "them.",
    needs=("http",),
    caught=(),
)
def polling(bench: Bench) -> Finding:
    bench.limit_tries(WATCHED_TRIES)
    evidence: dict[str, float | str | None] = {}
    worst = Finding(None, "the same verdicts and medians, watched and not", evidence)
    for name, check in (("unary", unary_leave), ("queue", queue_leave)):
        alone = check(bench)
        if alone.way != "full_slots":  # which counts no steps to compare
            raise RefusedError(f"{name}/leave is not judged by full slots on this server")
        bench.end()
        bench.cleaning.rest()
        with bench.pages.polling() as polled:
            watched = check(bench)
        if not polled.answers:
            raise RefusedError(f"GET {polled.url} was not answered with status 200")
        before, after = (one.evidence.get("median_steps") for one in (alone, watched))
        evidence |= {f"{name}_alone_steps": before, f"{name}_watched_steps": after}
        worst = _compared(name, alone, watched) or worst
        bench.end()
        bench.cleaning.rest()
        if bench.known.never_stops is not None:
            break  # the other would say the same
    return worst._replace(evidence=evidence)


def _compared(name: str, alone: Finding, watched: Finding) -> Finding | None:
    if alone.failure is not watched.failure:
        was, now = (one.failure or "good" for one in (alone, watched))
        return Finding(Failure.LATE, f"{name}/leave is {was} alone, {now} when watched", {})
    before, after = (one.evidence.get("median_steps") for one in (alone, watched))
    if not isinstance(before, float) or not isinstance(after, float):
        return None
    less, more = sorted((before, after))
    if more <= max(less + MOST_DIFFERENCE_STEPS, MOST_DIFFERENCE_TIMES * less):
        return None
    said = f"{name}/leave takes {before:.1f} steps alone, {after:.1f} when watched"
    return Finding(Failure.LATE, said, {})
