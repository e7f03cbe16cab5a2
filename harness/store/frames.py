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
    of `walkaway demo`: only slot recovery counts them.
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
