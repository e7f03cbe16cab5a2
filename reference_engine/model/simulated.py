"""A runner without a model: it takes the time that its cost model says, and makes up the tokens.

Same scheduler, same server, same log; no torch. With the default cost every step takes 20 ms, so
latencies can be judged in steps on a machine of any speed.
"""

from collections.abc import Callable, Mapping

from reference_engine.config import StepCost
from reference_engine.core.step import StepPlan
from reference_engine.model.randomness import mix
from reference_engine.model.runner import RunnerInfo
from reference_engine.model.tokenizer import FIRST_WORD
from reference_engine.request import Request

VOCAB_SIZE = 2048


def step_seconds(cost: StepCost, scheduled: Mapping[Request, int]) -> float:
    """How long a step takes under the cost model (its formula is StepCost's)."""
    total = sum(scheduled.values())
    decoding = sum(1 for request in scheduled if request.num_owed_tokens == 1)
    return cost.fixed_s + cost.prefill_token_s * (total - decoding) + cost.decode_token_s * decoding


class SimulatedRunner:
    """Waits through `sleep` instead of computing."""

    def __init__(self, cost: StepCost, sleep: Callable[[float], None]) -> None:
        self._cost = cost
        self._sleep = sleep
        self.info = RunnerInfo(device="cpu", vocab_size=VOCAB_SIZE, gpu_name=None)

    def execute(self, plan: StepPlan) -> Mapping[str, int]:
        self._sleep(step_seconds(self._cost, plan.scheduled))
        return {request.request_id: _made_up_token(request) for request in plan.sampling}


def _made_up_token(request: Request) -> int:
    """A word; the same one for the same seed and position. It never ends by itself."""
    return FIRST_WORD + mix(request.sampling.seed, request.num_tokens) % (VOCAB_SIZE - FIRST_WORD)
