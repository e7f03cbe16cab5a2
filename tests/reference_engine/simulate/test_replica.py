from random import Random

from reference_engine.config import EngineConfig
from reference_engine.context import Context
from reference_engine.core.request import Sampling
from reference_engine.faults import Faults
from reference_engine.protocol import AddRequest
from reference_engine.simulate.lags import Lag
from reference_engine.simulate.replica import FRONTEND, Replica, StepLags
from reference_engine.worker.inbox import Added
from tests.reference_engine.simulate.lockstep import COST

MS = 1_000_000


def test_a_schedule_takes_a_part_of_the_steps_cost() -> None:
    """An admission is stamped so long after the boundary, and the step is no longer for it."""
    config = EngineConfig(runner="simulated", step_cost=COST)
    replica = Replica(
        "worker-0",
        config,
        Faults(),
        lags=StepLags(step=Lag([0.002, 0.002]), schedule=Lag([0.001, 0.001])),
        random=Random(0),
        start_ns=0,
    )
    request = AddRequest(request_id="a", prompt_token_ids=[5] * 4, sampling=Sampling(max_tokens=2))
    replica.hear(0, Added(request, FRONTEND, Context("a"), None))
    stepped = replica.step(0)
    admitted = next(event for event in stepped.events if event.event == "admitted")
    assert admitted.t_ns == 1 * MS
    assert stepped.record is not None
    whole_ns = round((COST.fixed_s + 4 * COST.prefill_token_s) * 1e9)
    assert stepped.record.ended_ns == whole_ns
    assert replica.due_ns() == whole_ns + 2 * MS
