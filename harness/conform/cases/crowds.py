"""Many clients leave at once, or again and again."""

from collections.abc import Sequence
from statistics import linear_regression, median
from typing import Final

from harness.client.live_stream import LiveStream
from harness.conform.bench import Bench
from harness.conform.bystanders import (
    UNLIKE_TEXTS,
    greedy_when_admitted,
    leave_each,
)
from harness.conform.case import ABORT, case, reports
from harness.conform.cases.prefill import Prefill, judged, long_prefill
from harness.conform.finding import Evidence, Finding
from harness.experiments.full_slots import SlotTry
from harness.experiments.outcome import CannotDecideError
from harness.experiments.streams import whole, without_token
from harness.records import Role
from harness.store.conform_result import Failure, Level
from harness.workload.abandon import RequestSpec

CANARIES: Final = 3
MOST_QUEUED: Final = 256  # behind full slots
CANARY_TOKENS: Final = 24
DOSES: Final = (1, 2, 5, 10, 30)
ROUNDS: Final = 3
MOST_STEPS_A_LEAVE: Final = 1.0
RETRIES: Final = 3
RETRY_TRIES: Final = 4
# Chunks that a prompt takes at least: if the prompts of five clients or of three attempts are
# computed for nobody, that takes longer than the two chunks that are allowed.
DOSE_CHUNKS, RETRY_CHUNKS = 1.5, 4.0
EARLY: Final = 0.15  # of a long prompt's time, after which a dose leaves: most is still to come
LIMIT: Final = 0.5  # of the time to first token, after which the client gives up


@case(
    "storm/all",
    Level.MUST,
    "All clients may leave at once.",
    wire="As many streams as slots run and as many queue; all connections are closed within 10 ms. "
    "Before and after, greedy requests.",
    passes="no slot is held, and the greedy texts are as before",
    methods="O B",
    remedy=ABORT,
    why="A load balancer that restarts, or a network that blinks, cancels everything in one step.",
    quick=True,
    caught=reports("NVIDIA/TensorRT-LLM#13713 ai-dynamo/dynamo#12389 ray-project/ray#52533"),
)
def storm_all(bench: Bench) -> Finding:
    def texts() -> list[str | None]:
        rows = greedy_when_admitted(bench, range(CANARIES), CANARY_TOKENS)
        return [whole(row, "a greedy request").answer for row in rows]

    before, again = texts(), texts()
    left, spread_ms = 0, 0.0

    def leave() -> int:
        nonlocal left, spread_ms
        running = begun(bench)
        queues = bench.crowd(MOST_QUEUED) if bench.facts.has_queue else 0
        queued = [bench.start(bench.long(role=Role.USER)) for _ in range(queues)]
        bench.pause(bench.ttft_s + 2 * bench.step_s)
        rows = leave_each(bench, [*running, *queued])
        moments_ns = [row.abandoned_ns for row in rows if row.abandoned_ns is not None]
        spread_ms = (max(moments_ns) - min(moments_ns)) / 1e6
        left = len(rows)
        return left

    count = bench.held.after(leave)
    evidence: Evidence = {
        "left": left,
        "within_ms": round(spread_ms, 1),
        "held": count.held,
        "texts": CANARIES,
    }
    finding = Finding(None, f"{left} left at once: {count.good}", evidence, way=count.way)
    if count.held:
        return finding._replace(failure=Failure.NEVER, reason=count.said, stops=False)
    if again != before:
        return finding._replace(stops=True, reason=f"{finding.reason}; {UNLIKE_TEXTS}")
    if texts() != before and texts() != before:
        said = "a greedy text has changed after the storm, twice"
        return finding._replace(failure=Failure.HARM, reason=said)
    return finding._replace(stops=True)


def begun(bench: Bench) -> list[LiveStream]:
    """As many streams as slots, or a crowd where the slots are not known; most of them run. Their
    answers outlast the count of what is held."""
    streams = [bench.start(bench.long(role=Role.USER)) for _ in range(bench.crowded)]
    without_token(streams, bench.patience.filler_s + len(streams) * bench.ttft_s)
    return streams


