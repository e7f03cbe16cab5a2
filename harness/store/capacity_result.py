"""The file of `walkaway simulate capacity`: capacity.json."""

from pathlib import Path
from typing import Any, Final

import msgspec

from harness.errors import ConfigError, in_words

CAPACITY_SCHEMA: Final = 1
CAPACITY_FILE: Final = "capacity.json"

Interval = tuple[float, float]


class Estimate(msgspec.Struct, kw_only=True):
    """`value`, and its 95 % interval over seeds (null with one seed)."""

    value: float
    ci95: Interval | None = None

    def times(self, factor: float) -> "Estimate":
        ends = None if self.ci95 is None else (self.ci95[0] * factor, self.ci95[1] * factor)
        return Estimate(value=self.value * factor, ci95=ends)


class Need(msgspec.Struct, kw_only=True):
    """The need of one way to treat a cancel. `rate`: the most requests a second a replica can take;
    `rates`: by seed. `more`: replicas beyond the first need's, as a share of the first need's, by
    paired seeds. `figures`: per replica at that rate, means over the seeds; figures that need lists
    of tokens (`gpu_seconds_sum`, `slot_seconds_sum`, `block_seconds_sum`) are of the first seed."""

    name: str
    faults: list[str]
    rates: list[float]
    rate: Estimate
    replicas: Estimate
    more: Estimate | None = None
    gpus: Estimate | None = None
    money_a_month: Estimate | None = None
    figures: dict[str, float] = {}
    runs: list[str] = []


class CapacityResult(msgspec.Struct, kw_only=True):
    """`goal`: the limits that a replica must hold."""

    schema_version: int = CAPACITY_SCHEMA
    walkaway: str
    created_at: str
    command: str
    workload: str
    question: str
    machine: dict[str, Any]
    rate: float
    goal: list[str]
    late_s: float
    price_hour: float | None
    needs: list[Need]
    assumptions: list[str] = []
    remarks: list[str] = []

    def write(self, folder: Path) -> Path:
        path = folder / CAPACITY_FILE
        part = path.with_name(path.name + ".part")
        part.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")
        part.replace(path)
        return path


def read_capacity(folder: Path) -> CapacityResult:
    path = folder / CAPACITY_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=CapacityResult)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {in_words(error)}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"{path} is no result of `walkaway simulate capacity`: {in_words(error)}"
        ) from error
