"""Runs as values for a notebook, a script or another program: `harness.load_run`."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import pandas as pd

from harness.analysis.cancellations import cancellations
from harness.analysis.run_facts import load_window
from harness.errors import ConfigError
from harness.records import FIGURES, ArmsSummary, ArmSummary, Metric, Summary
from harness.stats import Floats
from harness.store.frames import RunFrames
from harness.store.manifest import Manifest
from harness.store.remains import Remains
from harness.store.run_folder import RunFolder, open_run, read_results

COLUMNS: Final = ("unit", "n", "n_censored", "method", "bound", *FIGURES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The beginning and end of the load, and the end of the watching, in monotonic nanoseconds."""

    started_ns: int
    ended_ns: int
    settled_ns: int

    def seconds(self, stamps: pd.Series) -> Floats:
        return (stamps.to_numpy(dtype=np.float64) - self.started_ns) / 1e9

    @property
    def length_s(self) -> float:
        return (self.ended_ns - self.started_ns) / 1e9


class Run:
    """One run's folder, read only. Times in frames are integers (ns, monotonic clock of the host).
    `arms` has a summary of each arm, if there are arms."""

    def __init__(
        self, folder: RunFolder, manifest: Manifest, summary: Summary | ArmsSummary
    ) -> None:
        self.path = folder.path
        self._folder = folder
        self.manifest = manifest
        self.summary = summary
        self.arms = summary.arms if isinstance(summary, ArmsSummary) else {}

    def __repr__(self) -> str:
        return f"<Run {self.manifest.run_id}: {self.manifest.status}, {self.path}>"

    @property
    def whole(self) -> Summary:
        """The summary of a run without arms. Raises ConfigError if there are arms."""
        if isinstance(self.summary, ArmsSummary):
            names = ", ".join(self.arms)
            raise ConfigError(f"{self.path}: has arms: take one of run.arms ({names})")
        return self.summary

    @property
    def of_arms(self) -> ArmsSummary:
        assert isinstance(self.summary, ArmsSummary)
        return self.summary

    @property
    def outcomes(self) -> dict[str, int]:
        return self.whole.outcomes

    @property
    def metrics(self) -> dict[str, Metric]:
        """Every figure that this run has, by name. Raises ConfigError if there are arms (`arms` has
        the figures of each arm)."""
        return self.whole.metrics

    @property
    def not_measurable(self) -> dict[str, str]:
        return self.whole.not_measurable

    @cached_property
    def rounds(self) -> "dict[str, Run]":
        return {one.path.name: _read(one) for one in self._folder.judged_runs()}

    @cached_property
    def figures(self) -> pd.DataFrame:
        """One row a metric (of each arm): arm, metric, unit, n, n_censored, method, bound, and the
        figures as columns, NaN if not known."""
        arms: dict[str, Summary | ArmSummary] = {**self.arms} or {"": self.whole}
        rows = [
            (arm, name, *(getattr(one, column) for column in COLUMNS))
            for arm, of in arms.items()
            for name, one in of.metrics.items()
        ]
        frame = pd.DataFrame.from_records(rows, columns=["arm", "metric", *COLUMNS])
        return frame.astype(dict.fromkeys(FIGURES, float))

    @cached_property
    def frames(self) -> RunFrames:
        """All rows. Raises ConfigError if a file is missing or damaged, and if there are arms (each
        of `rounds` has its own)."""
        return self._rows.frames()

    @cached_property
    def outline(self) -> RunFrames:
        """All rows, requests without `token_times_ns` and `event_tokens`: an eighth of the memory
        for a large run. Raises ConfigError like `frames`."""
        if "frames" in vars(self):
            return self.frames
        return self._rows.frames(with_tokens=False)

    @cached_property
    def clock(self) -> Clock:
        """The load window of the manifest; without one, from the first request to the last."""
        window, settled = self.manifest.window, self.manifest.window.settled_ns
        requests = self.outline.requests
        started, ended = load_window(window.load_started_ns, window.load_ended_ns, requests)
        return Clock(
            started_ns=started, ended_ns=ended, settled_ns=ended if settled is None else settled
        )

    @property
    def _rows(self) -> RunFolder:
        if self.arms:
            raise ConfigError(f"{self.path}: has arms: take the frames of one of run.rounds")
        return self._folder

    @property
    def requests(self) -> pd.DataFrame:
        return self.frames.requests

    @property
    def lifecycle(self) -> pd.DataFrame:
        return self.outline.lifecycle

    @property
    def steps(self) -> pd.DataFrame:
        return self.outline.steps

    @property
    def server_metrics(self) -> pd.DataFrame:
        return self.outline.server_metrics

    @cached_property
    def cancellations(self) -> pd.DataFrame:
        """One row an abandoned request: when each stage of its cancel came and how long it took
        (seconds), and its waste; see `harness.analysis.cancellations.cancellations`."""
        return cancellations(self.outline)


def load_run(path: str | Path) -> Run:
    """Read a run's folder.

    Raises ConfigError if it is none, if a walkaway of another schema version wrote it, if a file is
    damaged, and if the run was cut short before it was judged (`walkaway report` judges it).
    """
    return _read(open_run(Path(path)))


def load_remains(path: Path) -> tuple[Run, Remains]:
    """Read a run's folder as far as its files allow. Once its rows were read, `Remains.lost` says
    what could not be read. Raises ConfigError like `load_run` for what cannot be done without."""
    folder = Remains(open_run(path).path)
    return _read(folder), folder


def _read(folder: RunFolder) -> Run:
    manifest, summary = read_results(folder)
    try:
        return Run(folder, msgspec.convert(manifest, Manifest), summary)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{folder.path}: its files are damaged: {error}") from error
