"""The plan of a simulation: a workload, the machine on which it runs, and its division into cells.

A cell is some replicas behind one router, with the users that come there. Cells share nothing: each
has its own rows, and its own random numbers. Where the router does not look at the load, replicas
have nothing to do with each other, and each is a cell of its own.
"""

import math
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Final

from harness.errors import ConfigError, in_words
from harness.simulate.machine import Lags, SimulatedMachine
from harness.workload.abandon import TaskPlan
from harness.workload.arrivals import OpenArrivals
from harness.workload.cluster import UNLOOKING, ClusterSettings
from harness.workload.load import AbandonLoad
from harness.workload.tasks import TaskText
from harness.workload.values import TomlTable
from harness.workload.workload import Workload
from reference_engine.config import EngineConfig, EngineConfigError, StepCost
from reference_engine.faults import FaultError, Faults, parse_faults

SIMULATION: Final = "simulation.json"
# Faults of what a simulation does not have.
_NOT_HERE: Final = (
    *("poll_rearms", "grow_memory", "grow_with_answers", "cancel_does_nothing", "abort_by_prefix"),
    *("abort_says_stop", "compute_refused"),
)


class Plan(TomlTable):
    """`simulation.json`. The workload has the engine's settings that its machine gives it, and the
    files of its load are read. After the load the engines are watched for `settle_s`."""

    workload: Workload
    machine: SimulatedMachine
    arm: str
    settle_s: float

    @property
    def load(self) -> AbandonLoad:
        load = self.workload.load
        assert isinstance(load, AbandonLoad)
        return load

    @property
    def arrivals(self) -> OpenArrivals | None:
        """None: a closed loop."""
        arrivals = self.workload.arrivals
        return arrivals if isinstance(arrivals, OpenArrivals) else None

    @property
    def cluster(self) -> ClusterSettings:
        return self.workload.simulate or ClusterSettings()

    @property
    def lags(self) -> Lags:
        assert self.machine.lags is not None
        return self.machine.lags

    @property
    def load_s(self) -> float:
        """No request begins after it, and streams that are open are cut off."""
        return self.workload.run.max_seconds

    @property
    def num_cells(self) -> int:
        """Outages, closed-loop users, and `stop_after_abandons` tie replicas together."""
        is_tied = bool(self.cluster.outages) or self.load.stop_after_abandons is not None
        is_apart = self.cluster.router in UNLOOKING and not is_tied
        return self.cluster.num_simulated if is_apart and self.arrivals is not None else 1

    @property
    def replicas_of_cell(self) -> int:
        """Only the replicas that are simulated."""
        return self.cluster.num_simulated // self.num_cells

    @property
    def max_streams(self) -> int | None:
        """The most streams open at once in each cell."""
        arrivals = self.arrivals
        if arrivals is None:
            return None
        return math.ceil(arrivals.max_streams * self.cluster.share / self.num_cells)

    @property
    def stop_after_abandons(self) -> int | None:
        stop = self.load.stop_after_abandons
        return None if stop is None else math.ceil(stop * self.cluster.share)

    @property
    def takes_turns(self) -> bool:
        """Each replica gets one arrival after the other."""
        return self.cluster.router == "round_robin" and self.num_cells == self.cluster.num_simulated

    @cached_property
    def texts(self) -> list[TaskText]:
        """The known texts that requests ask for."""
        plans = (plan for plan in self.load.leavers if isinstance(plan, TaskPlan))
        return list(dict.fromkeys(text for plan in plans for text in plan.texts))

    def prompt_of(self, text: TaskText) -> str:
        return text.prompt(text.prompt_tokens(self.load.prompt_tokens))

    @cached_property
    def engine(self) -> EngineConfig:
        """The settings of each replica. Raises ConfigError."""
        settings = self.workload.engine.model_dump(exclude_none=True)
        known = {
            name: settings[name] for name in EngineConfig.__struct_fields__ if name in settings
        }
        cost = StepCost(**self.machine.cost.model_dump())
        try:
            return EngineConfig(**{**known, "runner": "simulated", "step_cost": cost})
        except EngineConfigError as error:
            raise _refused(str(error)) from error

    @cached_property
    def faults(self) -> Faults:
        """Raises ConfigError."""
        try:
            faults = parse_faults(self.workload.engine.faults)
        except FaultError as error:
            raise _refused(str(error)) from error
        for name in _NOT_HERE:
            if getattr(faults, name):
                spelled = name.replace("_", "-")
                raise _refused(f"--fault {spelled} concerns what a simulation does not have")
        return faults

    def random(self, cell: int, what: str) -> Random:
        return Random(f"{self.workload.run.seed}/{cell}/{what}")

    def write(self, folder: Path) -> None:
        (folder / SIMULATION).write_text(self.model_dump_json())


def _refused(why: str) -> ConfigError:
    return ConfigError(f"the engine refuses its settings (section [engine] of the workload): {why}")


def read_plan(folder: Path) -> Plan:
    """Raises ConfigError."""
    path = folder / SIMULATION
    try:
        return Plan.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {in_words(error)}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
