"""Canaries: greedy answers are the same, bit by bit in their logits, under any load.

First they are generated undisturbed: eight at a time, in a pool that holds them all. Then under
load: in a pool that is too small, with requests that come, are cancelled at any moment, and share
the canaries' first prompt tokens. Some canaries are preempted and computed again, or copied to the
host and back, some find their prefix in the cache.
"""

from random import Random
from typing import Any

import pytest

from reference_engine.config import EngineConfig, ModelDtype, PreemptionPolicy
from reference_engine.core.request import Request, Sampling
from reference_engine.core.scheduler import Scheduler

torch: Any = pytest.importorskip("torch", reason="needs the extra `engine` (torch)")
from reference_engine.model.torch_runner import TorchRunner  # noqa: E402
from tests.reference_engine.conftest import (  # noqa: E402
    StepsAhead,
    end,
    run_step,
    run_to_the_end,
)

ANSWER_TOKENS, BLOCK_SIZE = 8, 8
GREEDY = Sampling(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True)


class Workbench:
    """An engine without its process that keeps the canaries' logits."""

    def __init__(
        self,
        num_canaries: int,
        num_blocks: int,
        max_num_batched_tokens: int,
        preemption: PreemptionPolicy = "recompute",
        **settings: Any,
    ) -> None:
        config = EngineConfig(
            device="cpu",
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_model_len=80,
            max_num_batched_tokens=max_num_batched_tokens,
            reserve_full_isl=False,
            batch_invariant=True,
            preemption=preemption,
            **{"swap_space_blocks": 20} | settings,
        )
        self.runner = TorchRunner(config)
        self.scheduler = Scheduler(config, self.runner.tokenizer.eos_token_ids)
        self.canaries = [canary(number) for number in range(num_canaries)]
        self.logits: dict[str, list[Any]] = {request.request_id: [] for request in self.canaries}
        self.runner.model.register_forward_hook(self._keep_logits)

    def _keep_logits(self, model: Any, inputs: tuple[Any, ...], logits: Any) -> None:
        for row, request in zip(logits, inputs[0].sampling_requests, strict=True):
            if request.request_id in self.logits:
                self.logits[request.request_id].append(row.clone())


def canary(number: int) -> Request:
    random = Random(number)
    length = random.randrange(12, 36)
    prompt = [random.randrange(300, 2000) for _ in range(length)]
    return Request(f"canary-{number}", prompt, GREEDY)


def in_peace(num_canaries: int, **settings: Any) -> Workbench:
    bench = Workbench(num_canaries, num_blocks=200, max_num_batched_tokens=512, **settings)
    for request in bench.canaries:
        bench.scheduler.add(request)
    run_to_the_end(bench.scheduler, bench.runner)
    assert bench.scheduler.counters.preemptions == 0
    return bench


def in_trouble(
    num_canaries: int,
    max_num_batched_tokens: int,
    preemption: PreemptionPolicy,
    *,
    is_ahead: bool,
) -> Workbench:
    bench = Workbench(num_canaries, 13, max_num_batched_tokens, preemption)
    steps = StepsAhead(bench.scheduler, bench.runner)
    random = Random(7)
    scheduler, others, to_come = bench.scheduler, list[Request](), list(bench.canaries)
    while scheduler.has_work or to_come:
        if to_come and len(scheduler.waiting) < 4:
            scheduler.add(to_come.pop(0))
            mate = random.choice(to_come[:2] or bench.canaries)
            prompt = mate.token_ids[: random.randrange(8, 20)]
            sampling = Sampling(max_tokens=40, temperature=1.0, seed=random.randrange(1000))
            others.append(Request(f"other-{len(others)}", prompt, sampling))
            scheduler.add(others[-1])
        live = [r.request_id for r in others if r.request_id in scheduler.requests]
        if live and random.random() < 0.4:
            end(scheduler, random.choice(live))
        if is_ahead:
            steps.step()
        else:
            run_step(scheduler, runner=bench.runner)
    return bench


