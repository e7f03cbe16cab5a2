"""A measurement that can be taken step by step, without a load."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.run.measurement import Measurement
from harness.run.process import Interruption
from harness.run.progress import Progress
from harness.run.run_config import RunConfig, resolve_run
from harness.run.run_state import begin_manifest
from harness.store.run_folder import RunFolder
from harness.workload.plan import LoadPlan

Begin = Callable[..., Measurement]


class NoPauses(Interruption):
    def pause(self, seconds: float) -> None:
        """At once."""


class NoLoad:
    """Sends nothing, and keeps the plans that it got."""

    def __init__(self) -> None:
        self.plans: list[LoadPlan] = []

    def prepare(self, *_: object, **__: object) -> None:
        """Needs no time."""

    def run(self, plan: LoadPlan, *_: object, **__: object) -> None:
        self.plans.append(plan)


@pytest.fixture
def begin(tmp_path: Path) -> Begin:
    """Begins a run of `demo` on a server at a URL; takes the arguments of `RunConfig`."""

    def begin(**config: Any) -> Measurement:
        config = {"workload": "demo", "target_url": "http://127.0.0.1:1"} | config
        resolved = resolve_run(RunConfig(**config))
        return Measurement(
            resolved=resolved,
            folder=RunFolder.create(tmp_path / "run"),
            manifest=begin_manifest(resolved, run_id="run"),
            progress=Progress(),
            interruption=NoPauses(),
            load=NoLoad(),
        )

    return begin
