"""What the user ordered, and the plan for the load that follows from it and from the server."""

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from harness.config import (
    AbandonSettings,
    SlotRecoverySettings,
    Target,
    Workload,
    load_target,
    load_workload,
)
from harness.errors import ConfigError
from harness.http_flags import check_metrics_url, check_target_url, request_headers
from harness.load.plan import AbandonLoad, LoadPlan, SlotRecoveryLoad
from harness.server import Server

ARM = "main"

# Where nothing is known about a server's metrics page: seldom enough to disturb nobody.
UNKNOWN_SCRAPE_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOrder:
    """One `walkaway run`, as it was typed. Without `target_url` the bundled engine is started."""

    workload: str
    settings: list[str] = field(default_factory=list)
    target_url: str | None = None
    engine: str = "reference"
    model: str | None = None
    metrics_urls: list[str] = field(default_factory=list)
    api_key_env: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    out: Path | None = None
    has_scraping: bool = True
    command: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedOrder:
    """An order with its files read and its flags checked. `headers` includes the API key's."""

    order: RunOrder
    workload: Workload
    target: Target
    url: str | None
    metrics_urls: list[str]
    headers: dict[str, str]

    @property
    def scrape_interval_s(self) -> float | None:
        """Seconds between two scrapes; None for a run that scrapes nothing."""
        if not self.order.has_scraping:
            return None
        chosen = self.workload.collect.scrape_interval_s or self.target.scrape_interval_s
        if chosen is None and self.metrics_urls:
            return UNKNOWN_SCRAPE_INTERVAL_S
        return chosen


def resolve_order(order: RunOrder) -> ResolvedOrder:
    """Read and check everything that can be checked before anything is started.

    Raises ConfigError.
    """
    workload = load_workload(order.workload, order.settings)
    target = load_target(order.engine)
    if order.target_url is None and not target.lifecycle:
        raise ConfigError(f"--engine {order.engine} needs --target URL: it is not started for you")
    return ResolvedOrder(
        order=order,
        workload=workload,
        target=target,
        url=None if order.target_url is None else check_target_url(order.target_url),
        metrics_urls=[check_metrics_url(url) for url in order.metrics_urls],
        headers=request_headers(order.headers, order.api_key_env),
    )


def make_load_plan(resolved: ResolvedOrder, server: Server, *, rows_dir: Path) -> LoadPlan:
    """Resolve everything that the load process must know. Raises ConfigError."""
    workload, target = resolved.workload, resolved.target
    _check_context(workload, server)
    return LoadPlan(
        url=server.url,
        path=target.path,
        model=server.model,
        api_key_env=resolved.order.api_key_env,
        headers=resolved.order.headers,
        extra_body=target.extra_body,
        stream_options=target.stream_options,
        continuous_usage=target.continuous_usage,
        rows_dir=str(rows_dir.resolve()),
        seed=workload.run.seed,
        arm=ARM,
        users=workload.run.users,
        timeout_s=workload.run.timeout_s,
        max_seconds=workload.run.max_seconds,
        load=_make_load(workload, target, server),
    )


def _make_load(
    workload: Workload, target: Target, server: Server
) -> AbandonLoad | SlotRecoveryLoad:
    values = workload.load.model_dump()
    if isinstance(workload.load, SlotRecoverySettings) and workload.load.slots is None:
        values["slots"] = _ask_slots(workload, target, server)
    return msgspec.convert(values, type=AbandonLoad | SlotRecoveryLoad)


def _ask_slots(workload: Workload, target: Target, server: Server) -> int:
    if target.slots_from == "config" and server.config is not None:
        return int(server.config["max_num_seqs"])
    raise ConfigError(
        f"workload {workload.name}: a server of kind {target.name} does not tell how many batch "
        f"slots it has; say so with --set load.slots=N"
    )


def _check_context(workload: Workload, server: Server) -> None:
    """A server that tells its context is not asked for more than that."""
    limit = (server.config or {}).get("max_model_len")
    if limit is None:
        return
    for key, tokens in _answer_lengths(workload.load).items():
        longest = workload.load.prompt_tokens[1] + tokens
        if longest > int(limit):
            raise ConfigError(
                f"workload {workload.name}: `load.prompt_tokens` + `load.{key}` go up to {longest} "
                f"tokens, but the server's context holds {limit}; make them smaller"
            )


def _answer_lengths(load: AbandonSettings | SlotRecoverySettings) -> dict[str, int]:
    """Every number of tokens that some request asks for, by its key."""
    if isinstance(load, AbandonSettings):
        return {"answer_tokens": load.answer_tokens, "stay_tokens": load.stay_tokens}
    return {
        "answer_tokens": load.answer_tokens,
        "control_answer_tokens": load.control_answer_tokens,
        "probe_tokens": load.probe_tokens,
    }
