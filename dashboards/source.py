"""The runs that a report is made from: frames, summary, and the cancellation of each request."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd

from harness.analysis.cancellation import cancellations
from harness.analysis.facts import load_window
from harness.errors import ConfigError
from harness.export import library
from harness.export.library import load_run
from harness.records import ArmsSummary, Metric, Summary
from harness.store.frames import RunFrames
from harness.store.manifest import Manifest
from harness.store.run_folder import RunFolder

CONFIG_SHOWN: Final = (
    ("runner", "{} runner"),
    ("device", "on {}"),
    ("max_num_seqs", "{:,} slots"),
    ("num_blocks", "{:,} KV blocks"),
    ("block_size", "{:,} tokens a block"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmsRun:
    """All rounds of several arms. `rounds`: those that ended, by name ("2-honoured")."""

    path: Path
    manifest: Manifest
    summary: ArmsSummary
    rounds: Mapping[str, library.Run]


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """When the load began and ended and the watching ended, in monotonic nanoseconds."""

    started_ns: int
    ended_ns: int
    settled_ns: int

    def seconds(self, stamps: pd.Series) -> npt.NDArray[np.float64]:
        return (stamps.to_numpy(dtype=np.float64) - self.started_ns) / 1e9

    @property
    def length_s(self) -> float:
        return (self.ended_ns - self.started_ns) / 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
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
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder; name one that `walkaway run` has written")
    run, rounds = load_run(path), RunFolder(path).rounds
    if isinstance(run.summary, ArmsSummary):
        ended = sorted(file.parent for file in rounds.glob("*/summary.json"))
        return ArmsRun(
            path=path,
            manifest=run.manifest,
            summary=run.summary,
            rounds={one.name: load_run(one) for one in ended},
        )
    return Run(
        path=path,
        manifest=run.manifest,
        summary=run.summary,
        frames=run.frames,
        cancels=cancellations(run.frames),
        clock=run_clock(run.manifest, run.frames.requests),
    )


def run_clock(manifest: Manifest, requests: pd.DataFrame) -> Clock:
    """The load window of the manifest; without one, from the first request to the last."""
    window, settled = manifest.window, manifest.window.settled_ns
    started, ended = load_window(window.load_started_ns, window.load_ended_ns, requests)
    return Clock(
        started_ns=started, ended_ns=ended, settled_ns=ended if settled is None else settled
    )


def server_in_words(engine: str, config: Mapping[str, Any]) -> str:
    details = [
        form.format(config[key]) for key, form in CONFIG_SHOWN if config.get(key) is not None
    ]
    return ", ".join([engine, *details])
