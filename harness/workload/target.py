"""Targets: how to speak to a kind of server, and what it tells about itself.

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
    """How many steps late a page shows that a request came (counted from the step's beginning at
    which it is taken in), that it ended by itself (from its client's last token), and that the
    server let go of it (from when it did)."""

    coming: Annotated[float, Field(ge=0, le=MOST_TOKENS)]
    ended: Annotated[float, Field(ge=0, le=MOST_TOKENS)]
    left: Annotated[float, Field(ge=0, le=MOST_TOKENS)]


class MetricSource(Section):
    """Where a quantity is read on a target, when it moves, and how far it can be believed.

    Trust: `exact` at any time; `exact_when_idle` only when nothing runs; `lower` the true value may
    be higher; `stuck` never moves, whatever the documentation says. `lag_steps` and `lag_s` say how
    old the value on the page can be, in engine steps and in seconds; they add up. `late_steps`,
    where the server's step loop is known: how old it is on average, which can be put right.
    """

    name: Annotated[str, Field(min_length=1)]
    labels: dict[str, str] = Field(default_factory=dict)
    refresh: str
    lag_steps: Annotated[float, Field(ge=0, le=MOST_TOKENS)] = 0.0
    lag_s: Seconds = 0.0
    late_steps: LateSteps | None = None
    trust: Trust


class LabelSource(Section):
    """A number that a metric carries as a label."""

    name: Annotated[str, Field(min_length=1)]
    label: Annotated[str, Field(min_length=1)]


class PageSource(Section):
    """A text that stands under a key of one of the server's own pages (JSON)."""

    path: UrlPath
    key: Annotated[str, Field(min_length=1)]


class Target(Section):
    """How to speak to one kind of server and what it tells about itself.

    `usage_per_choice`: the usage in an event is of the answer that it belongs to, not of all `n`.
    `cancel_path`: where a POST cancels the request whose X-Request-Id stands for {id}.
    `slots_from`: where the number of batch slots stands: on /walkaway/config, on /props, or only in
    the workload (else it is found by trying); `blocks_from`: where that of KV cache blocks does;
    `version_from`: where its version does.
    `min_scrape_interval_s`: read more often than this, the server behaves differently.
    `silence_s`: after how long it gives up a client that reads nothing, or acknowledges nothing,
    where that is known; so much longer it is watched after a load whose users leave in such ways.
    `longest_step_s`: a step may take so long; if no counter moved meanwhile, nothing is computed.
    `bytes_are_tokens`: a prompt has as many tokens as bytes; else that is found out before a load.
    """

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
