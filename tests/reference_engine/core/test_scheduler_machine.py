"""Random adds, steps, aborts, preemptions, hand-overs and failures: nothing is lost.

In any order, every block is blank, cached or held and no two of these, references equal
holders, every request is in one place, no step leaves budget to work that could take it, and in the
end each request is served. Each step finds all tokens before its own in the blocks of its requests:
computed there, found as a prefix, or copied back from the host.

Steps are planned one by one, or each while the one before is in flight. Such a step is computed
when it begins, or only when it is over: what is decided meanwhile must not touch what it uses.
"""

from typing import ClassVar, NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from reference_engine.config import EngineConfig
from reference_engine.core.request import FinishReason, Request, Sampling, Status
from reference_engine.core.scheduler import Scheduler
from reference_engine.core.step import StepPlan
from tests.reference_engine.conftest import end

NUM_BLOCKS = 8
BLOCK_SIZE = 2
BUDGET = 16
EOS, WORD = 2, 300

UNCHUNKED = {
    "enable_chunked_prefill": False,
    "long_prefill_token_threshold": 0,
    "max_num_partial_prefills": 1,
}

CONFIGS = st.builds(
    lambda is_chunked, **kwargs: EngineConfig(**(kwargs if is_chunked else kwargs | UNCHUNKED)),
    is_chunked=st.booleans(),
    max_num_seqs=st.integers(1, 4),
    num_blocks=st.just(NUM_BLOCKS),
    block_size=st.just(BLOCK_SIZE),
    max_model_len=st.just(16),
    max_num_batched_tokens=st.just(BUDGET),
    scheduling_policy=st.sampled_from(["fcfs", "priority"]),
    victim=st.sampled_from(["policy", "rebuild-cost"]),
    long_prefill_token_threshold=st.sampled_from([0, 3]),
    max_num_partial_prefills=st.integers(0, 2),
    preemption=st.sampled_from(["recompute", "swap", "swap", "swap"]),
    swap_space_blocks=st.sampled_from([3, 20]),
    watermark=st.sampled_from([0.0, 0.3, 0.99]),
    reserve_full_isl=st.booleans(),
    enable_prefix_caching=st.booleans(),
    reclaim=st.sampled_from(["retain", "immediate"]),
    force_reclaim_above=st.sampled_from([0.5, 1.0]),
    async_scheduling=st.sampled_from([False, False, True]),
)


class Flight(NamedTuple):
    """A step in flight, with the first token, their number, and the blocks of each request as it
    began. `ended`: requests to be freed when it is over.
    """

    plan: StepPlan
    spans: list[tuple[Request, int, int, list[int]]]
    ended: list[Request]

    @classmethod
    def of(cls, plan: StepPlan) -> "Flight":
        spans = [
            (request, request.num_computed_tokens, num_tokens, request.block_table)
            for request, num_tokens in plan.scheduled.items()
        ]
        return cls(plan, spans, [])


