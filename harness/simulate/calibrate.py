"""A machine measured from runs: the terms of a step from step logs, the lags from what clients and
server stamped.

What steps took beyond their terms becomes the distribution `step_s`, whose mean makes up for it.
The bundled engine's simulated runner sleeps for a stated cost: there only what steps took beyond
that is fitted, and the machine `adds_to_stated` costs.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from harness.analysis.run_facts import run_facts
from harness.errors import ConfigError
from harness.simulate.machine import Cost, Covered, EngineDefaults, Lags, SimulatedMachine
from harness.simulate.measured_lags import lags_of
from harness.simulate.measured_steps import TERMS, MeasuredSteps, fit_steps, pooled, step_work
from harness.stats import Floats
from harness.store.frames import RunFrames
from harness.store.run_folder import open_run

FEWEST_STEPS: Final = 200


def calibrate(runs: Mapping[str, RunFrames], name: str) -> SimulatedMachine:
    """`runs`: by the name they are to be cited with. Raises ConfigError."""
    for one, frames in runs.items():
        facts = run_facts(frames)
        if (why := facts.lacks("steps", "lifecycle", "clock", "load")) is not None:
            raise ConfigError(f"{one}: cannot be calibrated from: {why}")
    _refuse_mix(runs)
    steps = pooled([step_work(frames) for frames in runs.values()])
    if len(steps.took_s) < FEWEST_STEPS:
        raise ConfigError(
            f"{', '.join(runs)}: {len(steps.took_s)} steps follow each other without a pause, too "
            f"few to calibrate: {FEWEST_STEPS} are needed; let the load last longer"
        )
    fit = fit_steps(steps)
    lags = lags_of(list(runs.values()), steps, fit.beyond_s)
    frames, is_stated = next(iter(runs.values())), bool(steps.stated_s.any())
    return SimulatedMachine(
        name=name,
        title=f"{_model_of(frames)}, measured",
        kind="measured",
        gpus=len(_gpus(frames)),
        gpu=next(iter(_gpus(frames)), None),
        model=None if is_stated else frames.manifest["target"]["model"],
        sources=[_citation(one, frames) for one, frames in runs.items()],
        assumptions=_assumptions(steps, lags),
        adds_to_stated=is_stated,
        cost=Cost(**dict(zip(TERMS, map(float, fit.terms), strict=True)), swap_block_s=0.0),
        range=Covered(
            running=_span(steps.running),
            batched_tokens=_span(steps.work[:, 1] + steps.work[:, 2]),
            context_tokens=_span(steps.work[:, 3]),
        ),
        engine=EngineDefaults() if is_stated else _engine_of(runs.values()),
        lags=lags,
        error=fit.error,
    )


def _refuse_mix(runs: Mapping[str, RunFrames]) -> None:
    """A fit to steps of two machines is of neither."""
    (first, frames), *others = runs.items()
    own = _measured_on(frames)
    for other, theirs in ((name, _measured_on(one)) for name, one in others):
        for what, value in own.items():
            if theirs[what] != value:
                raise ConfigError(
                    f"{first} has {what} {value}, and {other} {theirs[what]}: one machine is "
                    "calibrated from runs of one; name them apart"
                )


def _measured_on(frames: RunFrames) -> dict[str, Any]:
    target, hardware = frames.manifest["target"], frames.manifest.get("hardware") or {}
    config, gpus = target.get("config") or {}, _gpus(frames)
    return {
        "engine": target["engine"],
        "runner": config.get("runner"),
        "model": None if config.get("runner") == "simulated" else target["model"],
        "GPUs": ", ".join(gpus) or "none",
        "processor": hardware.get("cpu"),
    }


def read_runs(paths: Sequence[Path]) -> dict[str, RunFrames]:
    """Raises ConfigError."""
    folders = {path: open_run(path) for path in paths}
    for path, folder in folders.items():
        if folder.has_arms:
            raise ConfigError(f"{path}: has arms; name the run of one of them, in {folder.rounds}")
        if folder.read_manifest().get("simulated"):
            raise ConfigError(f"{path}: is simulated itself; calibrate from runs of a live server")
    count = Counter(folder.name for folder in folders.values())
    return {
        folder.name if count[folder.name] == 1 else str(path): folder.frames()
        for path, folder in folders.items()
    }


# The machine's own description


def _span(values: Floats) -> list[float]:
    return [float(values.min()), float(values.max())]


def _assumptions(steps: MeasuredSteps, lags: Lags) -> list[str]:
    names = ("", "tokens of prompts", "tokens of answers", "tokens of context")
    said = [
        f"the number of {what} never changed: their time is in fixed_s"
        for what, column in zip(names, steps.work.T, strict=True)
        if what and column.min() == column.max()
    ]
    for what, lag_s in (
        ("a user of a closed loop asks again", lags.rest_s),
        ("a slot that was freed is taken", lags.schedule_s),
    ):
        said += [] if lag_s[-1] else [f"{what} at once: it was not measured"]
    return [
        *said,
        "blocks are copied in no time beyond what is stated: it was not measured",
        "a request reaches the worker as fast as an abort, from the frontend on",
    ]


def _gpus(frames: RunFrames) -> list[str]:
    found: list[str] = (frames.manifest.get("hardware") or {}).get("gpus") or []
    config = frames.manifest["target"].get("config") or {}
    return found if config.get("gpu_name") else []


def _model_of(frames: RunFrames) -> str:
    target = frames.manifest["target"]
    config = target.get("config") or {}
    is_simulated = config.get("runner") == "simulated"
    where = (frames.manifest.get("hardware") or {}).get("cpu") or "an unknown machine"
    what = "the simulated runner" if is_simulated else target["model"]
    return f"{what} of engine {target['engine']} on {config.get('gpu_name') or where}"


def _citation(name: str, frames: RunFrames) -> str:
    manifest = frames.manifest
    version = (manifest.get("versions") or {}).get("walkaway")
    workload = (manifest.get("workload") or {}).get("name")
    return f"run {name} of {manifest['created_at'][:10]}, workload {workload}, walkaway {version}"


def _engine_of(runs: Iterable[RunFrames]) -> EngineDefaults:
    """Settings in which all runs agree."""
    configs = [one.manifest["target"].get("config") or {} for one in runs]
    found = {name: [one.get(name) for one in configs] for name in EngineDefaults.model_fields}
    return EngineDefaults(
        **{name: each[0] for name, each in found.items() if each.count(each[0]) == len(each)}
    )


def as_toml(machine: SimulatedMachine) -> str:
    """The machine's file."""
    plain = machine.model_dump(exclude_none=True, exclude={"name"})
    tables = {key: value for key, value in plain.items() if isinstance(value, dict)}
    lines = [_line(key, value) for key, value in plain.items() if key not in tables]
    for key, table in tables.items():
        inner = {name: value for name, value in table.items() if isinstance(value, dict)}
        lines += ["", f"[{key}]"] if table else []
        lines += [_line(name, value) for name, value in table.items() if name not in inner]
        for name, values in inner.items():
            lines += ["", f"[{key}.{name}]", *(_line(*item) for item in values.items())]
    return "\n".join(lines) + "\n"


def _line(key: str, value: Any) -> str:
    return f"{key} = {_value(value)}"


def _value(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            quoted = value.replace("\\", "\\\\").replace('"', '\\"')
            return f'"{quoted}"'
        case list() if value and isinstance(value[0], str):
            return "[\n" + "".join(f"  {_value(one)},\n" for one in value) + "]"
        case list():
            return f"[{', '.join(map(_value, value))}]"
        case float():
            return f"{value:.6g}"
        case _:
            return str(value)
