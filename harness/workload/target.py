"""Targets: how to speak to a kind of server, and what it reports about itself.

A target is a TOML file, shipped by name or given as a path; docs/targets.md explains each key.
"""

from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from harness.records import Disconnect, Protocol, Trust
from harness.workload.values import (
    MOST_TOKENS,
    Duration,
    ExtraValue,
    ScrapeInterval,
    Seconds,
    TomlTable,
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
    "forced_reclaims",
    "ended",
    "decode_calls",
    "frontend_cancelled",
    "worker_cancelled",
]

DialectName = Literal["completions", "chat", "responses", "messages", "embeddings", "rerank"]


class LateSteps(TomlTable):
    """How many steps late the metrics page shows that a request came (from the beginning of the
    step that takes it in), ended by itself (from the client's last token), and was let go after its
    client left (from the moment it was)."""

    coming: Annotated[float, Field(ge=0, le=MOST_TOKENS)]
    ended: Annotated[float, Field(ge=0, le=MOST_TOKENS)]
    left: Annotated[float, Field(ge=0, le=MOST_TOKENS)]


class MetricSource(TomlTable):
    """`repeated`: each frontend's page shows that of the whole server. `optional`: not every server
    of the kind shows it, or not at all times."""

    name: Annotated[str, Field(min_length=1)]
    labels: dict[str, str] = Field(default_factory=dict)
    refresh: str
    lag_steps: Annotated[float, Field(ge=0, le=MOST_TOKENS)] = 0.0
    lag_s: Seconds = 0.0
    late_steps: LateSteps | None = None
    trust: Trust
    repeated: bool = False
    optional: bool = False


class Signs(TomlTable):
    """What a server of this kind is recognised by. `owned_by`: the owner in its list of models;
    `metrics`: how a metric's name begins; `server`: how that header begins, in small letters;
    `page`: a page (JSON) that no other kind has."""

    owned_by: str | None = None
    metrics: str | None = None
    server: str | None = None
    page: UrlPath | None = None


class LabelSource(TomlTable):
    name: Annotated[str, Field(min_length=1)]
    label: Annotated[str, Field(min_length=1)]


class PageSource(TomlTable):
    """A text under a key of one of the server's own pages (JSON)."""

    path: UrlPath
    key: Annotated[str, Field(min_length=1)]


_TENSORS: Final[dict[str, tuple[str, Any]]] = {
    "BYTES": ("bytes_contents", str.encode),
    "INT32": ("int_contents", int),
    "UINT32": ("uint_contents", int),
    "INT64": ("int64_contents", int),
    "FP32": ("fp32_contents", float),
    "BOOL": ("bool_contents", {"true": True, "false": False}.__getitem__),
}


class TensorSource(TomlTable):
    """An input of one element. In `value`, {prompt} and {max_tokens} stand for the request's."""

    name: Annotated[str, Field(min_length=1)]
    datatype: Literal["BYTES", "INT32", "UINT32", "INT64", "FP32", "BOOL"]
    value: str

    @model_validator(mode="after")
    def _has_its_type(self) -> Self:
        try:
            self.element("a prompt", 1)
        except (KeyError, ValueError):
            raise ValueError(f"`value` {self.value!r} is no {self.datatype}") from None
        return self

    def element(self, prompt: str, max_tokens: int) -> tuple[str, Any]:
        """The field of KServe's tensor contents, and the element."""
        field, read = _TENSORS[self.datatype]
        if self.value == "{prompt}":
            return field, read(prompt)
        return field, read(self.value.replace("{max_tokens}", str(max_tokens)))


class KServeSource(TomlTable):
    """How a model that generates is asked over KServe v2."""

    model: str | None = None
    inputs: Annotated[list[TensorSource], Field(min_length=1)]
    shape: list[Annotated[int, Field(ge=1, le=1)]] = Field(default_factory=lambda: [1])
    parameters: dict[str, ExtraValue] = Field(default_factory=dict)
    tokens_parameter: str | None = None


class ResumeSource(TomlTable):
    """How an answer whose client has left is named, read back and stopped. In the paths, {id}
    stands for the name that the request had in `header`."""

    header: Annotated[str, Field(min_length=1)]
    read_path: UrlPath
    stop_path: UrlPath
    stop_method: Literal["POST", "DELETE"] = "DELETE"


class RouteSource(TomlTable):
    """How a gateway is asked in one dialect. `model`: None: as in the others."""

    path: UrlPath
    model: str | None = None
    headers: dict[str, str] = Field(default_factory=dict)


NO_LIMIT_KEY: Final = "none"  # no length of answers is asked for


class Target(TomlTable):
    name: str
    description: str
    http: bool = True
    kserve: KServeSource | None = None
    path: UrlPath = "/v1/completions"
    dialect: DialectName | None = None
    limit_key: Annotated[str, Field(min_length=1)] | None = None
    extra_body: dict[str, ExtraValue] = Field(default_factory=dict)
    uncached_body: dict[str, ExtraValue] = Field(default_factory=dict)
    session_body: dict[str, ExtraValue] = Field(default_factory=dict)
    keeps_responses: bool = False
    deadline_key: Annotated[str, Field(min_length=1)] | None = None
    priority_key: Annotated[str, Field(min_length=1)] | None = None
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
    signs: Signs | None = None
    settle_s: Seconds
    settle_steps: Annotated[int, Field(ge=0, le=MOST_TOKENS)] | None = None
    silence_s: Seconds | None = None
    disconnect: Disconnect = "cancel"
    resume: ResumeSource | None = None
    routes: dict[DialectName, RouteSource] = Field(default_factory=dict)
    longest_step_s: Duration = 1.0
    metrics: dict[MetricRole, MetricSource] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _speaks(self) -> Self:
        if not self.http and self.kserve is None:
            raise ValueError("`http` is false: a section [kserve] must say what it speaks instead")
        if (self.disconnect == "resume") != (self.resume is not None):
            raise ValueError('`disconnect = "resume"` and a section [resume] go together')
        return self

    @property
    def protocol(self) -> Protocol:
        """The protocol of a load that names none."""
        return Protocol.HTTP if self.http else Protocol.GRPC
