"""Several arms in one workload: the order of their runs. A round runs every arm once with one seed,
and each round begins with the next arm, so drift hits all arms alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.errors import ConfigError
from harness.workload.toml_file import parse_setting, validate
from harness.workload.workload import ArmSettings, ArmTarget, EngineSettings, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRun:
    """One arm in one round (from 1): a workload without arms, ready to be run. `target`: the arm's
    own server; None: that of the whole run."""

    round: int
    arm: str
    workload: Workload
    target: ArmTarget | None = None

    @property
    def folder_name(self) -> str:
        return f"{self.round}-{self.arm}"


def arm_runs(workload: Workload, *, source: str, settings: Sequence[str] = ()) -> list[ArmRun]:
    """The seed of a round is `run.seed` + round. Raises ConfigError for an invalid arm, and for a
    `--set` that has no effect on any arm."""
    for setting in settings:
        _refuse_if_unfelt(setting, workload.arms)
    arms = [(arm, resolve_arm(workload, arm, source=source)) for arm in workload.arms]
    runs = []
    for number in range(1, workload.run.rounds + 1):
        first = (number - 1) % len(arms) if arms else 0
        for arm, resolved in arms[first:] + arms[:first]:
            settings_of_run = resolved.run.model_copy(update={"seed": workload.run.seed + number})
            seeded = resolved.model_copy(update={"run": settings_of_run})
            runs.append(ArmRun(round=number, arm=arm.name, workload=seeded, target=arm.target))
    return runs


def resolve_arm(workload: Workload, arm: ArmSettings, *, source: str) -> Workload:
    data = workload.model_dump(
        exclude={"arms": True, "value": True, "gate": True, "run": {"rounds", "reference_arm"}}
    )
    data["engine"] |= arm.engine
    data["collect"] |= arm.collect
    data["load"] = _changed(data["load"], arm.load)
    data["arrivals"] = _changed(data["arrivals"], arm.arrivals)
    return validate(Workload, data, source=f"{source}, arm `{arm.name}`")


def check_engine_is_ours(
    workload: Workload, settings: Sequence[str], *, target_url: str | None
) -> None:
    has_ours = target_url is None and (
        not workload.arms or any(arm.target is None for arm in workload.arms)
    )
    for setting in settings:
        if parse_setting(setting)[0][0] == "engine" and not has_ours:
            raise ConfigError(
                f"--set {setting}: is for the bundled engine only, and none is started: a server "
                "at a URL is started with its own settings"
            )
    for arm in workload.arms:
        place = target_url if arm.target is None else arm.target.place
        if arm.engine and place is not None:
            raise ConfigError(
                f"workload {workload.name}, arm `{arm.name}`: changes {_keys(arm.engine)}, which "
                f"the server at {place} would not feel: all such arms would be the same. Leave "
                "--target out to compare bundled engines, or give each arm a server of its own: "
                "[arms.target] url, or command"
            )
    if target_url is not None and workload.arms and all(arm.target for arm in workload.arms):
        raise ConfigError(f"--target {target_url}: every arm of {workload.name} has its own")


def unused_engine_settings(workload: Workload) -> str | None:
    defaults = EngineSettings()
    chosen = {name: value for name, value in workload.engine if value != getattr(defaults, name)}
    if not chosen:
        return None
    return f"the workload's {_keys(chosen)}: not used, this server has settings of its own"


def _changed(section: Mapping[str, Any], by: Mapping[str, Any]) -> dict[str, Any]:
    is_another = by.get("kind", section["kind"]) != section["kind"]
    return dict(by) if is_another else {**section, **by}


def _keys(engine: Mapping[str, object]) -> str:
    return ", ".join(f"`engine.{key}`" for key in engine)


def _refuse_if_unfelt(setting: str, arms: Sequence[ArmSettings]) -> None:
    (section, *keys), _ = parse_setting(setting)
    if len(keys) != 1 or section not in ("engine", "load", "arrivals", "collect"):
        return
    if arms and all(keys[0] in getattr(arm, section) for arm in arms):
        names = ", ".join(arm.name for arm in arms)
        raise ConfigError(f"--set {setting}: every arm has its own ({names}): change it there")
