"""Two engines without their processes that are stepped with the same requests."""

from random import Random
from typing import Any, NamedTuple

import torch

from reference_engine.core.request import Request, Sampling
from reference_engine.core.scheduler import Scheduler
from reference_engine.model.torch_runner import TorchRunner
from tests.reference_engine.conftest import end, run_step

SIZES: dict[str, Any] = {
    "device": "cpu",
    "max_num_seqs": 5,
    "num_blocks": 20,
    "block_size": 4,
    "max_model_len": 64,
    "max_num_batched_tokens": 16,
    "reserve_full_isl": False,
}


class Side(NamedTuple):
    runner: TorchRunner
    scheduler: Scheduler

    def add(self, number: int, random: Random) -> None:
        prompt = [random.randrange(5, 250) for _ in range(random.randrange(1, 20))]
        sampling = Sampling(
            max_tokens=random.randrange(2, 30),
            temperature=random.choice([0.0, 0.0, 0.7]),
            seed=number,
            ignore_eos=random.random() < 0.5,
        )
        self.scheduler.add(Request(f"r{number}", prompt, sampling))


def step_side_by_side(sides: tuple[Side, Side], num_steps: int) -> None:
    """Requests come, are aborted at any moment, and end; all tokens and all blocks agree."""
    random = Random(5)
    for step in range(num_steps):
        if step % 3 == 0:
            seed = random.random()
            for side in sides:
                side.add(step, Random(seed))
        if step % 7 == 6 and sides[0].scheduler.requests:
            gone = random.choice(list(sides[0].scheduler.requests))
            for side in sides:
                end(side.scheduler, gone)
        for side in sides:
            run_step(side.scheduler, runner=side.runner)
        tokens = [
            {name: one.token_ids for name, one in side.scheduler.requests.items()} for side in sides
        ]
        assert tokens[0] == tokens[1], step
    pools = [torch.stack([pool[:-1] for pool in side.runner.pools]) for side in sides]
    # Rows that do nothing have written to the spare block alone.
    torch.testing.assert_close(pools[0], pools[1], rtol=1e-4, atol=1e-4)
