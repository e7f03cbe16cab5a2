"""A run in memory: the frames that every analysis starts from."""

from dataclasses import dataclass
from typing import Any

import pandas as pd


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunFrames:
    """One run. The columns of each frame are the fields of its record in `harness.records`.

    `steps` holds its two maps as three aligned list columns: `request_ids`, `scheduled_tokens`,
    `sampled_tokens`. A missing source is an empty frame with its columns. The lists of `requests`
    stay arrow arrays: see `harness.analysis.tokens`. `probe_phase` holds the probes after the load
    of `demo`: only slot recovery counts them, and cancel latency where nothing else shows it.
    """

    manifest: dict[str, Any]
    requests: pd.DataFrame
    lifecycle: pd.DataFrame
    steps: pd.DataFrame
    server_metrics: pd.DataFrame
    cpu: pd.DataFrame
    gpu: pd.DataFrame
    client: pd.DataFrame
    probe_phase: pd.DataFrame | None = None

    @property
    def probes(self) -> pd.DataFrame:
        """The requests of the probe phase, else of the load, which may be of probes itself."""
        return self.requests if self.probe_phase is None else self.probe_phase
