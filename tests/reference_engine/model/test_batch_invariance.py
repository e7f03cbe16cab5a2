"""A request's tokens and logits are the same, bit by bit, beside any other work."""

from collections.abc import Iterator
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="needs the extra `engine` (torch)")

from reference_engine.config import EngineConfig  # noqa: E402
from reference_engine.core.request import Request, Sampling  # noqa: E402
from reference_engine.core.scheduler import Scheduler  # noqa: E402
from reference_engine.model.tokenizer import EOS_TOKEN_ID  # noqa: E402
from reference_engine.model.torch_runner import TorchRunner  # noqa: E402
from tests.reference_engine.conftest import end, run_step  # noqa: E402

PROMPT = [3 + 7 * i * i % 256 for i in range(41)]
NUM_TOKENS = 40
SHARED = 32  # tokens of the canary's prompt that its mates begin with, in some schedules


class Workbench:
    """An engine without its process, in which a canary's logits are kept, one row a token."""

    def __init__(self, **settings: Any) -> None:
        config = EngineConfig(
            device="cpu", max_model_len=128, block_size=8, reserve_full_isl=False, **settings
        )
        self.runner, self.scheduler = TorchRunner(config), Scheduler(config, EOS_TOKEN_ID)
        sampling = Sampling(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        self.canary = Request("canary", PROMPT, sampling)
        self.logits: list[Any] = []
        self.runner.model.register_forward_hook(self._keep_logits)

    def add_mate(self, name: int, prompt: list[int], max_tokens: int) -> None:
        sampling = Sampling(max_tokens=max_tokens, temperature=1.0, seed=name, ignore_eos=True)
        self.scheduler.add(Request(f"mate-{name}", prompt, sampling))

    def step(self) -> None:
        run_step(self.scheduler, runner=self.runner)

    def run_canary(self, mates: Iterator[None] | None = None) -> tuple[list[int], Any]:
        """Its answer and its logits [NUM_TOKENS, vocabulary]; `mates` acts before each step."""
        self.scheduler.add(self.canary)
        while self.canary.finish_reason is None:
            if mates is not None:
                next(mates, None)
            self.step()
        return self.canary.token_ids[len(PROMPT) :], torch.stack(self.logits)

    def _keep_logits(self, model: Any, inputs: tuple[Any, ...], logits: Any) -> None:
        requests = inputs[0].sampling_requests
        self.logits += [
            row.clone() for row, r in zip(logits, requests, strict=True) if r is self.canary
        ]


def coming_and_going(bench: Workbench, beginning: list[int]) -> Iterator[None]:
    """A new mate every third step, each prompt of another length; some leave in mid-answer."""
    for step in range(200):
        if step % 3 == 0:
            tail = [3 + (11 * step + j) % 256 for j in range(1 + 9 * step % 37)]
            bench.add_mate(step, beginning + tail, max_tokens=4 + step % 9)
        if step % 5 == 4:
            end(bench.scheduler, f"mate-{step - step % 3 - 3}")
        yield


@pytest.fixture(scope="module")
def alone() -> tuple[list[int], Any]:
    return Workbench(batch_invariant=True).run_canary()


def assert_same(answer: tuple[list[int], Any], alone: tuple[list[int], Any]) -> None:
    assert answer[0] == alone[0]
    assert len(answer[0]) == len(answer[1]) == NUM_TOKENS
    assert torch.equal(answer[1], alone[1]), "other bits in the logits"


@pytest.mark.slow
@pytest.mark.parametrize("budget", [8, 13, 512])
def test_mates_that_come_and_go(budget: int, alone: tuple[list[int], Any]) -> None:
    bench = Workbench(batch_invariant=True, max_num_batched_tokens=budget)
    assert_same(bench.run_canary(coming_and_going(bench, [])), alone)


@pytest.mark.slow
def test_a_preempted_canary_recomputes_the_same(alone: tuple[list[int], Any]) -> None:
    bench = Workbench(batch_invariant=True, num_blocks=22, max_num_batched_tokens=24)
    for name in range(2):
        bench.add_mate(name, [20 + name] * 30, max_tokens=60)
    assert_same(bench.run_canary(), alone)
    assert bench.canary.num_preemptions > 0, "the pool is meant to be too small"


def test_a_prefix_that_others_have_left_in_the_cache(alone: tuple[list[int], Any]) -> None:
    bench = Workbench(batch_invariant=True, max_num_batched_tokens=16)
    bench.add_mate(1000, [*PROMPT[:SHARED], 200, 201], max_tokens=30)
    while not bench.scheduler.requests["mate-1000"].num_generated:
        bench.step()
    assert_same(bench.run_canary(coming_and_going(bench, PROMPT[:SHARED])), alone)
    assert bench.canary.num_cached_tokens == SHARED
