from random import Random

import pytest

from harness.simulate.lags import Lag
from harness.simulate.machine import Growth
from harness.simulate.replica import FRONTEND, Replica, StepLags
from reference_engine.config import EngineConfig
from reference_engine.context import Context
from reference_engine.core.request import Sampling
from reference_engine.faults import Faults
from reference_engine.protocol import AddRequest
from reference_engine.worker.inbox import Added
from tests.harness.simulate.lockstep import COST

MS = 1_000_000


@pytest.mark.parametrize(
    ("growth", "lag_ms"),
    [
        (Growth(), 1),
        (Growth(schedule_request=2.0), 3),
        (Growth(schedule_prompt_token=0.25), 2),
        (Growth(between_request=0.5), 1),
    ],
)
def test_a_schedule_takes_a_part_of_the_steps_cost(growth: Growth, lag_ms: int) -> None:
    """An admission is stamped so long after the boundary, and the step is no longer for it; it is
    longer by `step_s`."""
    config = EngineConfig(runner="simulated", step_cost=COST)
    replica = Replica(
        "worker-0",
        config,
        Faults(),
        lags=StepLags(constant(0.004), constant(0.002), constant(0.001), growth),
        random=Random(0),
        start_ns=0,
    )
    request = AddRequest(request_id="a", prompt_token_ids=[5] * 4, sampling=Sampling(max_tokens=2))
    replica.hear(0, Added(request, FRONTEND, Context("a"), None))
    stepped = replica.step(0)
    admitted = next(event for event in stepped.events if event.event == "admitted")
    assert admitted.t_ns == lag_ms * MS
    assert stepped.record is not None
    whole_ns = round((COST.fixed_s + 4 * COST.prefill_token_s) * 1e9) + 4 * MS
    assert stepped.record.ended_ns == whole_ns
    between_ms = 2 * (1 + growth.between_request)
    assert replica.due_ns() == whole_ns + between_ms * MS


def constant(seconds: float) -> Lag:
    return Lag([seconds, seconds])
