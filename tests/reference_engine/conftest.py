"""Builders: a scheduler and requests with keyword defaults, and a step without a model."""

from collections.abc import Callable

import pytest

from reference_engine.config import EngineConfig
from reference_engine.core.scheduler import Scheduler
from reference_engine.core.step import StepPlan
from reference_engine.request import Request, Sampling

EOS = 2
WORD = 300


def make_scheduler(
    *,
    max_num_seqs: int = 4,
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 64,
    max_num_batched_tokens: int = 16,
) -> Scheduler:
    config = EngineConfig(
        max_num_seqs=max_num_seqs,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    return Scheduler(config, EOS)


def make_request(
    request_id: str, *, num_prompt: int = 4, max_tokens: int = 8, ignore_eos: bool = False
) -> Request:
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=ignore_eos)
    return Request(request_id, [WORD] * num_prompt, sampling)


def run_step(scheduler: Scheduler, token: int = WORD) -> StepPlan:
    """Schedule, pretend to compute, update, end what ended by itself; integrity checked."""
    plan = scheduler.schedule()
    sampled = {s.request.request_id: token for s in plan.scheduled if s.samples}
    for request in scheduler.update(plan, sampled):
        if request.finish_reason is not None:
            scheduler.finish(request.request_id, request.finish_reason)
    scheduler.check_integrity()
    return plan


@pytest.fixture
def scheduler_of() -> Callable[..., Scheduler]:
    return make_scheduler


@pytest.fixture
def request_of() -> Callable[..., Request]:
    return make_request


@pytest.fixture
def step() -> Callable[..., StepPlan]:
    return run_step
