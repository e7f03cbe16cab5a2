"""Continuous batching with one token budget a step.

In each step every request is owed the tokens that it has and the cache has not; the scheduler gives
each request some of what it is owed, out of one budget. Running requests come first, in order of
admission; then waiting requests are admitted while slots, budget and blocks last. A long prompt is
thus computed in chunks, together with the other requests' next tokens. When a running request finds
no block, a victim is preempted: it loses its blocks, goes to the front of the queue and recomputes,
unless the host has room for a copy of them. Most steps are plain decodes: one more token, into a
block that the request has. A request is looked at closely only when it has no plain decode left,
and the result of a step only for the requests in its plan's `closely`.

Every ending goes through `finish`, and then through `free`, which gives its blocks back. Both may
come at any moment, also between `schedule` and `update`: the step's result for a request that has
ended is dropped, and its token counted. One thread calls the public methods.

The next step may be planned before the result of the one in flight is known: `schedule` twice, then
`update` for the first plan. Placeholders stand for the tokens that are to come. Steps are computed
in the order of their plans, so a block may change hands in the plan after one that writes to it.

A request that another worker will continue leaves the batch by `hand_over`. When the other worker
has it, it ends here like any other, but with no finish reason. The other worker admits it by
`take_over`.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

from reference_engine.config import EngineConfig
from reference_engine.core.accounting import Counters
from reference_engine.core.kv_cache import KVCache
from reference_engine.core.request import FinishReason, Request, Status
from reference_engine.core.step import StepPlan


class Scheduler:
    """`running` is in order of admission. `requests` has all that have not ended, and `unfreed`
    those that have ended and still hold their blocks. A fault may change `num_slots`.

    `_in_flight`: the plans whose results are not known, the oldest first; two while the next step
    is planned ahead. `_has_placeholders`: whether requests count the tokens of a step in flight.
    """

    def __init__(self, config: EngineConfig, eos_token_ids: frozenset[int]) -> None:
        self._config = config
        self._max_chunk_tokens = config.max_chunk_tokens
        self._max_model_len = config.max_model_len
        self._eos_token_ids = eos_token_ids
        self._num_arrived = 0
        self.num_slots = config.max_num_seqs
        self.counters = Counters()
        self.kv_cache = KVCache(config, self.counters)
        self._by_priority = config.scheduling_policy == "priority"
        self.waiting: FcfsQueue | PriorityQueue = (
            PriorityQueue() if self._by_priority else FcfsQueue()
        )
        self.running: list[Request] = []
        self.requests: dict[str, Request] = {}
        self.unfreed: dict[str, Request] = {}
        self._in_flight: list[StepPlan] = []
        self._has_placeholders = False

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    @property
    def next_step(self) -> int:
        return self.counters.steps + len(self._in_flight) + 1

    @property
    def num_slots_used(self) -> int:
        return self._config.max_num_seqs - self.num_slots + len(self.running)

    def add(self, request: Request) -> None:
        if request.request_id in self.requests or request.request_id in self.unfreed:
            raise ValueError(f"request id {request.request_id} is in use")
        self._num_arrived += 1
        request.arrival = self._num_arrived
        wanted = request.num_prompt_tokens + request.sampling.max_tokens
        request.max_tokens_in_all = min(wanted, self._max_model_len)
        self.requests[request.request_id] = request
        self.waiting.push(request)

    def take_over(self, request: Request, *, has_blocks: bool) -> bool:
        """Add a request of which another worker has computed all tokens but the newest.

        True if the tokens' blocks are to be copied to its `host_table`. Without blocks, or without
        room for them on the host, the tokens are computed again.
        """
        self.add(request)
        self.counters.taken_over_requests += 1
        request.num_computed_tokens = request.num_tokens - 1
        if has_blocks and self.kv_cache.try_keep_on_host(request):
            return True
        request.lose_computed()
        return False

    def hand_over(self, request: Request) -> None:
        """Takes it and its blocks out of the batch, between two steps."""
        self._leave_batch(request)
        request.move_to(Status.HANDING_OVER)
        self.counters.handed_over_requests += 1

    def schedule(self) -> StepPlan:
        for ahead in self._in_flight:
            self._look_ahead(ahead)
        plan = StepPlan(self.next_step, budget=self._config.max_num_batched_tokens)
        self._schedule_running(plan)
        if not plan.preempted:
            self._admit_waiting(plan)
        assert plan.budget >= 0
        assert len(self.running) <= self.num_slots
        if not plan.is_empty:
            self._in_flight.append(plan)
        return plan

    def _look_ahead(self, plan: StepPlan) -> None:
        """Let its requests look as if the step were over, with placeholders for its tokens."""
        self._has_placeholders = True
        for request, num_tokens in plan.scheduled.items():
            if request.status is Status.RUNNING:
                request.num_in_flight, request.num_placeholders = num_tokens, 1
        for request in plan.partial:
            request.num_placeholders = 0

    def update(
        self, plan: StepPlan, sampled: Mapping[str, int], *, with_plain: bool = True
    ) -> list[Request]:
        """Record the result of the oldest step in flight: `sampled` maps request ids to their new
        token.

        Returns the requests that got a token; without `with_plain`, plain decodes are left out. If
        the token ends its request (end of sequence, length), `finish_reason` is set, and the caller
        passes it to `finish`. A request that was preempted meanwhile keeps its token.
        """
        self._is_over(plan)
        grown, closely = list[Request](), plan.closely
        ends, size = self._eos_token_ids, self.kv_cache.block_size
        for request in plan.scheduled:
            is_plain = not closely or request not in closely
            if is_plain:  # nearly always, so this path is short
                request.num_computed_tokens = now = request.num_computed_tokens + 1
                if not now % size:
                    self.kv_cache.remember(request, now - 1)
            elif request.status is Status.RUNNING:
                self._count_computed(request, plan.scheduled[request])
            elif request.status is Status.FINISHED:  # during the step: its token is dropped
                request.num_dropped += request.request_id in sampled
                continue
            if (token := sampled.get(request.request_id)) is None:
                continue
            request.token_ids.append(token)
            if token in ends or not is_plain:
                request.finish_reason = self._natural_end(request)
                grown.append(request)
            elif with_plain:
                grown.append(request)
        self.counters.generated_tokens += len(sampled)
        return grown

    def _count_computed(self, request: Request, num_tokens: int) -> None:
        before = request.num_computed_tokens
        request.num_computed_tokens += num_tokens
        self.counters.count_computed(request, before)
        self.kv_cache.remember(request, before)

    def give_up(self, plan: StepPlan) -> list[Request]:
        """Record that the step came to nothing, in place of `update`; a plan behind it is dropped.

        Returns the requests of these plans, which the caller passes to `finish`: what their blocks
        hold of this step is undefined. The other requests can continue.
        """
        plans = [plan, *(one for one in self._in_flight if one is not plan)]
        for one in plans:
            self.kv_cache.forget_copies(one)
        self._is_over(plan)
        self._in_flight.clear()
        lost = dict.fromkeys(request for one in plans for request in one.scheduled)
        return [request for request in lost if request.status is not Status.FINISHED]

    def _is_over(self, plan: StepPlan) -> None:
        if self._has_placeholders:
            self._has_placeholders = False
            for request in plan.scheduled:
                request.num_in_flight = request.num_placeholders = 0
        self._in_flight = [one for one in self._in_flight if one is not plan]
        self.counters.steps = plan.step
        self.counters.slot_steps += len(plan.scheduled)

    def finish(self, request_id: str, reason: FinishReason | None) -> Request | None:
        """End a request in whatever state it is; None if there is no such request.

        It gives back its batch slot (its place in `running`) or leaves the queue at once, and holds
        its blocks until `free`. It has no `reason` if another worker has taken it over.
        """
        request = self.requests.pop(request_id, None)
        if request is None:
            return None
        if request.status is Status.RUNNING:
            self._leave_batch(request)
        elif request.status is not Status.HANDING_OVER:
            self.waiting.remove(request)
        if request.status is not Status.HANDING_OVER:  # else the other worker counts its end
            assert reason is not None
            self.counters.count_finished(request, reason)
        request.move_to(Status.FINISHED)
        request.finish_reason = reason
        self.unfreed[request_id] = request
        return request

    def _leave_batch(self, request: Request) -> None:
        self.running.remove(request)
        for plan in self._in_flight:
            plan.look_closely_at(request)

    def free(self, request: Request) -> int:
        del self.unfreed[request.request_id]
        if request.finish_reason is not FinishReason.ABORT:
            return self.kv_cache.free(request)
        return self.kv_cache.reclaim(request)

    def check_integrity(self, lost_blocks: Sequence[int] = ()) -> None:
        waiting = list(self.waiting)
        leaving = [one for one in self.requests.values() if one.status is Status.HANDING_OVER]
        assert all(request.status is Status.RUNNING for request in self.running)
        assert all(r.status in (Status.WAITING, Status.PREEMPTED) for r in waiting)
        assert not any(request.block_table for request in waiting), "a waiting request holds blocks"
        assert not any(request.host_table for request in self.running), "resumed, but on the host"
        for request in self.running:
            if request.num_planned_tokens < request.plain_decode_until:
                limit = request.plain_decode_limit(self.kv_cache.block_size)
                assert request.plain_decode_until == limit
                assert request.num_owed_tokens == 1
        assert len(self.running) + len(waiting) + len(leaving) == len(self.requests)
        for request in leaving:
            assert request.num_owed_tokens == 1, "handed over before all was computed"
            assert not self.kv_cache.num_missing(request, request.num_computed_tokens)
        holders = [*self.requests.values(), *self.unfreed.values()]
        self.kv_cache.pool.check_integrity([*(r.block_table for r in holders), lost_blocks])
        self.kv_cache.host.check_integrity([r.host_table for r in holders])
        for request in waiting:
            num_kept = len(request.host_table) * self.kv_cache.block_size
            assert request.num_computed_tokens <= num_kept, "computed, but kept nowhere"

    def check_idle(self, lost_blocks: Sequence[int] = ()) -> None:
        assert not self.requests
        assert not self.running
        assert not self.waiting
        unfreed = self.unfreed.values()
        held = sum(len(request.block_table) for request in unfreed) + len(lost_blocks)
        self.kv_cache.pool.check_sums(most_held=held)
        self.kv_cache.host.check_sums(most_held=sum(len(one.host_table) for one in unfreed))

    def _schedule_running(self, plan: StepPlan) -> None:
        scheduled, budget = plan.scheduled, plan.budget
        for request in tuple(self.running):  # a copy, since some may be preempted
            if budget == 0:
                break
            if request.num_computed_tokens + request.num_in_flight < request.plain_decode_until:
                scheduled[request] = 1
                budget -= 1
            else:
                plan.budget = budget
                self._schedule_one(request, plan)
                budget = plan.budget
        plan.budget = budget

    def _schedule_one(self, request: Request, plan: StepPlan) -> None:
        planned = request.num_planned_tokens
        if planned == request.max_tokens_in_all - 1:
            return  # its last token is in flight
        owed = request.num_owed_tokens
        num_tokens = owed if owed == 1 else min(owed, self._max_chunk_tokens, plan.budget)
        if not self._make_room(request, num_tokens, plan):
            return
        plan.scheduled[request] = num_tokens
        plan.budget -= num_tokens
        if num_tokens < owed:
            plan.partial.append(request)
        request.plain_decode_until = request.plain_decode_limit(self.kv_cache.block_size)
        if planned >= request.plain_decode_until:
            plan.closely.add(request)

    def _make_room(self, request: Request, num_tokens: int, plan: StepPlan) -> bool:
        if request in plan.preempted:  # for the sake of a request before it in this step
            return False
        while not self.kv_cache.try_grow(request, num_tokens):
            victim = self._choose_victim()
            self._preempt(victim, plan)
            if victim is request:
                return False
        return True

    def _choose_victim(self) -> Request:
        """The running request that gives up its blocks; it may be the growing one itself.

        With `rebuild-cost` it is, among the least important, the one with the fewest computed
        tokens in blocks of its own. The most expensive one is never chosen while there is another,
        so one request always gets to its end.
        """
        if self._config.victim == "rebuild-cost":
            return max(self.running, key=self._rebuild_rank)
        return min(self.running, key=_urgency) if self._by_priority else self.running[-1]

    def _rebuild_rank(self, request: Request) -> tuple[int, int, int]:
        priority = request.priority if self._by_priority else 0
        return priority, -self.kv_cache.rebuild_cost(request), request.arrival

    def _preempt(self, victim: Request, plan: StepPlan) -> None:
        """What a step in flight computes for the victim is there before this plan's copies."""
        plan.take_out(victim)
        self._leave_batch(victim)
        before = victim.num_computed_tokens
        victim.num_computed_tokens, victim.num_in_flight = victim.num_planned_tokens, 0
        self.counters.count_computed(victim, before)
        if copies := self.kv_cache.swap_out(victim):
            plan.swap_out += copies
            plan.swapped.append(victim)
        else:
            victim.lose_computed()
        self.kv_cache.give_back(victim)
        self.counters.preemptions += 1
        victim.num_preemptions += 1
        victim.move_to(Status.PREEMPTED)
        self.waiting.push_front(victim)
        plan.preempted.append(victim)

    def _admit_waiting(self, plan: StepPlan) -> None:
        while self.waiting and plan.budget > 0 and len(self.running) < self.num_slots:
            request = self.waiting.head
            prefix = self.kv_cache.find_prefix(request)
            num_kept = self.kv_cache.num_kept(request, prefix)
            num_tokens = self._first_chunk(request.num_tokens - num_kept, plan)
            if num_tokens == 0 or not self._fits(request, prefix, num_kept + num_tokens, plan):
                return
            self.waiting.remove(request)
            if request.host_table and request.status is Status.PREEMPTED:
                plan.swapped.append(request)  # before `admit`, which empties the host table
            plan.swap_in += self.kv_cache.admit(request, prefix, num_tokens)
            (plan.admitted if request.status is Status.WAITING else plan.resumed).append(request)
            request.move_to(Status.RUNNING)
            self.running.append(request)
            plan.scheduled[request] = num_tokens
            plan.closely.add(request)
            plan.budget -= num_tokens
            if num_tokens < request.num_owed_tokens:
                plan.partial.append(request)

    def _first_chunk(self, owed: int, plan: StepPlan) -> int:
        num_tokens = min(owed, self._max_chunk_tokens, plan.budget)
        if num_tokens == owed:
            return owed
        most_partial = self._config.max_num_partial_prefills or len(plan.partial) + 1
        may_begin = self._config.enable_chunked_prefill and len(plan.partial) < most_partial
        return num_tokens if may_begin else 0

    def _fits(self, request: Request, prefix: list[int], covered: int, plan: StepPlan) -> bool:
        """Whether there are blocks to admit a request and leave the watermark to running ones.

        `covered`: the tokens that its blocks must hold at the end of the step. With
        `reserve_full_isl` the whole sequence must fit, in addition to the blocks that the prompts
        in progress still need.
        """
        cache, needed = self.kv_cache, 0
        if self._config.reserve_full_isl:
            covered = request.num_tokens
            needed += sum(cache.num_missing(other, other.num_tokens) for other in plan.partial)
        if self.running:
            needed += self._config.watermark_blocks
        return needed + cache.blocks_to_admit(prefix, covered) <= cache.pool.num_free

    def _natural_end(self, request: Request) -> FinishReason | None:
        is_end = request.token_ids[-1] in self._eos_token_ids
        if is_end and not request.sampling.ignore_eos:
            return FinishReason.STOP
        is_full = request.num_tokens >= request.max_tokens_in_all
        return FinishReason.LENGTH if is_full else None


class FcfsQueue:
    """First come, first served; a preempted request goes first. No method visits all requests."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    @property
    def head(self) -> Request:
        return next(iter(self))

    def push(self, request: Request) -> None:
        self._requests[request.request_id] = request

    def push_front(self, request: Request) -> None:
        self.push(request)
        self._requests.move_to_end(request.request_id, last=False)

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]


class PriorityQueue:
    """The most important first; equals in order of arrival, so a preempted one goes first."""

    def __init__(self) -> None:
        self._requests: list[Request] = []  # the head last: removing it moves nothing

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return reversed(self._requests)

    @property
    def head(self) -> Request:
        return self._requests[-1]

    def push(self, request: Request) -> None:
        insort(self._requests, request, key=_urgency)

    push_front = push

    def remove(self, request: Request) -> None:
        at = bisect_left(self._requests, _urgency(request), key=_urgency)
        assert self._requests[at] is request
        del self._requests[at]


def _urgency(request: Request) -> tuple[int, int]:
    return -request.priority, -request.arrival
