"""Many clients have left, and the server still holds slots, memory, or nothing at all."""

import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from itertools import pairwise
from typing import Final, NamedTuple

import psutil

from harness.conform.bench import Bench
from harness.conform.bystanders import SPREAD_STEPS, leave_after, leaver, read_whole, storm, wave
from harness.conform.case import case, reports
from harness.conform.finding import Evidence, Finding, found
from harness.conform.routes import Routes
from harness.experiments.capacity import Capacity
from harness.experiments.held import Count
from harness.experiments.outcome import CannotDecideError, RefusedError
from harness.intervals import mean_interval, rate_lower95, rate_upper95
from harness.records import Outcome
from harness.store.conform_result import Failure, Level

LEAVES: Final = 1000
BLOCK: Final = 100
GHOST_STEPS: Final = 4  # over which the clients of a wave leave here
MOST_GHOSTS: Final = 0.003
LOOPS: Final = 12
LOOPS_S: Final = 30.0  # after which no further loop begins, once there are a few
QUICK_LOOPS: Final = 3
_SLOW_WAYS: Final = ("quiet", "pace")  # which take some seconds a loop
STORMS: Final = 5
SLOW: Final = 10  # times the idle time of a request
LEAST_LIMIT_S: Final = 2.0
PAIRS: Final = 4
PAIR_LEAVES: Final = 64
FEW_PAIR_LEAVES: Final = 32  # of a server that never stops, where each takes twice as long
OUTLIVES: Final = 1.25  # times the time for which prompts are waited for
READ_TOKENS: Final = 4  # before a leave
ANSWER_TOKENS: Final = 8  # as many as a server in time makes for a client that leaves then
MOST_BYTES: Final = 4096  # a leave, beyond what an answer costs
MOST_HANDLES: Final = 0.01
STILL_STEPS: Final = 8  # without a change of the handles


@case(
    "ghost/rate",
    Level.MUST,
    "Fewer than one request in 300 is forgotten when its client leaves.",
    wire="1,000 clients leave at random moments, in waves of as many as there are slots; after "
    "each 100 at most as many probes as slots start at once.",
    passes="no slot is held after any block: at most 0.3 % are forgotten, with 95 % confidence",
    methods="O",
    remedy="find the moment in which an abort is lost, such as before its request is known",
    why="No functional test sees one forgotten request in a hundred; it fills a server in a day.",
    caught=reports("sgl-project/sglang#36876 sgl-project/sglang#35255 ray-project/ray#52533"),
    limit_s=120.0,
)
def ghost_rate(bench: Bench) -> Finding:
    left = 0
    block = BLOCK if bench.known.never_stops is None else 1
    while True:
        count, now = held_after_waves(bench, block, sees_one=True, steps=GHOST_STEPS)
        left += now
        if count.held or left >= LEAVES:
            return judge_ghosts(left, count)


def judge_ghosts(left: int, count: Count) -> Finding:
    held, seen = count.held, min(count.held, left)
    is_least = count.way == "quiet" and held > 0
    low, high = round(rate_lower95(seen, left), 5), round(rate_upper95(seen, left), 5)
    if not held and high > MOST_GHOSTS:
        raise CannotDecideError(f"{left} leaves are too few: {100 * high:.2f} % are possible")
    said = f"{held} of {left} requests are still held after the settle time"
    if is_least:
        said = f"after {left} leaves {count.said}"
    evidence: Evidence = {"left": left, "held": held, "rate_lower95": low}
    evidence["rate_upper95"] = None if is_least else high
    good = f"none of {left} requests was forgotten"
    return found(good, said if held else None, evidence, Failure.NEVER)._replace(way=count.way)


