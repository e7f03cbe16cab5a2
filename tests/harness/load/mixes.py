"""Loads for tests: any mix, and otherwise the same numbers."""

from harness.records import Delivery, Way
from harness.workload.plan import AbandonLoad, AfterTokens, LeavePlan, Never, Slice


def slice_of(
    leave: LeavePlan,
    *,
    weight: float = 1.0,
    way: Way = Way.FIN,
    delivery: Delivery = Delivery.STREAM,
    n: int = 1,
) -> Slice:
    return Slice(weight=weight, leave=leave, way=way, delivery=delivery, n=n)


def load_of(*mix: Slice) -> AbandonLoad:
    return AbandonLoad(
        mix=list(mix),
        think="step",
        prompt_tokens=(10, 20),
        answer_tokens=1000,
        stay_tokens=50,
        shared_prefix_tokens=0,
        stop_after_abandons=None,
    )


def abandoning(*, tokens: list[int], stay_share: float, stop_after: int | None) -> AbandonLoad:
    """Users of whom some stay for a short answer, and the others leave a long one."""
    return AbandonLoad(
        mix=[
            slice_of(AfterTokens(tokens=tokens), weight=1 - stay_share),
            slice_of(Never(), weight=stay_share),
        ],
        think="step",
        prompt_tokens=(30, 40),
        answer_tokens=5000,
        stay_tokens=8,
        shared_prefix_tokens=0,
        stop_after_abandons=stop_after,
    )