@case(
    "dose/sweep",
    Level.MUST,
    "Recovery does not depend on how many left.",
    wire="1, 2, 5, 10 and 30 long prompts are sent while another stream runs, and all their "
    "connections closed early in the prefill; a short request comes after each dose. Three times.",
    passes="its first token comes at most two chunks and 4 steps later than on the idle server at "
    "the median of all and of each dose, and at most one step later for each client that left",
    methods="P",
    remedy="take in all aborts that have come before each step",
    why="Clean-up that takes turns with work, or a queue of aborts that is read one per step, is "
    "seen only when many leave; a leak only after some time.",
    caught=reports("ollama/ollama#18477 Trans-N-ai/swama#116"),
)
def dose_sweep(bench: Bench) -> Finding:
    bench.check_runs_two()
    prefill = long_prefill(bench, fewest_chunks=DOSE_CHUNKS)
    bench.full_slots.begin(1)  # as with the doses: a step may grow with the batch
    before = bench.filling.steps_at_rest()
    tries: list[SlotTry] = []
    doses: list[int] = []
    for turn in range(ROUNDS):
        for dose in doses_of(bench):
            bench.filling.fill(1)
            bench.full_slots.serve_probe(bench.start(bench.probe()))
            bench.wire.begin_try(turn * len(DOSES) + DOSES.index(dose))
            tries.append(_dose(bench, dose, prefill))
            doses.append(dose)
            if tries[-1].recovery_s is None:
                return judged(bench, tries, before, prefill)
    finding = judged(bench, tries, before, prefill)
    if finding.failure is not None:
        return finding
    return _judge_doses(bench, doses, [one.recovery_s or 0.0 for one in tries], finding)


def doses_of(bench: Bench) -> Sequence[int]:
    """The doses in turn. A server that never stops gets the largest first: a dose that fills its
    slots shows it."""
    return DOSES if bench.known.never_stops is None else (*DOSES[-2:], *DOSES[:-2])


def _dose(bench: Bench, dose: int, prefill: Prefill) -> SlotTry:
    bench.filling.fill(1)
    streams = [bench.start(prefill.spec()) for _ in range(dose)]
    bench.pause(EARLY * prefill.ttft_s)
    for stream in streams:
        stream.leave()
    bench.pause(0)
    tried = bench.full_slots.time_probe(bench.start(bench.probe()))
    if not all(stream.join(bench.settle_s) for stream in streams):
        raise CannotDecideError("a stream could not leave")
    return tried


def _judge_doses(
    bench: Bench, doses: list[int], recoveries_s: list[float], finding: Finding
) -> Finding:
    steps = [taken_s / bench.step_s for taken_s in recoveries_s]
    middles = [
        median(taken for taken, left in zip(steps, doses, strict=True) if left == dose)
        for dose in DOSES
    ]
    slope = linear_regression(DOSES, middles).slope
    evidence = finding.evidence | {
        f"median_steps_{dose}": round(middle, 2)
        for dose, middle in zip(DOSES, middles, strict=True)
    }
    evidence["steps_a_leave"] = round(slope, 3)
    bound = float(finding.evidence["bound_steps"] or 0.0)
    worst = max(middles)
    if worst > bound:
        said = f"{worst:.1f} steps after {DOSES[middles.index(worst)]} clients left"
        return Finding(Failure.LATE, f"{said}; at most {bound:g} were allowed", evidence)
    if slope > MOST_STEPS_A_LEAVE:
        said = f"each client that leaves costs {slope:.1f} steps more; 1 was allowed"
        return Finding(Failure.LATE, said, evidence)
    return finding._replace(evidence=evidence)


@case(
    "retry/while-alive",
    Level.MUST,
    "A retry does not wait for its own dead attempt.",
    wire="A long prompt is sent and given up after half of its time to first token; so is each of "
    "two retries, which come at once. The third retry is read. All begin differently, so that no "
    "prefix cache helps.",
    passes="the last one's first token comes at most two chunks and 4 steps later than that of the "
    "same prompt alone, at the median of the tries, and at most three times that in each",
    methods="P",
    remedy="look for aborts before each chunk of a prompt",
    why="A client's time limit below the server's first token turns each request into several: "
    "if the dead ones are computed, each retry comes later than the one before.",
    caught=reports("antirez/ds4#333 vllm-project/vllm#20520"),
)
def while_alive(bench: Bench) -> Finding:
    prefill = long_prefill(bench, fewest_chunks=RETRY_CHUNKS)
    bench.full_slots.begin(bench.beside)
    before = bench.filling.steps_at_rest()
    tries: list[SlotTry] = []
    for number in range(RETRY_TRIES):
        bench.filling.fill(bench.beside)
        bench.full_slots.serve_probe(bench.start(prefill.spec(2)), idle_s=prefill.ttft_s)
        bench.wire.begin_try(number)
        for _ in range(RETRIES):
            attempt = _attempt(bench, prefill.spec())
            bench.pause(LIMIT * prefill.ttft_s)
            attempt.leave()
            bench.pause(0)
        last = bench.start(prefill.spec(2))
        tries.append(bench.full_slots.time_probe(last, idle_s=prefill.ttft_s))
        if tries[-1].recovery_s is None:
            break
    return judged(bench, tries, before, prefill)


def _attempt(bench: Bench, spec: RequestSpec) -> LiveStream:
    return bench.start(spec, bench.session.prompt(spec, n=bench.rng.getrandbits(32)))
