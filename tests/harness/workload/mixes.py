"""Loads for tests: any mix, and otherwise the same numbers."""

from typing import Any

from harness.workload.abandon import AbandonPlan, StayPlan, TokensPlan
from harness.workload.load import AbandonLoad

STAY = StayPlan(plan="never")


def tokens(*counts: int, **more: Any) -> TokensPlan:
    return TokensPlan(plan="tokens", tokens=list(counts), **more)


def load_of(*mix: AbandonPlan, **changes: Any) -> AbandonLoad:
    values: dict[str, Any] = {
        "mix": list(mix),
        "stay_share": 0.0,
        "prompt_tokens": [10, 20],
        "answer_tokens": 1000,
        "stay_tokens": 50,
        **changes,
    }
    return AbandonLoad(kind="abandon", **values)


def abandoning(*, tokens: list[int], stay_share: float, stop_after: int | None) -> AbandonLoad:
    """Users of whom some stay for a short answer, and the others leave a long one."""
    return load_of(
        TokensPlan(plan="tokens", tokens=tokens),
        stay_share=stay_share,
        prompt_tokens=[30, 40],
        answer_tokens=5000,
        stay_tokens=8,
        stop_after_abandons=stop_after,
    )
