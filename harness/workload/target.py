"""Targets: how to speak to a kind of server, and what it reports about itself.

A target is a TOML file, shipped by name or given as a path; docs/targets.md explains each key.
"""

from typing import Annotated, Literal

from pydantic import Field

from harness.records import Trust
from harness.workload.values import (
    MOST_TOKENS,
    Duration,
    ExtraValue,
    ScrapeInterval,
    Seconds,
    Section,
    UrlPath,
)

MetricRole = Literal[
    "running",
    "waiting",
    "free_blocks",
    "kv_usage",
    "generated_tokens",
    "prompt_tokens",
    "preemptions",
    "aborted",
    "recomputed_tokens",
    "ended",
    "decode_calls",
]


class LateSteps(Section):
    """How many steps late the metrics page shows that a request came (from the beginning of the
    step that takes it in), ended by itself (from the client's last token), and was let go after its
    client left (from the moment it was)."""

    coming: Annotated[float, Field(ge=0, le=MOST_TOKENS)]
    ended: Annotated[float, Field(ge=0, le=MOST_TOKENS)]
    left: Annotated[float, Field(ge=0, le=MOST_TOKENS)]


class MetricSource(Section):
    name: Annotated[str, Field(min_length=1)]
    labels: dict[str, str] = Field(default_factory=dict)
    refresh: str
    lag_steps: Annotated[float, Field(ge=0, le=MOST_TOKENS)] = 0.0
    lag_s: Seconds = 0.0
    late_steps: LateSteps | None = None
    trust: Trust


class LabelSource(Section):
    name: Annotated[str, Field(min_length=1)]
    label: Annotated[str, Field(min_length=1)]


class PageSource(Section):
    """A text under a key of one of the server's own pages (JSON)."""

    path: UrlPath
    key: Annotated[str, Field(min_length=1)]


class Target(Section):
    name: str
    description: str
    path: UrlPath = "/v1/completions"
    extra_body: dict[str, ExtraValue] = Field(default_factory=dict)
    stream_options: dict[str, bool] | None = None
    continuous_usage: bool = False
    usage_per_choice: bool = False
    cancel_path: UrlPath | None = None
    bytes_are_tokens: bool = False
    lifecycle: bool = False
    slots_from: Literal["config", "props", "workload"] = "workload"
    blocks_from: LabelSource | None = None
    version_from: PageSource | None = None
    scrape_interval_s: ScrapeInterval | None = None
    min_scrape_interval_s: ScrapeInterval | None = None
    settle_s: Seconds
    settle_steps: Annotated[int, Field(ge=0, le=MOST_TOKENS)] | None = None
    silence_s: Seconds | None = None
    longest_step_s: Duration = 1.0
    metrics: dict[MetricRole, MetricSource] = Field(default_factory=dict)
