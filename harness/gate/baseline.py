"""A saved run that later runs are compared with.

The file holds what the gate reads of a run (`Measured`), so the run's folder may go. If no limit
names the baseline, each of `AGAINST_BASELINE` may not grow by more than `gate.noise`.
"""

from pathlib import Path
from typing import Any, Final

import msgspec

from harness.compare.comparable import depends_on_machine, other_machine
from harness.compare.pairs import FEWEST_ROUNDS
from harness.errors import ConfigError, in_words
from harness.gate.judge import GateSide, Measured
from harness.gate.limits import BASELINE, Limit
from harness.metrics import METRICS
from harness.records import SCHEMA_VERSION
from harness.store.output import write_output
from harness.store.run_folder import other_version

FOLDER: Final = Path("results") / "baselines"
AGAINST_BASELINE: Final = tuple(
    f"{one.name}.{one.baseline_figure}" for one in METRICS.values() if one.baseline_figure
)


class Baseline(msgspec.Struct, frozen=True, kw_only=True):
    schema_version: int = SCHEMA_VERSION
    measured: Measured


def place_of(workload: str) -> Path:
    return FOLDER / f"{workload}.json"


def save_baseline(measured: Measured, path: Path, *, may_overwrite: bool) -> None:
    if path.exists() and not may_overwrite:
        raise ConfigError(f"{path}: there is a baseline already; --force replaces it")
    content = msgspec.json.format(msgspec.json.encode(Baseline(measured=measured)))
    write_output(path, content + b"\n", ours=None, may_overwrite=True)


def load_baseline(path: Path, *, workload: str) -> Measured:
    """Raises ConfigError if the file cannot be read, or belongs to another workload."""
    try:
        content = path.read_bytes()
        if said := other_version(msgspec.json.decode(content, type=dict[str, Any])):
            raise ConfigError(f"{path}: {said}; save the baseline again")
        measured = msgspec.json.decode(content, type=Baseline).measured
    except (OSError, RecursionError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{path}: is not a baseline that can be read: {in_words(error)}; `walkaway gate RUN "
            "--save-baseline` writes one"
        ) from error
    of = measured.conditions.workload
    if of != workload:
        raise ConfigError(f"{path}: is a baseline of workload {of}, and the run is of {workload}")
    return measured


def figures_to_hold_to(side: GateSide) -> list[str]:
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
) -> tuple[list[Limit], list[str]]:
    """The limits on a run if no line names the baseline, and the figures left out: times of another
    machine, unless an arm has nothing else.

    An arm that the baseline lacks still gets the first figure as its limit. That cannot be decided:
    comparing nothing is no pass.
    """
    limits, left_out = [], []
    for arm, side in measured.sides.items():
        then = before.sides.get(arm)
        figures = figures_to_hold_to(then) if then is not None else []
        if then is not None and other_machine(side.conditions, then.conditions) is not None:
            alike = [one for one in figures if not _is_time(one)]
            if alike:
                left_out += [f"{arm}: {one}" for one in figures if one not in alike]
                figures = alike
        limits += [_at_most(1 + noise, arm, figure) for figure in figures or AGAINST_BASELINE[:1]]
    return limits, left_out


def _at_most(times: float, arm: str, figure: str) -> Limit:
    metric, _, key = figure.partition(".")
    return Limit(
        arm=arm, relation="/", against=BASELINE, metric=metric, key=key, operator="<=", number=times
    )


def _is_time(figure: str) -> bool:
    return depends_on_machine(METRICS[figure.partition(".")[0]].unit)
