"""What later requests find in the prefix cache, by the scheduler alone: tokens found, of those that
were there. With PYTHONPATH set to a checkout of another revision it measures that scheduler.

A prompt of 512 tokens is answered with 256. Then the prompt is asked again, or a next turn of 64
tokens follows, after a whole answer or a stopped one. Preempted and swapped requests are of 16
users whose requests grow to 2.5 times the cache.
"""

from collections.abc import Iterator
from random import Random

from reference_engine.config import EngineConfig, PreemptionPolicy
from reference_engine.core.request import FinishReason, Request, Sampling
from reference_engine.core.scheduler import Scheduler
from tools.bench.ratio import BenchRatio, share

EOS, WORD = 2, 300
PROMPT, ANSWER, STOPPED, QUESTION = 512, 256, 100, 64
USERS, STEPS, ROUNDS = 16, 3000, 5


def found_again(*, quick: bool = False) -> Iterator[BenchRatio]:
    for what, stop_after, keeps_answer in (
        ("the prompt asked again, after a stop", STOPPED, False),
        ("next turn, after a whole answer", ANSWER, True),
        ("next turn, after a stopped answer", STOPPED, True),
    ):
        found, before = _next_turn(stop_after, keeps_answer=keeps_answer)
        yield share(f"found again: {what}", "tokens", [found], [before])
    for preemption in ("recompute", "swap"):
        rounds = range(1 if quick else ROUNDS)
        schedulers = [
            _crowded(preemption, seed, STEPS // 10 if quick else STEPS) for seed in rounds
        ]
        counted = [one.counters for one in schedulers]
        if preemption == "recompute":
            again = [one.recomputed_tokens for one in counted]
            lost = [one.resumed_queried_tokens for one in counted]
            yield share("preempted: computed again, of what they had", "tokens", again, lost)
        else:
            back = [one.swapped_in_blocks for one in counted]
            out = [one.swapped_out_blocks for one in counted]
            yield share("swapped: copied back, of what was copied out", "blocks", back, out)


def _next_turn(stop_after: int, *, keeps_answer: bool) -> tuple[int, int]:
    """Tokens that the second turn finds, and those that the first turn had."""
    scheduler = Scheduler(EngineConfig(), frozenset({EOS}))
    first = Request("first", [WORD] * PROMPT, Sampling(max_tokens=ANSWER))
    scheduler.add(first)
    while first.num_generated < stop_after:
        _step(scheduler)
    if first.request_id in scheduler.requests:
        scheduler.free(_ended(scheduler, first, FinishReason.ABORT))
    kept = first.token_ids if keeps_answer else first.token_ids[:PROMPT]
    question = [WORD - 1] * QUESTION if keeps_answer else []
    second = Request("second", kept + question, Sampling(max_tokens=1))
    scheduler.add(second)
    _step(scheduler)
    return second.num_cached_tokens, len(kept)


def _crowded(preemption: PreemptionPolicy, seed: int, steps: int) -> Scheduler:
    config = EngineConfig(max_num_seqs=32, num_blocks=256, preemption=preemption)
    scheduler, random = Scheduler(config, frozenset({EOS})), Random(seed)
    for number in range(steps):
        while len(scheduler.requests) < USERS:
            size = random.randrange(256, 512)
            prompt = [WORD] * 192 + [1000 + number] * (size - 192)
            name = f"{number}-{len(scheduler.requests)}"
            scheduler.add(Request(name, prompt, Sampling(max_tokens=256)))
        _step(scheduler)
    return scheduler


def _step(scheduler: Scheduler) -> None:
    plan = scheduler.schedule()
    sampled = {one.request_id: 10_000 + one.arrival for one in plan.sampling}
    for request in scheduler.update(plan, sampled):
        if request.finish_reason is not None:
            scheduler.free(_ended(scheduler, request, request.finish_reason))


def _ended(scheduler: Scheduler, request: Request, reason: FinishReason) -> Request:
    ended = scheduler.finish(request.request_id, reason)
    assert ended is not None
    return ended