class Memory:
    """The tokens whose keys and values a runner would have in each slot, there and on the host.

    All slots look computed at first, by a token that no request has.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.blocks = [[-1] * BLOCK_SIZE for _ in range(config.num_blocks)]
        self.host = [[-1] * BLOCK_SIZE for _ in range(config.host_blocks)]

    def execute(self, flight: Flight) -> None:
        plan = flight.plan
        assert not (plan.swap_out and plan.swap_in)
        for block, on_host in plan.swap_out:
            self.host[on_host] = list(self.blocks[block])
        for on_host, block in plan.swap_in:
            self.blocks[block] = list(self.host[on_host])
        for request, first, num_tokens, table in flight.spans:
            for at in range(first, first + num_tokens):
                self.blocks[table[at // BLOCK_SIZE]][at % BLOCK_SIZE] = request.token_ids[at]
        for request, first, num_tokens, table in flight.spans:
            known = [token for block in table for token in self.blocks[block]]
            last = first + num_tokens
            assert known[:last] == request.token_ids[:last], f"{request} reads what is not its own"

    def spoil(self, flight: Flight) -> None:
        """The step has failed: whatever it was to write holds what nobody can use."""
        for _, on_host in flight.plan.swap_out:
            self.host[on_host] = [-1] * BLOCK_SIZE
        for _, block in flight.plan.swap_in:
            self.blocks[block] = [-1] * BLOCK_SIZE
        for _, first, num_tokens, table in flight.spans:
            for at in range(first, first + num_tokens):
                self.blocks[table[at // BLOCK_SIZE]][at % BLOCK_SIZE] = -1

    def import_from(self, request: Request) -> None:
        """The tokens that another worker has computed."""
        computed = request.token_ids[: request.num_computed_tokens]
        for at, token in enumerate(computed):
            self.host[request.host_table[at // BLOCK_SIZE]][at % BLOCK_SIZE] = token


class SchedulerMachine(RuleBasedStateMachine):
    """A small pool and few slots, so that preemption is common; few words, so that prompts meet."""

    operations: ClassVar[int] = 0
    preemptions: ClassVar[int] = 0
    hits: ClassVar[int] = 0
    swaps: ClassVar[int] = 0
    fallbacks: ClassVar[int] = 0
    handed_over: ClassVar[int] = 0
    imports: ClassVar[int] = 0
    spoilt_prefixes: ClassVar[int] = 0
    spoilt_copies: ClassVar[int] = 0
    planned_ahead: ClassVar[int] = 0
    freed_after_a_flight: ClassVar[int] = 0
    grown_while_preempted: ClassVar[int] = 0

    @initialize(config=CONFIGS)
    def start(self, config: EngineConfig) -> None:
        self.config = config
        self.is_ahead = config.async_scheduling
        self.flight: Flight | None = None
        self.is_computed = False
        self.memory = Memory(config)
        self.scheduler = Scheduler(config, frozenset({EOS}))
        self.added = 0
        self.finished = 0
        self.sampled = 0
        self.all: list[Request] = []

    @rule(
        num_prompt=st.integers(1, 12),
        word=st.sampled_from([WORD, WORD + 1]),
        max_tokens=st.integers(1, 12),
        priority=st.integers(-1, 1),
    )
    def add(self, num_prompt: int, word: int, max_tokens: int, priority: int) -> None:
        self.added += 1
        sampling = Sampling(max_tokens=max_tokens)
        name = f"r{self.added}"
        request = Request(name, [word] * num_prompt, sampling, priority=priority)
        self.all.append(request)
        self.scheduler.add(request)

    @precondition(lambda self: not self.is_ahead)
    @rule(
        num_prompt=st.integers(1, 12),
        num_answer=st.integers(1, 3),
        word=st.sampled_from([WORD, WORD + 1]),
        has_blocks=st.booleans(),
    )
    def take_over(self, num_prompt: int, num_answer: int, word: int, has_blocks: bool) -> None:
        self.added += 1
        answer = [WORD + 2] * num_answer
        name, sampling = f"r{self.added}", Sampling(max_tokens=4)
        request = Request(name, [word] * num_prompt, sampling, answer=answer)
        self.all.append(request)
        if self.scheduler.take_over(request, has_blocks=has_blocks):
            self.memory.import_from(request)
            SchedulerMachine.imports += 1

    @precondition(lambda self: not self.is_ahead)
    @precondition(lambda self: any(can_be_handed_over(one) for one in self.scheduler.running))
    @rule(stays=st.booleans())
    def hand_over(self, stays: bool) -> None:
        able = [one for one in self.scheduler.running if can_be_handed_over(one)]
        for request in able[stays and len(able) > 1 :]:
            self.scheduler.hand_over(request)
            SchedulerMachine.handed_over += 1

    @precondition(lambda self: self.leaving())
    @rule()
    def see_one_handed_over(self) -> None:
        request = self.leaving()[0]
        assert self.scheduler.finish(request.request_id, None) is request
        self.scheduler.free(request)
        self.finished += 1

    def leaving(self) -> list[Request]:
        requests = self.scheduler.requests.values()
        return [one for one in requests if one.status is Status.HANDING_OVER]

    @rule(data=st.data(), is_freed_later=st.booleans())
    def abort(self, data: st.DataObject, is_freed_later: bool) -> None:
        request_id = f"r{data.draw(st.integers(0, self.added + 1))}"
        was_live = request_id in self.scheduler.requests
        request = self.scheduler.finish(request_id, FinishReason.ABORT)
        assert (request is not None) == was_live
        if request is not None and not is_freed_later:
            self.free(request)
        self.finished += was_live

    def free(self, request: Request) -> None:
        """At once, or when the step in flight is over, if that uses its blocks."""
        if self.flight is not None and self.flight.plan.uses(request):
            self.flight.ended.append(request)
            SchedulerMachine.freed_after_a_flight += 1
        else:
            self.scheduler.free(request)

    @rule(token=st.sampled_from([EOS, WORD]), is_early=st.booleans())
    def step(self, token: int, is_early: bool) -> None:
        self.take(self.decide(), token, is_early=is_early)

    def take(self, plan: StepPlan, token: int, *, is_early: bool) -> None:
        if not self.is_ahead:
            self.launch(plan, is_early=is_early)
        for request in self.see_over(token, plan):
            self.free(request)
        self.scheduler.check_integrity()

    @precondition(lambda self: not self.is_ahead)
    @rule(data=st.data(), token=st.sampled_from([EOS, WORD]))
    def step_with_an_abort_in_flight(self, data: st.DataObject, token: int) -> None:
        plan = self.decide()
        self.launch(plan, is_early=True)
        self.flight = None  # so that blocks are given back although the step is not over
        self.abort(data, is_freed_later=False)
        self.flight = Flight(plan, [], [])
        for request in self.see_over(token, plan):
            self.free(request)

    @rule(is_one_aborted=st.booleans(), patience=st.integers(0, 4))
    def step_that_fails(self, is_one_aborted: bool, patience: int) -> None:
        """Or a later one, if that is to copy something back."""
        plan = self.decide()
        while patience and not plan.swap_in:
            self.take(plan, WORD, is_early=False)
            plan, patience = self.decide(), patience - 1
        if self.is_ahead and plan.swap_in:
            self.take(plan, WORD, is_early=False)
            plan = self.decide()
        if not self.is_ahead:
            self.launch(plan, is_early=False)
        flight = self.flight
        if flight is None:
            self.launch(plan, is_early=True)
            return
        self.memory.spoil(flight)
        index = self.scheduler.kv_cache.pool.index
        SchedulerMachine.spoilt_prefixes += any(block in index for _, block in flight.plan.swap_in)
        if is_one_aborted and flight.plan.scheduled:
            name = next(reversed(flight.plan.scheduled)).request_id
            self.finished += end(self.scheduler, name) is not None
        self.flight = None
        lost = self.scheduler.give_up(flight.plan)
        self.give_back(flight)
        for request in lost:
            assert end(self.scheduler, request.request_id, FinishReason.ERROR) is not None
            self.finished += 1

    @precondition(lambda self: self.scheduler.running and not self.is_ahead)
    @rule(data=st.data(), is_copied=st.booleans())
    def preempt(self, data: st.DataObject, is_copied: bool) -> None:
        victim = data.draw(st.sampled_from(self.scheduler.running))
        plan = StepPlan(step=self.scheduler.counters.steps)
        self.scheduler._preempt(victim, plan)
        if is_copied:
            self.memory.execute(Flight.of(plan))
        else:
            self.memory.spoil(Flight.of(plan))
            assert not self.scheduler.give_up(plan)
            SchedulerMachine.spoilt_copies += len(plan.swap_out) > 0

    @precondition(lambda self: self.scheduler.unfreed)
    @rule()
    def free_one(self) -> None:
        waits = [] if self.flight is None else self.flight.ended
        free = [one for one in self.scheduler.unfreed.values() if one not in waits]
        if free:
            self.free(free[0])

    @invariant()
    def nothing_is_lost(self) -> None:
        SchedulerMachine.operations += 1
        self.scheduler.check_integrity()
        assert len(self.scheduler.requests) == self.added - self.finished
        counters = self.scheduler.counters
        ended = sum(counters.finished.values()) + counters.handed_over_requests
        assert ended == self.finished + len(self.leaving())
        assert counters.generated_tokens == self.sampled
        assert counters.recomputed_tokens == sum(r.num_recomputed_tokens for r in self.all)
        assert counters.preemptions == sum(r.num_preemptions for r in self.all)

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        while self.flight is not None or self.scheduler.unfreed:
            self.free_one()
            self.step(WORD, is_early=False)
        while self.leaving():
            self.see_one_handed_over()
        self.see_all_served()
        self.scheduler.check_idle()
        SchedulerMachine.preemptions += self.scheduler.counters.preemptions
        SchedulerMachine.hits += self.scheduler.counters.prefix_hit_tokens
        SchedulerMachine.swaps += self.scheduler.counters.swapped_in_requests
        if self.config.preemption == "swap":
            SchedulerMachine.fallbacks += sum(one.num_lost_tokens > 0 for one in self.all)

    def see_all_served(self) -> None:
        steps_needed = 0
        while self.scheduler.has_work or self.flight is not None:
            self.step(WORD, is_early=steps_needed % 2 == 0)
            steps_needed += 1
            assert steps_needed < 100 * (self.added + 1), "a request is never served"

    def decide(self) -> StepPlan:
        scheduler = self.scheduler
        plan = scheduler.schedule()
        scheduler.check_integrity()
        assert plan.num_tokens + plan.budget == BUDGET
        blocked = scheduler.has_work and not (plan.scheduled or plan.preempted)
        assert not blocked or scheduler.unfreed or self.leaving() or self.flight
        if plan.budget:
            self.see_that_nothing_could_take_more(plan)
        SchedulerMachine.planned_ahead += self.flight is not None
        return plan

    def see_that_nothing_could_take_more(self, plan: StepPlan) -> None:
        """Budget is left: each running request has its chunk, and the next in the queue waits for
        another reason. Its turn comes first, whatever waits behind it.
        """
        scheduler, config = self.scheduler, self.config
        for request in scheduler.running:
            if request.num_tokens + request.num_placeholders == request.max_tokens_in_all:
                assert request not in plan.scheduled, "its last token is in flight"
            else:
                most = min(request.num_owed_tokens, config.max_chunk_tokens)
                assert plan.scheduled[request] == most
        if plan.preempted or not scheduler.waiting or len(scheduler.running) == config.max_num_seqs:
            return
        head = scheduler.waiting.head
        is_partial = head.num_tokens > min(config.max_chunk_tokens, plan.budget)
        if is_partial and not config.enable_chunked_prefill:
            return
        if is_partial and len(plan.partial) == config.max_num_partial_prefills > 0:
            return
        kept = config.watermark_blocks if scheduler.running else 0
        if config.reserve_full_isl:
            kept += sum(blocks_of(one) - len(one.block_table) for one in plan.partial)
        assert blocks_of(head) > scheduler.kv_cache.pool.num_free - kept, f"{head} could run"

    def launch(self, plan: StepPlan, *, is_early: bool) -> None:
        if plan.is_empty:
            return
        self.flight, self.is_computed = Flight.of(plan), is_early
        if is_early:
            self.memory.execute(self.flight)

    def see_over(self, token: int, plan: StepPlan) -> list[Request]:
        """The step in flight is over, and the planned one begins, if it has not. Returns the
        requests that ended with it.
        """
        flight, self.flight, ended = self.flight, None, list[Request]()
        if flight is not None:
            if not self.is_computed:
                self.memory.execute(flight)
            names = [request.request_id for request in flight.plan.sampling]
            self.sampled += len(names)
            for request in self.scheduler.update(flight.plan, dict.fromkeys(names, token)):
                SchedulerMachine.grown_while_preempted += request.status is Status.PREEMPTED
                if request.finish_reason is not None:
                    found = self.scheduler.finish(request.request_id, request.finish_reason)
                    assert found is request
                    self.finished += 1
                    ended.append(request)
            self.give_back(flight)
        if self.is_ahead:
            self.launch(plan, is_early=self.is_computed)
        return ended

    def give_back(self, flight: Flight) -> None:
        for request in flight.ended:
            self.scheduler.free(request)
        flight.ended.clear()


def can_be_handed_over(request: Request) -> bool:
    return request.num_generated > 0 and request.num_owed_tokens == 1


def blocks_of(request: Request) -> int:
    return -(-request.num_tokens // BLOCK_SIZE)


def test_ten_thousand_random_operations() -> None:
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=500, stateful_step_count=60, deadline=None, derandomize=True
        ),
    )
    # Hypothesis draws other examples where other modules are imported: the floors leave room.
    assert SchedulerMachine.operations >= 10_000
    assert SchedulerMachine.preemptions >= 200, "the pool was small enough to matter"
    assert SchedulerMachine.hits >= 500, "and the prompts were alike enough"
    assert SchedulerMachine.swaps >= 50
    assert SchedulerMachine.fallbacks >= 5, "the host was full at times"
    assert SchedulerMachine.handed_over >= 20, "only steps that are planned in turn hand over"
    assert SchedulerMachine.imports >= 20
    assert SchedulerMachine.spoilt_prefixes >= 1
    assert SchedulerMachine.spoilt_copies >= 5
    assert SchedulerMachine.planned_ahead >= 300
    assert SchedulerMachine.freed_after_a_flight >= 10
    assert SchedulerMachine.grown_while_preempted >= 5
