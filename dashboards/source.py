"""The runs that a report is made from: frames, summary, and the cancellation of each request."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pandas as pd

from harness.analysis.agreement import Agreement
from harness.analysis.audit import Entry
from harness.analysis.cancellation import cancellations
from harness.analysis.load_side import LoadSide
from harness.analysis.value import Value
from harness.errors import ConfigError
from harness.records import Difference, Metric, Remark
from harness.store.frames import RunFrames
from harness.store.manifest import Manifest
from harness.store.run_folder import RunFolder

Struct = TypeVar("Struct", bound=msgspec.Struct)

CONFIG_SHOWN: Final = (
    ("runner", "{} runner"),
    ("device", "on {}"),
    ("max_num_seqs", "{:,} slots"),
    ("num_blocks", "{:,} KV blocks"),
    ("block_size", "{:,} tokens a block"),
)


class Audit(msgspec.Struct, kw_only=True):
    """The clients' own counts, and each of the server's counters against them."""

    client: dict[str, float] = {}
    counters: list[Entry] = []


class Summary(msgspec.Struct, kw_only=True):
    """`summary.json`, as far as a report needs it."""

    run_id: str
    status: str
    workload: str
    engine: str
    model: str | None
    outcomes: dict[str, int]
    metrics: dict[str, Metric] = {}
    not_measurable: dict[str, str] = {}
    flags: dict[str, str] = {}
    validity: list[Remark] = []
    token_counting: str | None = None
    agreement: list[Agreement] = []
    audit: Audit | None = None
    steady: dict[str, Any] = {}
    wedged: bool | None = None
    load_processes: list[LoadSide] = []
    breakdown: dict[str, Any] = {}


class Arm(msgspec.Struct, kw_only=True):
    """One arm of a summary with several. `per_round`: metric, figure, a value for each round."""

    outcomes: dict[str, int]
    metrics: dict[str, Metric] = {}
    not_measurable: dict[str, str] = {}
    flags: dict[str, str] = {}
    per_round: dict[str, dict[str, list[float | None]]] = {}


class ArmsSummary(msgspec.Struct, kw_only=True):
    """`summary.json` of a workload with arms, as far as a report needs it."""

    run_id: str
    status: str
    workload: str
    engine: str | None
    model: str | None
    reference: str
    rounds: int
    headlines: list[str]
    arms: dict[str, Arm]
    differences: dict[str, dict[str, list[Difference]]]
    validity: list[Remark] = []
    value: Value | None = None

    @property
    def metrics(self) -> dict[str, dict[str, Metric]]:
        """The figures of each arm."""
        return {name: arm.metrics for name, arm in self.arms.items()}

    def difference(self, metric: str, figure: str, arm: str) -> Difference | None:
        """How an arm differs from the reference; None where that was not compared."""
        found = self.differences.get(metric, {}).get(figure, [])
        return next((one for one in found if one.arm == arm), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round of one arm. `name`: "2-honoured"."""

    name: str
    manifest: Manifest
    summary: Summary

    @property
    def arm(self) -> str:
        return self.name.partition("-")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmsRun:
    """All rounds of several arms together; `rounds` are those with a summary of their own."""

    path: Path
    manifest: Manifest
    summary: ArmsSummary
    rounds: tuple[Round, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """When the load began and ended and the watching ended, in monotonic nanoseconds."""

    started_ns: int
    ended_ns: int
    settled_ns: int

    def seconds(self, stamps: pd.Series) -> npt.NDArray[np.float64]:
        """Stamps as seconds since the load began."""
        return (stamps.to_numpy(dtype=np.float64) - self.started_ns) / 1e9

    @property
    def length_s(self) -> float:
        """How long the load ran."""
        return (self.ended_ns - self.started_ns) / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One finished run, in memory."""

    path: Path
    manifest: Manifest
    summary: Summary
    frames: RunFrames
    cancels: pd.DataFrame
    clock: Clock

    @property
    def metrics(self) -> Mapping[str, Metric]:
        return self.summary.metrics


def read_run(path: Path) -> Run | ArmsRun:
    """Read a run folder. Raises `ConfigError` where it is not one, or is damaged."""
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder; name one that `walkaway run` has written")
    folder = RunFolder(path)
    if folder.has_arms:
        return ArmsRun(
            path=path,
            manifest=_checked(folder.read_manifest(), Manifest, path / "manifest.json"),
            summary=_checked(folder.read_summary(), ArmsSummary, path / "summary.json"),
            rounds=tuple(_rounds(folder)),
        )
    frames = folder.frames()
    manifest = _checked(frames.manifest, Manifest, path / "manifest.json")
    return Run(
        path=path,
        manifest=manifest,
        summary=_checked(folder.read_summary(), Summary, path / "summary.json"),
        frames=frames,
        cancels=cancellations(frames),
        clock=run_clock(manifest, frames.requests),
    )


def _rounds(folder: RunFolder) -> Iterator[Round]:
    for path in folder.runs():
        if not (path / "summary.json").is_file():
            continue
        of_one = RunFolder(path)
        yield Round(
            name=path.name,
            manifest=_checked(of_one.read_manifest(), Manifest, path / "manifest.json"),
            summary=_checked(of_one.read_summary(), Summary, path / "summary.json"),
        )


def _checked(data: object, kind: type[Struct], path: Path) -> Struct:
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{path}: not what a run writes: {error}; restore the file or repeat the run"
        ) from error


def run_clock(manifest: Manifest, requests: pd.DataFrame) -> Clock:
    """The load window of the manifest; without one, from the first request to the last."""
    started, ended = manifest.window.load_started_ns, manifest.window.load_ended_ns
    if started is None:
        started = 0 if requests.empty else int(requests["sent_ns"].min())
    if ended is None:
        ended = started if requests.empty else int(requests["ended_ns"].max())
    settled = manifest.window.settled_ns
    return Clock(
        started_ns=started, ended_ns=ended, settled_ns=ended if settled is None else settled
    )


def server_in_words(engine: str, config: Mapping[str, Any]) -> str:
    """ "reference, simulated runner, 16 slots": the engine, and what it tells of its `config`."""
    details = [
        form.format(config[key]) for key, form in CONFIG_SHOWN if config.get(key) is not None
    ]
    return ", ".join([engine, *details])
