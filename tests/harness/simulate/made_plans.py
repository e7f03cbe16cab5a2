"""Plans of simulations, and requests for them, made up."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from harness.simulate.asking import Asking, SimulatedRequest
from harness.simulate.machine import Cost, Lags, SimulatedMachine
from harness.simulate.plan import Plan
from harness.workload.abandon import RequestSpec
from harness.workload.arrivals import OpenArrivals
from harness.workload.observed_latency import ObservedLatency
from harness.workload.schedule import Arrival
from harness.workload.workload import Workload

LAGS = Lags(
    send_s=[0.001, 0.002],
    deliver_s=[0.001, 0.003],
    detect_s={"fin": [0.001, 0.002]},
    signal_s=[0.0005, 0.001],
    step_s=[0.0, 0.0],
    between_s=[0.0001, 0.0002],
    schedule_s=[0.0, 0.0],
    rest_s=[0.0002, 0.0002],
)
COST = Cost(
    fixed_s=0.01, prefill_token_s=0.0, decode_token_s=0.0, context_token_s=0.0, swap_block_s=0.0
)
ENGINE = {
    "runner": "simulated",
    "max_num_seqs": 4,
    "num_blocks": 64,
    "max_model_len": 512,
    "max_num_batched_tokens": 64,
}
LOAD = {
    "kind": "abandon",
    "prompt_tokens": [5, 40],
    "abandon_after_tokens": [5],
    "stay_share": 0.7,
    "answer_tokens": 40,
    "stay_tokens": 20,
}
Settings = Mapping[str, Any]


def made_plan(
    *,
    engine: Settings = {},  # noqa: B006
    load: Settings = {},  # noqa: B006
    run: Settings = {},  # noqa: B006
    cluster: Settings = {},  # noqa: B006
    arrivals: Settings | None = None,
    load_s: float = 4.0,
    settle_s: float = 1.0,
    lags: Lags = LAGS,
    cost: Cost = COST,
) -> Plan:
    """A workload of a short load; a closed loop without `arrivals`."""
    wanted = {
        "name": "made-up",
        "question": "Does it hold?",
        "run": {"seed": 7, "users": 4, "max_seconds": load_s, **run},
        "load": {**LOAD, **load},
        "engine": {**ENGINE, **engine},
        "simulate": {"router": "least_loaded", **cluster},
    }
    if arrivals is not None:
        wanted["arrivals"] = {"kind": "poisson", "rate": 15.0, "seconds": load_s, **arrivals}
    machine = SimulatedMachine(
        name="made-up", title="Made up", kind="assumed", gpus=0, cost=cost, lags=lags
    )
    workload = Workload.model_validate(wanted)
    return Plan(workload=workload, machine=machine, arm="", settle_s=settle_s)


class Made(NamedTuple):
    """`offset_s`: of an open loop."""

    offset_s: float
    asked: SimulatedRequest


def made(
    number: int, *, offset_s: float | None = None, user: int | None = None, **spec: Any
) -> Made:
    """`spec`: fields of RequestSpec."""
    fields = {"max_tokens": 30, "prompt_tokens": 20, "think_fraction": 0.5, **spec}
    user = number if user is None else user
    at_s = number * 0.05 if offset_s is None else offset_s
    return Made(at_s, SimulatedRequest(number, RequestSpec(user=user, **fields), 0))


class MadeUp(Asking):
    """Asks for these requests; in a closed loop a user's last one again and again."""

    def __init__(self, requests: Sequence[Made]) -> None:
        self._requests = requests

    def users(self) -> Sequence[int]:
        return list(dict.fromkeys(one.asked.spec.user for one in self._requests))

    def of_user(self, user: int, n: int, *, number: int, seen: ObservedLatency) -> SimulatedRequest:
        own = [one.asked for one in self._requests if one.asked.spec.user == user]
        return own[min(n, len(own) - 1)]._replace(number=number)

    def arrivals(self, arrivals: OpenArrivals) -> Iterator[Arrival]:
        for number, one in enumerate(self._requests):
            yield Arrival(number=number, offset_s=one.offset_s)

    def on_arrival(self, arrival: Arrival, *, seen: ObservedLatency) -> SimulatedRequest:
        return self._requests[arrival.number].asked