@case(
    "leak/slots",
    Level.MUST,
    "Slots come back after their clients have left.",
    wire="12 times as many clients as slots leave, in the queue, in prefill or between tokens "
    "(fewer, where that takes more than 30 s); after each time as many probes as slots start at "
    "once.",
    passes="no slot is held after any of them",
    methods="O",
    remedy="free the slot on each path on which a request ends",
    why="A slot lost at each hundredth cancel is a server that stops in an afternoon.",
    quick=True,
    caught=reports("NVIDIA/TensorRT-LLM#12314 am17an/llama.cpp#20"),
)
def slots(bench: Bench) -> Finding:
    left = loops = 0
    until_s = time.monotonic() + LOOPS_S
    while True:
        count, now = held_after_waves(bench, 1)
        left, loops = left + now, loops + 1
        is_brief = bench.is_quick or count.way in _SLOW_WAYS or time.monotonic() > until_s
        most = QUICK_LOOPS if is_brief else LOOPS
        if count.held or loops >= most:
            break
    rounds = "1 loop" if loops == 1 else f"{loops} loops"
    after = f"after {left} clients have left in {rounds}"
    evidence: Evidence = {"loops": loops, "left": left, "held": count.held}
    said = f"{after}, {count.said}" if count.held else None
    finding = found(f"{after}, {count.good}", said, evidence, Failure.NEVER)
    return finding._replace(way=count.way, stops=not count.held)


def held_after_waves(
    bench: Bench, fewest: int, *, sees_one: bool = False, steps: int = SPREAD_STEPS
) -> tuple[Count, int]:
    """What is still held after `fewest` or a few more clients have left, and how many left. Fewer
    leave where that takes half of the settle time: the first answers could end by themselves.
    `steps`: see `wave`."""
    left = 0

    def leave() -> int:
        nonlocal left
        until_s = time.monotonic() + bench.settle_s / 2
        now = 0
        while now < fewest and (not now or time.monotonic() < until_s):
            now += wave(bench, steps=steps)
        left += now
        return now

    return bench.held.after(leave, sees_one=sees_one), left


