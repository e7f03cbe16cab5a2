"""Continuous batching with one token budget a step.

Each step, every request is owed the tokens that it has and the cache has not; the scheduler gives
each some of what it is owed, out of one budget. Running requests come first, in the order in which
they were admitted; then waiting requests are admitted while slots, budget and blocks last. A long
prompt is thus computed in chunks beside everybody else's next token, and a resumed request is
nothing special. When a running request finds no block, the youngest running request is preempted:
it loses its blocks, goes to the front of the queue and will recompute.

Every ending goes through `finish`: it is the only place where a request leaves the queues and loses
its blocks for good, and it does nothing for a request that is not there any more.

The scheduler reads no clock and draws no random numbers. Its only mutable state is `waiting`,
`running`, `requests`, the block pool and the counters; they change in the four public methods,
which are called by one thread, between model executions.
"""

from collections import deque
from collections.abc import Callable, Mapping

from reference_engine.config import EngineConfig
from reference_engine.core.counters import Counters
from reference_engine.core.kv_cache import KVCache
from reference_engine.core.step import ScheduledRequest, StepPlan
from reference_engine.request import FinishReason, Request, Status


class Scheduler:
    """Decides what each step computes, and keeps the requests' state true to it."""

    def __init__(self, config: EngineConfig, eos_token_id: int) -> None:
        self._max_num_seqs = config.max_num_seqs
        self._token_budget = config.max_num_batched_tokens
        self._max_model_len = config.max_model_len
        self._eos_token_id = eos_token_id
        self.kv_cache = KVCache(config.num_blocks, config.block_size)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.counters = Counters()

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def add(self, request: Request) -> None:
        """Queue a new request. Raises ValueError for an id that is in use."""
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id} is in use")
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self) -> StepPlan:
        """Decide the next step: grow block tables, preempt and admit as needed."""
        plan = StepPlan(step=self.counters.steps + 1)
        budget = self._schedule_running(plan, self._token_budget)
        if not plan.preempted:
            budget = self._admit_waiting(plan, budget)
        assert budget >= 0
        assert len(self.running) <= self._max_num_seqs
        return plan

    def update(self, plan: StepPlan, sampled: Mapping[str, int]) -> list[Request]:
        """Take in what the step computed: `sampled` maps request ids to their new token.

        Returns the requests that got a token. Those that ended by it (end of sequence, length) have
        their `finish_reason` set and are to be passed to `finish`.
        """
        self.counters.steps = plan.step
        grown = []
        for request, num_tokens in plan.scheduled:
            request.num_computed_tokens += num_tokens
            if request.num_owed_tokens:
                continue
            if request.num_generated == 0:
                self.counters.prompt_tokens += request.num_prompt_tokens
            request.token_ids.append(sampled[request.request_id])
            request.finish_reason = self._natural_end(request)
            grown.append(request)
        self.counters.generated_tokens += len(grown)
        return grown

    def finish(
        self,
        request_id: str,
        reason: FinishReason,
        *,
        num_leaked: int = 0,
        on_removed: Callable[[], None] = lambda: None,
    ) -> int | None:
        """End a request in whatever state it is; the blocks given back, None if it is not here.

        `on_removed` is called when it has left the batch or the queue and still has its blocks.
        """
        request = self.requests.pop(request_id, None)
        if request is None:
            return None
        if request.status is Status.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        request.move_to(Status.FINISHED)
        request.finish_reason = reason
        self.counters.count_finish(reason)
        on_removed()
        return self.kv_cache.free(request, num_leaked)

    def check_integrity(self) -> None:
        """Raise AssertionError unless queues, statuses and blocks agree with each other."""
        assert all(request.status is Status.RUNNING for request in self.running)
        assert all(r.status in (Status.WAITING, Status.PREEMPTED) for r in self.waiting)
        assert len(self.running) + len(self.waiting) == len(self.requests)
        self.kv_cache.pool.check_integrity([r.block_table for r in self.requests.values()])

    def _schedule_running(self, plan: StepPlan, budget: int) -> int:
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            num_tokens = min(request.num_owed_tokens, budget)
            while not self.kv_cache.try_grow(request, num_tokens):
                victim = self.running[-1]
                self._preempt(victim, plan)
                if victim is request:
                    return budget
            plan.scheduled.append(ScheduledRequest(request, num_tokens))
            budget -= num_tokens
            index += 1
        return budget

    def _preempt(self, victim: Request, plan: StepPlan) -> None:
        self.running.remove(victim)
        self.kv_cache.free(victim)
        self.counters.preemptions += 1
        self.counters.recomputed_tokens += victim.num_computed_tokens
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        victim.move_to(Status.PREEMPTED)
        self.waiting.appendleft(victim)
        plan.preempted.append(victim)

    def _admit_waiting(self, plan: StepPlan, budget: int) -> int:
        while self.waiting and budget > 0 and len(self.running) < self._max_num_seqs:
            request = self.waiting[0]
            num_tokens = min(request.num_owed_tokens, budget)
            if not self.kv_cache.try_grow(request, num_tokens):
                break
            self.waiting.popleft()
            (plan.admitted if request.status is Status.WAITING else plan.resumed).append(request)
            request.move_to(Status.RUNNING)
            self.running.append(request)
            plan.scheduled.append(ScheduledRequest(request, num_tokens))
            budget -= num_tokens
        return budget

    def _natural_end(self, request: Request) -> FinishReason | None:
        ended = request.token_ids[-1] == self._eos_token_id and not request.sampling.ignore_eos
        if ended:
            return FinishReason.STOP
        full = request.num_tokens >= self._max_model_len
        if request.num_generated >= request.sampling.max_tokens or full:
            return FinishReason.LENGTH
        return None
