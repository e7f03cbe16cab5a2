"""The protocol of runners, which execute step plans, and a runner without a model."""

import os
from collections.abc import Callable, Sequence
from typing import Protocol

from reference_engine.config import StepCost
from reference_engine.core.request import Request
from reference_engine.core.step import Sampled, StepPlan
from reference_engine.model.sampler import mix
from reference_engine.model.teacher import Teacher
from reference_engine.model.tokenizer import FIRST_WORD, Tokenizer, WordTokenizer
from reference_engine.protocol import (
    Ready,
)


class OutOfMemoryError(RuntimeError):
    """The device's memory is too small for this. The runner still has what it had, and can
    continue.
    """


class DeviceFailedError(RuntimeError):
    """The device can compute nothing any more; the message is its own."""


class Runner(Protocol):
    """One thread calls it, and one computes: with `--async-scheduling` another one. The steps come
    one after the other, each launched when the one before is over.

    Whatever uses the device may raise OutOfMemoryError or DeviceFailedError. What a step that is
    out of memory has written to blocks, and to blocks of the host, is undefined.
    """

    @property
    def info(self) -> Ready: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    def launch(self, plan: StepPlan) -> Callable[[], Sampled]:
        """A step to compute by a call, during which the next step may be planned: requests may end,
        lose their blocks, and get more.
        """

    @property
    def block_bytes(self) -> int:
        """The size of a block of the cache, over all layers."""

    def export_blocks(self, blocks: Sequence[int], /) -> bytes | bytearray:
        """The keys and values in blocks of the cache, for another worker's `import_blocks`."""

    def import_blocks(self, host_blocks: Sequence[int], data: bytes | bytearray, /) -> None:
        """Put them, `block_bytes` a block, into blocks of the host."""


VOCAB_SIZE = 2048


class SimulatedRunner:
    """Sleeps for the time of its cost model, and says what its teacher says or makes up the tokens;
    needs no torch. Its cache has no content.

    With the default cost every step takes 20 ms, so latencies can be judged in steps on a machine
    of any speed.
    """

    block_bytes = 0

    def __init__(
        self, cost: StepCost, sleep: Callable[[float], None], teacher: Teacher | None = None
    ) -> None:
        self._cost = cost
        self._sleep = sleep
        self._teacher = teacher
        self.tokenizer: Tokenizer = WordTokenizer(
            VOCAB_SIZE, () if teacher is None else teacher.words
        )
        size = self.tokenizer.vocab_size
        self.info = Ready(pid=os.getpid(), device="cpu", vocab_size=size, gpu_name=None)

    def launch(self, plan: StepPlan) -> Callable[[], Sampled]:
        seconds, sampled = step_s(self._cost, plan), self.sample(plan)

        def compute() -> Sampled:
            self._sleep(seconds)
            return sampled

        return compute

    def sample(self, plan: StepPlan) -> Sampled:
        sampled = Sampled({}, {})
        for request in plan.sampling:
            said = self._teacher and self._teacher.next_token(request)
            token, probability = said or (_made_up_token(request), 1.0)
            sampled.tokens[request.request_id] = token
            if request.wants_probabilities:
                sampled.probabilities[request.request_id] = probability
        return sampled

    def export_blocks(self, _: Sequence[int]) -> bytes:
        return b""

    def import_blocks(self, _: Sequence[int], data: bytes | bytearray) -> None:
        assert not data


def step_s(cost: StepCost, plan: StepPlan) -> float:
    scheduled, tokens = plan.scheduled, plan.num_tokens
    context = sum([request.num_computed_tokens for request in scheduled])
    decoding = len(scheduled) - sum(request.num_owed_tokens != 1 for request in plan.closely)
    prefill_s = cost.prefill_token_s * (tokens - decoding)
    swap_s = cost.swap_block_s * (len(plan.swap_out) + len(plan.swap_in))
    read_s = cost.context_token_s * context
    return cost.fixed_s + prefill_s + cost.decode_token_s * decoding + read_s + swap_s


def _made_up_token(request: Request) -> int:
    return FIRST_WORD + mix(request.sampling.seed, request.num_tokens) % (VOCAB_SIZE - FIRST_WORD)
