"""Which kind of server answers at a URL: each target's file has the signs of its kind.

A page that only one kind has counts first, then the owner in the list of models, then how the names
of metrics begin, and the header `server` last, which a proxy may replace. A server that shows none
of them is taken for `openai`, of which nothing is known.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeVar

import httpx

from harness.errors import ConfigError
from harness.run.load_plan import ANY_SERVER
from harness.run.run_config import Access, ServerConfig
from harness.run.settle import says_error
from harness.workload.target import Target
from harness.workload.workload import SHIPPED_TARGETS, load_target, shipped

OWN: Final = "reference"
_PAGE_S: Final = 5.0
_Config = TypeVar("_Config", bound=ServerConfig)


class ShownSigns(NamedTuple):
    """What a server shows. `owners`: of its models; `metrics`: its page; `server`: the header."""

    owners: list[str]
    metrics: str
    server: str
    pages: Mapping[str, Any]


def with_kind(config: _Config) -> _Config:
    """The configuration with the kind of the server at its URL. Raises ConfigError for a URL that
    may not be loaded."""
    if str(config.target_url).startswith(("grpc://", "grpcs://")):
        raise ConfigError(
            f"--target {config.target_url}: a gRPC server shows no sign of its kind: name it, such "
            "as --engine triton"
        )
    kinds = [load_target(name) for name in shipped(SHIPPED_TARGETS)]
    access = Access.of(load_target(ANY_SERVER), config)
    if access.url is None:
        return config
    with access.new_client(_PAGE_S, longest_s=_PAGE_S) as client:
        seen = look_at(client, access.url, access.metrics_urls, kinds)
    if seen is None:
        return replace(config, engine=ANY_SERVER)  # what asks next says why it cannot be reached
    name, why = recognise(seen, kinds)
    return replace(
        config, engine=name, recognised=f"kind of server: {name}, {why} (--engine overrides)"
    )


def look_at(
    client: httpx.Client, url: str, metrics_urls: list[str], kinds: list[Target]
) -> ShownSigns | None:
    """None: there is no answer. A page that cannot be read shows nothing."""
    models = _page(client, f"{url}/v1/models")
    if models is None:
        return None
    listed = _as_json(models)
    data = listed.get("data") if isinstance(listed, dict) else None
    owners = [one.get("owned_by") for one in data or () if isinstance(one, dict)]
    texts = [_page(client, page) for page in metrics_urls or [f"{url}/metrics"]]
    paths = {kind.signs.page for kind in kinds if kind.signs is not None and kind.signs.page}
    return ShownSigns(
        owners=[one for one in owners if isinstance(one, str)],
        metrics="\n".join(one.text for one in texts if one is not None and one.is_success),
        server=models.headers.get("server", ""),
        pages={path: _as_json(_page(client, url + path)) for path in sorted(paths)},
    )


def recognise(seen: ShownSigns, kinds: list[Target]) -> tuple[str, str]:
    """The name of the kind, and by what it was recognised."""
    signs = {kind.name: kind.signs for kind in kinds if kind.signs is not None}
    for name, one in signs.items():
        if one.page is not None and isinstance(seen.pages.get(one.page), dict):
            return name, f"it has a page {one.page}"
    for name, one in signs.items():
        if one.owned_by is not None and one.owned_by in seen.owners:
            return name, f"the owner of its models is {one.owned_by}"
    names = [line for line in seen.metrics.splitlines() if not line.startswith("#")]
    for name, one in signs.items():
        if one.metrics is not None and any(line.startswith(one.metrics) for line in names):
            return name, f"its metrics begin with {one.metrics}"
    for name, one in signs.items():
        if one.server is not None and seen.server.lower().startswith(one.server):
            return name, f"its header `server` says {seen.server}"
    return ANY_SERVER, "since it shows no sign of a kind that is known"


def _page(client: httpx.Client, url: str) -> httpx.Response | None:
    """None: no answer."""
    try:
        return client.get(url)
    except httpx.HTTPError:
        return None


def _as_json(answer: httpx.Response | None) -> Any:
    """Nothing, too, for an error with status 200, with which LM Studio answers any path."""
    if answer is None or not answer.is_success or says_error(answer):
        return None
    try:
        return answer.json()
    except ValueError:
        return None
