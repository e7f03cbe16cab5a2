"""The engine, and as its worker itself, with a device that breaks when a request wants it to.

A request's seed says how: in the first step that computes for it.
"""

import sys
from collections.abc import Callable
from typing import Final

from reference_engine.__main__ import main as run_engine
from reference_engine.config import EngineConfig
from reference_engine.core.step import Sampled, StepPlan
from reference_engine.model.runners import DeviceFailedError, OutOfMemoryError, SimulatedRunner
from reference_engine.worker import service

MODULE: Final = "tests.reference_engine.breaking_engine"
OUT_OF_MEMORY: Final = 1001
FAILED: Final = 1002


class BreakingRunner(SimulatedRunner):
    def launch(self, plan: StepPlan) -> Callable[[], Sampled]:
        seeds, compute = {one.sampling.seed for one in plan.scheduled}, super().launch(plan)

        def break_or_compute() -> Sampled:
            if OUT_OF_MEMORY in seeds:
                raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            if FAILED in seeds:
                raise DeviceFailedError("CUDA error: an illegal memory access was encountered")
            return compute()

        return break_or_compute


def build(config: EngineConfig) -> BreakingRunner:
    simulated = service.build_runner(config)
    assert isinstance(simulated, SimulatedRunner)
    return BreakingRunner(simulated._cost, simulated._sleep)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(run_engine(worker_module=MODULE))
    service.main(build)
