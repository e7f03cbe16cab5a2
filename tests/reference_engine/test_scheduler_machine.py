"""Random adds, steps and aborts: whatever the order, no block and no request is ever lost."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from reference_engine.config import EngineConfig
from reference_engine.core.scheduler import Scheduler
from reference_engine.request import FinishReason, Request, Sampling


class SchedulerMachine(RuleBasedStateMachine):
    """A small pool and few slots, so that preemption is common."""

    def __init__(self) -> None:
        super().__init__()
        config = EngineConfig(
            max_num_seqs=3,
            num_blocks=8,
            block_size=2,
            max_model_len=16,
            max_num_batched_tokens=5,
        )
        self.scheduler = Scheduler(config, eos_token_id=2)
        self.added = 0
        self.finished = 0

    @rule(num_prompt=st.integers(1, 12), max_tokens=st.integers(1, 12))
    def add(self, num_prompt: int, max_tokens: int) -> None:
        self.added += 1
        sampling = Sampling(max_tokens=max_tokens)
        self.scheduler.add(Request(f"r{self.added}", [300] * num_prompt, sampling))

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = f"r{data.draw(st.integers(0, self.added + 1))}"
        was_live = request_id in self.scheduler.requests
        freed = self.scheduler.finish(request_id, FinishReason.ABORT)
        assert (freed is not None) == was_live
        self.finished += was_live

    @rule(token=st.sampled_from([2, 300]))
    def step(self, token: int) -> None:
        plan = self.scheduler.schedule()
        assert plan.num_tokens <= 5
        assert plan.scheduled or not self.scheduler.has_work or plan.preempted
        sampled = {s.request.request_id: token for s in plan.scheduled if s.samples}
        for request in self.scheduler.update(plan, sampled):
            if request.finish_reason is not None:
                self.scheduler.finish(request.request_id, request.finish_reason)
                self.finished += 1

    @invariant()
    def nothing_is_lost(self) -> None:
        self.scheduler.check_integrity()
        assert len(self.scheduler.requests) == self.added - self.finished
        assert sum(self.scheduler.counters.finished.values()) == self.finished

    def teardown(self) -> None:
        for request_id in list(self.scheduler.requests):
            self.scheduler.finish(request_id, FinishReason.ABORT)
        assert self.scheduler.kv_cache.pool.num_free == 8


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
