"""The runs that a report is made from: frames, summary, and the cancellation of each request."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pandas as pd

from harness.analysis.cancellation import cancellations
from harness.errors import ConfigError
from harness.records import ArmsSummary, Metric, Summary
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
            summary=_summary(folder, ArmsSummary),
            rounds=tuple(_rounds(folder)),
        )
    frames = folder.frames()
    manifest = _checked(frames.manifest, Manifest, path / "manifest.json")
    return Run(
        path=path,
        manifest=manifest,
        summary=_summary(folder, Summary),
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
            summary=_summary(of_one, Summary),
        )


def _summary(folder: RunFolder, kind: type[Struct]) -> Struct:
    summary = folder.read_summary()
    if not isinstance(summary, kind):
        raise ConfigError(f"{folder.path}: summary.json is not of the workload of manifest.json")
    return summary


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
