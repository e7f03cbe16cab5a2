"""The seam between scheduling and computing: whatever can execute a step plan is a runner."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from reference_engine.core.step import StepPlan


class RunnerInfo(NamedTuple):
    """What the runner runs on. `gpu_name` is None where there is none."""

    device: str
    vocab_size: int
    gpu_name: str | None


class Runner(Protocol):
    """Computes steps; called by one thread, one plan at a time."""

    @property
    def info(self) -> RunnerInfo: ...

    def execute(self, plan: StepPlan) -> Mapping[str, int]:
        """Compute what is scheduled; a new token for each request that samples in this step."""
        ...
