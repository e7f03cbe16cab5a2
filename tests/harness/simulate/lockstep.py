"""A live engine and a replica that get equal commands at equal boundaries, compared step by step.

The live one is the worker's own: its inbox, its runner, its loop, with all outputs and texts; only
its clock is the test's. Commands also come while a step computes, as they do from reading threads.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, NoReturn

from harness.simulate.replica import FRONTEND, Replica, StepLags
from reference_engine.config import EngineConfig, StepCost
from reference_engine.context import CancelReason, Signal
from reference_engine.core.request import Request, Sampling, Status
from reference_engine.core.scheduler import Scheduler
from reference_engine.faults import Faults
from reference_engine.model.runners import SimulatedRunner
from reference_engine.protocol import AddRequest, StepRecord, StepReport
from reference_engine.worker.engine_io import EngineIO, FrontendShare
from reference_engine.worker.faults import FaultIO, FaultyEngine
from reference_engine.worker.inbox import Heard, Inbox, Requests

START_NS = 1_000_000
COST = StepCost(fixed_s=0.003, prefill_token_s=1e-5, decode_token_s=1e-4, context_token_s=1e-6)
NAME = "worker-0"


def facts_of(request: Request) -> tuple[Any, ...]:
    """All that decisions rest on."""
    return (
        request.request_id,
        request.status,
        request.num_computed_tokens,
        request.num_cached_tokens,
        request.num_tokens,
        request.num_preemptions,
        list(request.block_table),
        list(request.host_table),
    )


def state_of(scheduler: Scheduler) -> dict[str, Any]:
    pool = scheduler.kv_cache.pool
    return {
        "running": [facts_of(request) for request in scheduler.running],
        "waiting": [facts_of(request) for request in scheduler.waiting],
        "slots": scheduler.num_slots,
        "free": pool.num_free,
        "cached": pool.num_cached,
        "retained": set(pool.index.retained),
        "host": scheduler.kv_cache.host.num_free,
        "counters": scheduler.counters,
    }


def step_of(record: StepRecord | None) -> tuple[Any, ...] | None:
    if record is None:
        return None
    tokens = list(record.scheduled.items()), sorted(record.sampled)
    levels = record.num_running, record.num_waiting, record.free_blocks
    return (record.step, record.started_ns, record.ended_ns, *tokens, *levels)


class LiveEngine:
    """`meanwhile` is called in the middle of each step; `boundaries` are the inputs it had."""

    def __init__(self, config: EngineConfig, faults: Faults, meanwhile: Callable[[], None]) -> None:
        self.now_ns = START_NS
        self.boundaries: list[tuple[int, list[Heard]]] = []
        self.report: StepReport | None = None
        self.events: list[Any] = []
        self.inbox = Inbox(self._read_clock)
        self.requests = Requests(FRONTEND, self.inbox, self._read_clock)
        self._meanwhile = meanwhile
        runner = SimulatedRunner(config.step_cost, self._compute)
        self.scheduler = Scheduler(config, runner.tokenizer.eos_token_ids)
        self.engine = FaultyEngine(
            self.scheduler,
            runner,
            EngineIO(
                self._read_clock,
                self._take_report,
                self._hang_up,
                worker=NAME,
                ahead=(lambda compute: compute) if config.async_scheduling else None,
            ),
            faults=faults,
            by=FaultIO(Random(0), sleep=self.pass_time, die=self._die),
        )

    def pass_time(self, seconds: float) -> None:
        self.now_ns += round(seconds * 1e9)

    def take_turn(self) -> None:
        drained = self.inbox.drain(timeout_s=0.0)
        assert drained is not None
        self.boundaries.append(drained)
        self.report, self.events = None, []
        self.engine.step(*drained)

    def _compute(self, seconds: float) -> None:
        began_ns, whole_ns = self.now_ns, round(seconds * 1e9)
        self.now_ns += whole_ns // 2
        self._meanwhile()
        self.now_ns = began_ns + whole_ns

    def _read_clock(self) -> int:
        return self.now_ns

    def _take_report(self, report: StepReport, shares: Mapping[str, FrontendShare]) -> None:
        self.report = report
        self.events = [event for share in shares.values() for event in share.events]

    def _die(self) -> NoReturn:
        raise AssertionError

    def _hang_up(self, _: str, why: str) -> None:
        raise AssertionError(why)


class Lockstep:
    """Random commands from a seed, and both engines after each boundary. `met` counts the states in
    which requests were when they were cancelled."""

    def __init__(self, seed: int, config: EngineConfig, faults: Faults | None = None) -> None:
        faults = faults or Faults()
        self.met: Counter[str] = Counter()
        self._random = Random(seed)
        self._num_sent = 0
        self._ids: list[str] = []
        self.live = LiveEngine(config, faults, self._act)
        self.replica = Replica(
            NAME, config, faults, lags=StepLags(), random=Random(0), start_ns=START_NS
        )

    def run(self, boundaries: int) -> None:
        live, replica = self.live, self.replica
        for _ in range(boundaries):
            if not live.scheduler.has_work or self._random.random() < 0.3:
                self._act()
            live.take_turn()
            boundary_ns, heard = live.boundaries[-1]
            for one in heard:
                replica.hear(one.t_ns, one.command)
            stepped = replica.step(boundary_ns)
            told = None if live.report is None else live.report.step  # a wedged one reports nothing
            assert step_of(stepped.record) == step_of(told)
            assert stepped.events == live.events
            assert state_of(replica.scheduler) == state_of(live.scheduler)

    def _act(self) -> None:
        """Send some requests, and cancel some in whatever state they are."""
        random, requests = self._random, self.live.requests
        for _ in range(random.choice((0, 0, 1, 1, 2))):
            self._num_sent += 1
            name = f"r{self._num_sent}"
            self._ids.append(name)
            requests.add(self._request(name))
        for _ in range(random.choice((0, 0, 0, 1, 2))):
            name = random.choice([*self._ids[-6:], *self.live.scheduler.requests, "unknown"])
            self.met[self._state(name)] += 1
            requests.cancel(name, Signal.KILL, CancelReason.USER_DISCONNECT)

    def _request(self, name: str) -> AddRequest:
        random = self._random
        shared, own = random.choice((0, 8, 20)), random.randint(1, 40)
        return AddRequest(
            request_id=name,
            prompt_token_ids=[5] * shared + [1000 + self._num_sent] + [6] * own,
            sampling=Sampling(max_tokens=random.randint(1, 16), seed=random.getrandbits(32)),
            priority=random.choice((0, 0, 1)),
        )

    def _state(self, name: str) -> str:
        request = self.live.scheduler.requests.get(name)
        if request is None:
            is_new = any(one == name for one in self._ids[-2:])
            return "just sent" if is_new else "finished"
        if request.status is not Status.RUNNING:
            status: str = request.status.value
            return status
        if request.num_generated == 0:
            return "prefill"
        return "last token" if request.num_tokens_left == 1 else "decode"