@case(
    "leak/kv",
    Level.MUST,
    "KV memory comes back after its clients have left.",
    wire="As many prompts as slots, as long as just fit at once, run before and after 12 loops in "
    "which as many clients as slots leave.",
    passes="prompts of the same length fit at once afterwards, at the latest after the settle time",
    methods="K",
    remedy="free the blocks on each path on which a request ends",
    why="Lost blocks show only when the memory is full, as longer queues and preemption.",
    caught=reports(
        "vllm-project/vllm#46283 vllm-project/vllm-ascend#16662 sgl-project/sglang#40360 "
        "LMCache/LMCache#4852"
    ),
    limit_s=90.0,
)
def kv(bench: Bench) -> Finding:
    memory, stops = bench.capacity, bench.known.never_stops is None
    memory.measure(roughly=not stops)
    asked = bench.long(prompt_tokens=memory.prompt_tokens // 4)
    if not stops:  # these run on, and no longer than the next prompts are waited for
        tokens = int(OUTLIVES * memory.look_s / bench.step_s)
        asked = replace(asked, max_tokens=min(asked.max_tokens, tokens))
    loops = LOOPS if stops and bench.session.plan.target.disconnect == "cancel" else 1
    left = sum(wave(bench, asked) for _ in range(loops))
    fits = memory.fits()
    if not fits and stops:
        bench.pause(bench.settle_s)
        fits = memory.fits()
    said = f"{memory.tokens} tokens of prompts no longer fit after {left} clients have left"
    evidence: Evidence = {"left": left, "capacity_tokens": memory.tokens}
    good = f"{memory.tokens} tokens of prompts fit as before"
    return found(good, None if fits else said, evidence, Failure.NEVER)


class Used(NamedTuple):
    bytes: float
    handles: float


@case(
    "leak/process",
    Level.SHOULD,
    "The server's processes do not grow with the number of clients that left.",
    wire="Blocks of 64 clients that leave after 4 tokens alternate with as many answers of 8 "
    "tokens; resident memory and open handles of the server's processes are read between them.",
    passes="a leave costs no more memory (4 KiB) and handles (0.01) than an answer, with 95 % "
    "confidence; what an answer itself keeps is reported",
    methods="pid",
    remedy="drop what is kept for a request when its client has left",
    why="The control is an answer, since logs and caches grow with every request and its tokens.",
    needs=("pid",),
    caught=reports("NVIDIA/TensorRT-LLM#8131 vllm-project/vllm#51629"),
    limit_s=120.0,
)
def process(bench: Bench) -> Finding:
    pid = bench.asked.pid
    if pid is None:
        raise CannotDecideError("the server's process is not known: name it with --pid")
    read: list[Used] = []
    leaves = PAIR_LEAVES if bench.known.never_stops is None else FEW_PAIR_LEAVES
    for _ in range(1 + PAIRS):  # the first pair brings what is allocated once
        leave_after(bench, leaves, READ_TOKENS)
        read.append(used_at_rest(bench, pid))
        read_whole(bench, leaves, ANSWER_TOKENS)
        read.append(used_at_rest(bench, pid))
    return judge_growth(read[1:], leaves=leaves)


def judge_growth(read: Sequence[Used], *, leaves: int) -> Finding:
    """`read`: at the beginning, and after each block, first of leaves, then of whole answers."""
    evidence: Evidence = {"leaves": leaves * (len(read) // 2)}
    wrong, grows = [], []
    for name, most in (("bytes", MOST_BYTES), ("handles", MOST_HANDLES)):
        grown = [late - early for early, late in pairwise(getattr(one, name) for one in read)]
        own = mean_interval([one / leaves for one in grown[1::2]]) or (grown[1] / leaves,) * 2
        evidence |= {f"{name}_an_answer_low95": own[0], f"{name}_an_answer_high95": own[1]}
        if own[0] > most:
            grows.append(f"{own[0]:.3g} {name}")
        blocks = zip(grown[::2], grown[1::2], strict=True)
        each = [(leave - answer) / leaves for leave, answer in blocks]
        low, high = mean_interval(each) or (each[0], each[0])
        evidence |= {f"{name}_a_leave_low95": low, f"{name}_a_leave_high95": high}
        if low > most:
            wrong.append(f"{low:.3g} {name}")
    said = f"a leave costs at least {' and '.join(wrong)} more than a whole answer"
    good = "leaves cost no more memory and handles than answers"
    if grows:
        good += f", but each answer, left or not, keeps at least {' and '.join(grows)}"
    return found(good, said if wrong else None, evidence, Failure.HARM)


def used_at_rest(bench: Bench, pid: int) -> Used:
    """What is used when no more handles are closed, after the settle time at the latest."""
    until_s = time.monotonic() + bench.settle_s
    used = used_by(pid)
    while time.monotonic() < until_s:
        bench.pause(STILL_STEPS * bench.step_s)
        before, used = used, used_by(pid)
        if used.handles == before.handles:
            break
    return used


def used_by(pid: int) -> Used:
    try:
        parent = psutil.Process(pid)
        family = [parent, *parent.children(recursive=True)]
        return Used(
            sum(one.memory_info().rss for one in family), sum(one.num_fds() for one in family)
        )
    except psutil.Error as error:
        raise CannotDecideError(f"process {pid} cannot be read: {error}") from error


@case(
    "rest/no-traffic",
    Level.MUST,
    "Slots and memory of clients that left are freed without any other traffic.",
    wire="As many clients as slots run, as many queue, and all leave at once; nothing is sent for "
    "the settle time, and then as many probes as slots start at once. A control keeps sending.",
    passes="no slot is held at the first probe, and as many long prompts fit as before",
    methods="O K",
    remedy="clean up when a client leaves, not when the next request comes",
    why="A server that cleans up only when the next request comes looks clean under any load test.",
    caught=reports("LMCache/LMCache#5006 NVIDIA/TensorRT-LLM#12313"),
    limit_s=90.0,
)
def no_traffic(bench: Bench) -> Finding:
    memory: Capacity | None = None
    if bench.known.never_stops is None:  # else slots are held, too
        with suppress(RefusedError, CannotDecideError):  # slots are its limit: they are judged
            bench.capacity.measure()
            memory = bench.capacity
    count, wrong = what_is_held(bench, memory, has_traffic=False)
    if wrong is None:
        good = f"after the silence {count.good}" + (", nor memory" if memory is not None else "")
        evidence: Evidence = {"capacity_tokens": memory.tokens if memory else None}
        return Finding(None, good, evidence, way=count.way)
    if bench.known.never_stops is not None:  # neither does traffic help
        said = f"after a silence of {bench.settle_s:g} s {wrong}"
        return Finding(Failure.NEVER, said, {"held": wrong}, way=count.way)
    bench.cleaning.rest()
    control = what_is_held(bench, memory, has_traffic=True)[1] or "nothing is held"
    said = f"after a silence of {bench.settle_s:g} s {wrong}; with traffic {control}"
    evidence = {"held": wrong, "held_with_traffic": control}
    return Finding(Failure.NEVER, said, evidence, way=count.way)


def what_is_held(
    bench: Bench, memory: Capacity | None, *, has_traffic: bool
) -> tuple[Count, str | None]:
    """What is held after a silence; None: nothing."""
    asked = bench.long()
    if memory is not None:
        asked = replace(asked, prompt_tokens=memory.prompt_tokens // 2)
    if bench.known.never_stops is not None:  # no longer than the silence, or the next case waits
        asked = replace(asked, max_tokens=bench.brief_tokens)
    storm(bench, asked)
    until_s = time.monotonic() + bench.settle_s
    while has_traffic and time.monotonic() < until_s:
        bench.start(bench.short(1)).join(bench.settle_s)
        bench.pause(bench.step_s)
    bench.pause(max(0.0, until_s - time.monotonic()))
    count = bench.held.at_once()
    if count.held:
        return count, count.said
    return count, None if memory is None or memory.fits() else "memory is still held"


@case(
    "wedge/health",
    Level.MUST,
    "A server that says it is healthy generates.",
    wire="/health is read. Five times as many clients as slots run, as many queue, and all leave "
    "at once; one request is sent then, another one after the settle time if it is not answered. "
    "If /health was good before, it is read again.",
    passes="this request or the second one is answered within 10 times its idle time, or 2 s; "
    "/health, if it was good before the clients left, still is",
    methods="R",
    remedy="let /health fail when no request is answered any more",
    why="A router keeps sending requests to a server whose health page says 200.",
    quick=True,
    caught=reports("NVIDIA/TensorRT-LLM#13713 vllm-project/vllm#53130 ggml-org/llama.cpp#27388"),
)
def health(bench: Bench) -> Finding:
    was_healthy = _says_health(bench)
    never_stops = bench.known.never_stops is not None
    left = sum(storm(bench, leaver(bench)) for _ in range(1 if never_stops else STORMS))
    if never_stops:  # what was left runs on, and must not be taken for a wedge
        bench.cleaning.rest()
    settled_s = time.monotonic() + bench.settle_s
    limit_s = max(LEAST_LIMIT_S, SLOW * (bench.ttft_s + 8 * bench.step_s))
    if not (serves := _is_served(bench, limit_s)):
        bench.pause(max(0.0, settled_s - time.monotonic()))
        serves = _is_served(bench, limit_s)
    is_healthy = _says_health(bench) if was_healthy else was_healthy
    return judge_health(Health(was_healthy, is_healthy), left, serves=serves, limit_s=limit_s)


class Health(NamedTuple):
    """What /health says before and after clients left; None: nothing."""

    before: bool | None
    after: bool | None


def judge_health(health: Health, left: int, *, serves: bool, limit_s: float) -> Finding:
    """`serves`: a request was answered within `limit_s`. A page that was not good before the leaves
    does not count: it may speak of other servers."""
    says = {True: "healthy", False: "not healthy", None: "not offered"}[health.after]
    wrong = None
    if health.before and health.after is False:
        wrong = "it serves, but says that it does not"
    if not serves:
        wrong = f"no answer in {limit_s:.2g} s, twice"
    after = f"after {left} clients have left (/health: {says})"
    evidence: Evidence = {"left": left, "health": says, "limit_s": round(limit_s, 3)}
    said = None if wrong is None else f"{wrong} {after}"
    return found(f"it serves {after}", said, evidence, Failure.NEVER)


def _says_health(bench: Bench) -> bool | None:
    plan = bench.session.plan
    if not plan.target.http:
        return None
    with closing(Routes(plan)) as routes:
        return routes.health()


def _is_served(bench: Bench, limit_s: float) -> bool:
    row = bench.start(bench.short(8)).join(limit_s)
    return row is not None and row.outcome is Outcome.COMPLETED
