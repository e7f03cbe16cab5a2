"""What a report is made from: a run's frames, its summary and its per-request cancellations."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pandas as pd

from dashboards.timelines import Clock
from harness.analysis.cancellation import cancellations
from harness.analysis.frames import RunFrames
from harness.analysis.validity import Remark
from harness.errors import ConfigError
from harness.manifest import Manifest
from harness.records import Metric
from harness.store import RunFolder

Struct = TypeVar("Struct", bound=msgspec.Struct)


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
    breakdown: dict[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One finished run, in memory."""

    manifest: Manifest
    summary: Summary
    frames: RunFrames
    cancels: pd.DataFrame
    clock: Clock

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """The figures of the whole run."""
        return self.summary.metrics


def read_run(path: Path) -> Run:
    """Read a run folder. Raises `ConfigError` where it is not one, or is damaged."""
    if not path.is_dir():
        raise ConfigError(f"{path}: no such folder; name one that `walkaway run` has written")
    folder = RunFolder(path)
    frames = folder.frames()
    manifest = _checked(frames.manifest, Manifest, path / "manifest.json")
    return Run(
        manifest=manifest,
        summary=_checked(folder.read_summary(), Summary, path / "summary.json"),
        frames=frames,
        cancels=cancellations(frames),
        clock=run_clock(manifest, frames.requests),
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
