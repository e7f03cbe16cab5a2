"""200 canaries: greedy answers do not change, token by token, under any load.

First they are generated undisturbed: eight at a time, in a pool that holds them all. Then under
load: in a pool that is too small, beside requests that come, are cancelled at any moment, and share
the canaries' first prompt tokens. Some canaries are preempted and computed again, some find their
prefix in the cache.
"""

from random import Random

import pytest

from reference_engine.config import EngineConfig
from reference_engine.core.request import Request, Sampling
from reference_engine.core.scheduler import Scheduler
from reference_engine.model.tokenizer import EOS_TOKEN_ID

torch = pytest.importorskip("torch")
from reference_engine.model.torch_runner import TorchRunner  # noqa: E402
from tests.reference_engine.conftest import end, run_step, run_to_the_end  # noqa: E402

CANARIES = 200
ANSWER_TOKENS = 8
GREEDY = Sampling(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)


def canary(number: int) -> Request:
    random = Random(number)
    length = random.randrange(12, 36)
    prompt = [random.randrange(300, 2000) for _ in range(length)]
    return Request(f"canary-{number}", prompt, GREEDY)


def engine(num_blocks: int, max_num_batched_tokens: int) -> tuple[TorchRunner, Scheduler]:
    config = EngineConfig(
        device="cpu",
        num_blocks=num_blocks,
        block_size=8,
        max_model_len=80,
        max_num_batched_tokens=max_num_batched_tokens,
        reserve_full_isl=False,
        batch_invariant=True,
    )
    return TorchRunner(config), Scheduler(config, EOS_TOKEN_ID)


def in_peace() -> list[list[int]]:
    runner, scheduler = engine(num_blocks=200, max_num_batched_tokens=512)
    canaries = [canary(number) for number in range(CANARIES)]
    for request in canaries:
        scheduler.add(request)
    run_to_the_end(scheduler, runner)
    assert scheduler.counters.preemptions == 0
    return [request.token_ids for request in canaries]


def in_trouble() -> tuple[list[Request], Scheduler]:
    (runner, scheduler), random = engine(num_blocks=14, max_num_batched_tokens=48), Random(7)
    canaries = [canary(number) for number in range(CANARIES)]
    others: list[Request] = []
    to_come = list(canaries)
    while scheduler.has_work or to_come:
        if to_come and len(scheduler.waiting) < 4:
            scheduler.add(to_come.pop(0))
            mate = canaries[random.randrange(CANARIES)]
            prompt = mate.token_ids[: random.randrange(8, 20)]
            sampling = Sampling(max_tokens=40, temperature=1.0, seed=random.randrange(1000))
            others.append(Request(f"other-{len(others)}", prompt, sampling))
            scheduler.add(others[-1])
        live = [r.request_id for r in others if r.request_id in scheduler.requests]
        if live and random.random() < 0.4:
            end(scheduler, random.choice(live))
        run_step(scheduler, runner=runner)
    return canaries, scheduler


@pytest.mark.slow
def test_canaries_say_the_same_in_peace_and_in_trouble() -> None:
    expected = in_peace()
    canaries, scheduler = in_trouble()
    counters = scheduler.counters
    assert counters.finished["abort"] >= 50
    assert sum(request.num_preemptions > 0 for request in canaries) >= 50
    assert sum(request.num_cached_tokens > 0 for request in canaries) >= 20
    assert [request.token_ids for request in canaries] == expected