@pytest.mark.parametrize(
    ("num_canaries", "max_num_batched_tokens", "preemption", "is_ahead"),
    [
        (16, 13, "recompute", False),
        (16, 13, "swap", False),
        (16, 13, "recompute", True),
        pytest.param(200, 48, "swap", True, marks=pytest.mark.slow),
        pytest.param(200, 48, "recompute", False, marks=pytest.mark.slow),
    ],
)
def test_canaries_say_the_same_in_peace_and_in_trouble(
    num_canaries: int, max_num_batched_tokens: int, preemption: PreemptionPolicy, is_ahead: bool
) -> None:
    """Also if each step is planned while the one before is computed, in another thread."""
    peace = in_peace(num_canaries)
    trouble = in_trouble(num_canaries, max_num_batched_tokens, preemption, is_ahead=is_ahead)
    assert (trouble.scheduler.counters.swapped_in_blocks > 0) == (preemption == "swap")
    assert trouble.scheduler.counters.finished["abort"] >= num_canaries // 4
    assert sum(r.num_preemptions > 0 for r in trouble.canaries) >= num_canaries // 4
    counters = trouble.scheduler.counters
    found = counters.prefix_hit_tokens + counters.resumed_hit_tokens
    assert found >= BLOCK_SIZE * (num_canaries // 40 or 1), "some of a prompt was in the cache"
    for mine, theirs in zip(peace.canaries, trouble.canaries, strict=True):
        assert theirs.token_ids == mine.token_ids
        rows, expected = trouble.logits[mine.request_id], peace.logits[mine.request_id]
        assert len(rows) == ANSWER_TOKENS
        assert torch.equal(torch.stack(rows), torch.stack(expected)), "other bits in the logits"


class Divided:
    """A prefill and a decode worker without their processes.

    Each canary comes after an echo with its prompt, so it finds blocks in both prefix caches.
    """

    def __init__(self, num_canaries: int, dtype: ModelDtype) -> None:
        self.first = Workbench(num_canaries, 30, 13, component="prefill", dtype=dtype)
        few: Any = {"component": "decode", "swap_space_blocks": 8}
        self.second = Workbench(num_canaries, 16, 48, "swap", dtype=dtype, **few)
        self.answers: dict[str, Request] = {}
        self.num_sent = self.num_copied = 0
        self._random = Random(7)
        self._to_come = list[Request]()
        for one in self.first.canaries:
            self._to_come += [Request(f"echo of {one.request_id}", one.token_ids, GREEDY), one]
        self._leaving: list[Request] = []

    def run(self) -> None:
        first, second = self.first.scheduler, self.second.scheduler
        while self._to_come or first.has_work or second.has_work:
            if self._to_come and len(first.waiting) < 2:
                first.add(self._to_come.pop(0))
            run_step(first, runner=self.first.runner)
            for request in [one for one in first.running if one.num_generated]:
                self._hand_over(request)
            while self._leaving and self._random.random() < 0.5:
                assert first.finish(self._leaving[0].request_id, None)
                first.free(self._leaving.pop(0))
            self.num_copied += len(run_step(second, runner=self.second.runner).swap_in)

    def _hand_over(self, request: Request) -> None:
        self.first.scheduler.hand_over(request)
        self._leaving.append(request)
        data = self.first.runner.export_blocks(request.block_table)
        assert len(data) == len(request.block_table) * self.second.runner.block_bytes
        prompt, answer = request.token_ids[:-1], request.token_ids[-1:]
        taken = Request(request.request_id, prompt, GREEDY, answer=answer)
        if self.second.scheduler.take_over(taken, has_blocks=True):
            self.second.runner.import_blocks(taken.host_table, data)
            self.num_sent += len(taken.host_table)
        self.answers[taken.request_id] = taken


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_canaries_say_the_same_when_another_worker_goes_on_with_them(dtype: ModelDtype) -> None:
    peace = in_peace(16, dtype=dtype)
    divided = Divided(16, dtype)
    divided.run()
    first, second = divided.first.scheduler, divided.second.scheduler
    assert first.counters.handed_over_requests == second.counters.taken_over_requests == 32
    assert sum(one.num_cached_tokens > 0 for one in divided.first.canaries) >= 4
    assert 0 < divided.num_copied < divided.num_sent, "the rest was cached"
    assert second.counters.preemptions > 0
    assert any(one.num_lost_tokens for one in divided.answers.values()), "the host was full"
    for mine in peace.canaries:
        name = mine.request_id
        assert divided.answers[name].token_ids == mine.token_ids
        rows = divided.first.logits[name] + divided.second.logits[name]
        assert torch.equal(torch.stack(rows), torch.stack(peace.logits[name]))
