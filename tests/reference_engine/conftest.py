"""Builders of a scheduler and of requests, a step with or without a model, and a virtual clock."""

import asyncio
import selectors
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any
from zlib import crc32

import pytest

from reference_engine.config import EngineConfig
from reference_engine.core.request import FinishReason, Request, Sampling
from reference_engine.core.scheduler import Scheduler
from reference_engine.core.step import Sampled, StepPlan
from reference_engine.model.runners import Runner

EOS = 2
WORD = 300


SIZES: dict[str, Any] = {
    "max_num_seqs": 4,
    "num_blocks": 64,
    "block_size": 4,
    "max_model_len": 64,
    "max_num_batched_tokens": 16,
}


def make_scheduler(**settings: Any) -> Scheduler:
    return Scheduler(EngineConfig(**SIZES | settings), frozenset({EOS}))


def make_request(
    request_id: str,
    *,
    num_prompt: int = 4,
    max_tokens: int = 8,
    ignore_eos: bool = False,
    priority: int = 0,
    prompt: str | None = None,
    answer: Sequence[int] = (),
) -> Request:
    """Prompts of equal length are alike if `prompt` says the same word; by default none are."""
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=ignore_eos)
    word = WORD + crc32((prompt or request_id).encode()) % 1000
    return Request(request_id, [word] * num_prompt, sampling, priority=priority, answer=answer)


def end(
    scheduler: Scheduler, request_id: str, reason: FinishReason = FinishReason.ABORT
) -> int | None:
    """End a request and free its blocks; how many, or None if there is no such request."""
    request = scheduler.finish(request_id, reason)
    return None if request is None else scheduler.free(request)


def run_step(scheduler: Scheduler, token: int = WORD, runner: Runner | None = None) -> StepPlan:
    """Schedule, compute or pretend to, update, end what ended by itself; integrity checked."""
    plan = scheduler.schedule()
    sampled = {request.request_id: token for request in plan.sampling}
    if runner is not None:
        sampled = {} if plan.is_empty else runner.launch(plan)().tokens
    for request in scheduler.update(plan, sampled):
        if request.finish_reason is not None:
            end(scheduler, request.request_id, request.finish_reason)
    scheduler.check_integrity()
    return plan


def run_to_the_end(scheduler: Scheduler, runner: Runner | None = None) -> None:
    while scheduler.has_work:
        run_step(scheduler, runner=runner)


class StepsAhead:
    """Steps of which the next one is planned while one is computed: by a runner's thread, or made
    up.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner | None = None) -> None:
        self._scheduler, self._runner = scheduler, runner
        self._thread = ThreadPoolExecutor(1)
        self.in_flight: tuple[StepPlan, Future[Sampled]] | None = None

    def step(self, token: int = WORD) -> StepPlan:
        """Plans a step, ends the one in flight, and begins the planned one, which it returns."""
        scheduler, plan = self._scheduler, self._scheduler.schedule()
        scheduler.check_integrity()
        if self.in_flight is not None:
            over, computing = self.in_flight
            for request in scheduler.update(over, computing.result().tokens):
                if request.finish_reason is not None:
                    end(scheduler, request.request_id, request.finish_reason)
        self.in_flight = None
        if not plan.is_empty:
            made_up = {request.request_id: token for request in plan.sampling}
            compute = partial(Sampled, made_up, {})
            computing = self._thread.submit(self._runner.launch(plan) if self._runner else compute)
            self.in_flight = plan, computing
        scheduler.check_integrity()
        return plan

    def run_to_the_end(self) -> None:
        while self._scheduler.has_work or self.in_flight is not None:
            self.step()


class _ImpatientSelector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        events = super().select(None if timeout is None else 0)
        if timeout is not None and not events:
            self.now_s += timeout
        return events


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """With nothing to do, its clock jumps ahead: timers fire in order, at once.

    For tests without sockets. Waiting for nothing hangs.
    """

    def __init__(self) -> None:
        self._impatient = _ImpatientSelector()
        super().__init__(self._impatient)

    def time(self) -> float:
        return self._impatient.now_s


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """Time is virtual, but where a module's own fixture says otherwise."""
    return "asyncio", {"loop_factory": VirtualTimeLoop}


def scheduled(plan: StepPlan) -> dict[str, int]:
    return {request.request_id: num_tokens for request, num_tokens in plan.scheduled.items()}


def names(requests: Iterable[Request]) -> list[str]:
    return [request.request_id for request in requests]
