"""Several arms in one workload: who is run when, decided before anything runs.

A round runs every arm once. Each round begins with the next arm, so that whatever drifts (a machine
that warms up, a disk that fills) hits all arms alike, and has a seed of its own, which its arms
share: so they are compared pair by pair, under the same demands.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.config import ArmSettings, Workload
from harness.errors import ConfigError
from harness.toml_file import parse_setting, validate


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRun:
    """One arm in one round (counted from 1): a workload without arms, ready to be run."""

    round: int
    arm: str
    workload: Workload

    @property
    def folder_name(self) -> str:
        return f"{self.round}-{self.arm}"


def arm_runs(workload: Workload, *, source: str, settings: Sequence[str] = ()) -> list[ArmRun]:
    """All runs in the order in which they are to be made; none for a workload without arms.

    The seed of a round is `run.seed` + round. Raises ConfigError for an arm that cannot be, and for
    a `--set` that no arm would feel.
    """
    for setting in settings:
        _refuse_if_unfelt(setting, workload.arms)
    arms = [(arm.name, resolve_arm(workload, arm, source=source)) for arm in workload.arms]
    runs = []
    for number in range(1, workload.run.rounds + 1):
        first = (number - 1) % len(arms) if arms else 0
        for name, resolved in arms[first:] + arms[:first]:
            settings_of_run = resolved.run.model_copy(update={"seed": workload.run.seed + number})
            seeded = resolved.model_copy(update={"run": settings_of_run})
            runs.append(ArmRun(round=number, arm=name, workload=seeded))
    return runs


def resolve_arm(workload: Workload, arm: ArmSettings, *, source: str) -> Workload:
    """The workload as this arm has it. Raises ConfigError."""
    data = workload.model_dump(
        exclude={"arms": True, "value": True, "run": {"rounds", "reference_arm"}}
    )
    data["engine"] |= arm.engine
    data["load"] |= arm.load
    data["arrivals"] |= arm.arrivals
    data["collect"] |= arm.collect
    return validate(Workload, data, source=f"{source}, arm `{arm.name}`")


def _refuse_if_unfelt(setting: str, arms: Sequence[ArmSettings]) -> None:
    (section, *keys), _ = parse_setting(setting)
    if len(keys) != 1 or section not in ("engine", "load", "arrivals", "collect"):
        return
    if arms and all(keys[0] in getattr(arm, section) for arm in arms):
        names = ", ".join(arm.name for arm in arms)
        raise ConfigError(f"--set {setting}: every arm has its own ({names}): change it there")
