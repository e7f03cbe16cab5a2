"""A run that was kept, and whether another may be compared with it.

The file holds what `harness.gate.measured` reads of a run, so that it can be read without it. Of
another workload, or of another demand, nothing can be compared; on another machine a time cannot,
but what is counted in steps, tokens or blocks, and every share, can.
"""

from pathlib import Path
from typing import Any, Final

import msgspec

from harness.analysis.comparable import depends_on_machine, other_machine
from harness.analysis.compare import FEWEST_ROUNDS
from harness.errors import ConfigError
from harness.gate.limits import BASELINE
from harness.gate.measured import Measured, Side
from harness.metrics import METRICS
from harness.records import SCHEMA_VERSION
from harness.store.run_folder import other_version

FOLDER: Final = Path("results") / "baselines"
# Judged against a baseline where no limit says what else: the more of it, the worse.
AGAINST_BASELINE: Final = tuple(
    f"{one.name}.{one.baseline_figure}" for one in METRICS.values() if one.baseline_figure
)


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a baseline's file."""

    schema_version: int = SCHEMA_VERSION
    measured: Measured


def place_of(workload: str) -> Path:
    """Where the baseline of a workload lies, unless the user says otherwise."""
    return FOLDER / f"{workload}.json"


def save_baseline(measured: Measured, path: Path, *, may_overwrite: bool) -> None:
    """Raises ConfigError where there is one already, or none can be written."""
    if path.exists() and not may_overwrite:
        raise ConfigError(f"{path}: there is a baseline already; --force replaces it")
    content = msgspec.json.format(msgspec.json.encode(Baseline(measured=measured)))
    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content + b"\n")
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from error


def load_baseline(path: Path, *, workload: str) -> Baseline:
    """Raises ConfigError where it cannot be read, or is of another workload."""
    try:
        content = path.read_bytes()
        if said := other_version(msgspec.json.decode(content, type=dict[str, Any])):
            raise ConfigError(f"{path}: {said}; save the baseline again")
        baseline = msgspec.json.decode(content, type=Baseline)
    except (OSError, RecursionError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path}: is no baseline that can be read: {error}") from error
    of = baseline.measured.conditions.workload
    if of != workload:
        raise ConfigError(f"{path}: is a baseline of workload {of}, and the run is of {workload}")
    return baseline


def figures_to_hold_to(side: Side) -> list[str]:
    """Those of `AGAINST_BASELINE` of which a later run can be said to have so many times as much:
    there are rounds enough, and none is zero, or all are."""
    found = []
    for figure in AGAINST_BASELINE:
        metric, _, key = figure.partition(".")
        rounds = side.per_round.get(metric, {}).get(key, [])
        values = [value for value in rounds if value is not None]
        has_ratio = all(value > 0 for value in values) or not any(values)
        if metric in side.metrics and len(values) >= FEWEST_ROUNDS and has_ratio:
            found.append(figure)
    return found


def limits_against_baseline(
    measured: Measured, before: Measured, noise: float
) -> tuple[list[str], list[str]]:
    """The limits of a comparison for which no line says what is compared, and what is left out of
    it: times of another machine, where anything else is left.

    An arm of which the baseline has nothing is held to the first figure all the same, which cannot
    be decided: nothing compared is no pass.
    """
    lines, left_out = [], []
    for arm, side in measured.sides.items():
        then = before.sides.get(arm)
        figures = figures_to_hold_to(then) if then is not None else []
        if then is not None and other_machine(side.conditions, then.conditions) is not None:
            alike = [one for one in figures if not _is_time(one, then)]
            if alike:
                left_out += [f"{arm}: {one}" for one in figures if one not in alike]
                figures = alike
        lines += [
            f"{arm} / {BASELINE}: {figure} <= {1 + noise:g}"
            for figure in figures or AGAINST_BASELINE[:1]
        ]
    return lines, left_out


def _is_time(figure: str, side: Side) -> bool:
    return depends_on_machine(side.metrics[figure.partition(".")[0]].unit)
