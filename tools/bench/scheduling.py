"""The cost of a decision: `schedule()` + `update()` for 256 running decodes.

Against a bare loop over the same requests, which does the least that any engine must: look up each
request's new token, append it, and count one more token as computed. And in a pool of a million
blocks against one of ten thousand: the pool's size must not show.

Stages of a cancel, each by itself, against the limit of docs/value-of-cancellation.md's source.
"""

from collections.abc import Iterable
from statistics import quantiles
from time import perf_counter_ns

from reference_engine.config import EngineConfig
from reference_engine.context import (
    Cancellation,
    CancelReason,
    Context,
    DetectionMethod,
)
from reference_engine.core.request import FinishReason, Request, Sampling
from reference_engine.core.scheduler import Scheduler
from tools.bench.ratio import BenchRatio, RatioLimit, share

EOS, WORD = 2, 300
NUM_REQUESTS = 256
PROMPT_TOKENS = 32
NUM_STEPS = 500  # the smaller pool holds the tokens of that many steps, without preemption
SMALL_POOL, LARGE_POOL = 10_000, 1_000_000
SOURCE_NS = 100_000.0


class Decoding:
    """A scheduler whose requests all decode, and copies of the requests for the bare loop."""

    def __init__(self, num_blocks: int) -> None:
        config = EngineConfig(
            max_num_seqs=NUM_REQUESTS, num_blocks=num_blocks, max_num_batched_tokens=512
        )
        self.scheduler = Scheduler(config, frozenset({EOS}))
        self.bare = [_request(number) for number in range(NUM_REQUESTS)]
        self.sampled = {request.request_id: WORD for request in self.bare}
        for number in range(NUM_REQUESTS):
            self.scheduler.add(_request(number))
        while self.scheduler.waiting or any(r.num_owed_tokens > 1 for r in self.scheduler.running):
            plan = self.scheduler.schedule()
            sampled = {request.request_id: WORD for request in plan.sampling}
            self.scheduler.update(plan, sampled)

    def step_ns(self) -> float:
        """Nanoseconds a request that deciding and updating take."""
        start = perf_counter_ns()
        plan = self.scheduler.schedule()
        self.scheduler.update(plan, self.sampled)
        elapsed = perf_counter_ns() - start
        assert len(plan.scheduled) == NUM_REQUESTS
        return elapsed / NUM_REQUESTS

    def bare_ns(self) -> float:
        """Nanoseconds a request that the bare loop takes."""
        sampled = self.sampled
        start = perf_counter_ns()
        for request in self.bare:
            request.token_ids.append(sampled[request.request_id])
            request.num_computed_tokens += 1
        return (perf_counter_ns() - start) / NUM_REQUESTS


def _request(number: int) -> Request:
    sampling = Sampling(max_tokens=4000, ignore_eos=True)
    return Request(f"r{number}", [WORD + number] * PROMPT_TOKENS, sampling)


def scheduling(*, quick: bool = False) -> Iterable[BenchRatio]:
    small, large = Decoding(SMALL_POOL), Decoding(SMALL_POOL if quick else LARGE_POOL)
    ours, in_large, bare = [], [], []
    for _ in range(10 if quick else NUM_STEPS):
        ours.append(small.step_ns())
        in_large.append(large.step_ns())
        bare.append(small.bare_ns())
    what = f"schedule() + update(), {NUM_REQUESTS} decodes"
    yield share(
        f"{what}, against a bare loop", "ns/request", ours, bare, RatioLimit("at most", 8.0)
    )
    what += f", {LARGE_POOL:,} blocks against {SMALL_POOL:,}"
    yield share(what, "ns/request", in_large, ours, RatioLimit("at most", 1.1))


def cancel_stages(*, quick: bool = False) -> Iterable[BenchRatio]:
    setting, removing, freeing = [], [], []
    for _ in range(1 if quick else 10):
        scheduler = Decoding(SMALL_POOL).scheduler
        for request in list(scheduler.running):
            context, started_ns = Context(""), perf_counter_ns()
            context.stop(
                Cancellation(CancelReason.USER_DISCONNECT, DetectionMethod.CONNECTION, started_ns)
            )
            set_ns = perf_counter_ns()
            scheduler.finish(request.request_id, FinishReason.ABORT)
            removed_ns = perf_counter_ns()
            scheduler.free(request)
            freed_ns = perf_counter_ns()
            setting.append(float(set_ns - started_ns))
            removing.append(float(removed_ns - set_ns))
            freeing.append(float(freed_ns - removed_ns))
    for what, took_ns in (
        ("stop a context", setting),
        (f"take one of {NUM_REQUESTS} out of the batch", removing),
        ("free its blocks", freeing),
    ):
        for name, times in ("median", took_ns), ("p99", quantiles(took_ns, n=100)[-1:]):
            limits = [SOURCE_NS] * len(times)
            yield share(f"{what}, {name}", "ns", times, limits, RatioLimit("at most", 1.0))
