"""`walkaway conform --upstream PORT`: the bundled upstream is started behind a gateway, and the
gateway asked for the name of a model; the cases are in harness/conform/gateway."""

from contextlib import ExitStack
from typing import Final

import httpx
import msgspec

from harness.conform.config import ConformConfig
from harness.conform.contact import Contact
from harness.conform.gateway.usage import read_usage
from harness.conform.messages import SuiteRequest, UpstreamAt
from harness.errors import ConfigError
from harness.http_client import why_unreached
from harness.records import Protocol
from harness.run.process import Child, check_can_listen, find_ready_line, python_module
from harness.store.conform_result import ConformResult, ConformTarget
from harness.workload.plan import LoadPlan
from harness.workload.workload import RunSettings

STEP_MS: Final = 100.0
SLOTS: Final = 256
MODEL: Final = "upstream"
TRIES: Final = 4
QUICK_TRIES: Final = 3
_ALL: Final = ("0.0.0.0", "::")
_STARTS_S: Final = 20.0
_TIMEOUT_S: Final = 60.0  # of one request of the load
_LONGEST_S: Final = 86_400.0


def order_for_gateway(
    config: ConformConfig, contact: Contact, result: ConformResult, children: ExitStack
) -> SuiteRequest:
    """The order, with no case in it yet. Raises ConfigError and TargetError."""
    assert config.upstream is not None
    target, url = contact.target, contact.access.url
    assert url is not None
    usage = None if config.usage is None else read_usage(config.usage, url).model_dump(mode="json")
    host, port = _place(config.upstream)
    check_can_listen(host, port, flag="--upstream")
    model = config.model or _ask_for_model(contact, url)
    upstream = _start(host, port, contact, children)
    result.target = ConformTarget(
        engine=target.name,
        url=url,
        model=model,
        configuration=config.configuration or "",
        metrics_urls=contact.access.metrics_urls,
        disconnect=target.disconnect,
    )
    plan = LoadPlan(
        url=url,
        address=None if (place := contact.access.place) is None else place.address,
        model=model,
        target=target,
        run=RunSettings(seed=config.seed, users=1, max_seconds=_LONGEST_S, timeout_s=_TIMEOUT_S),
        load=None,
        protocol=Protocol.HTTP,
        learns_events=False,
        api_key_env=config.api_key_env,
        headers=config.headers,
        ca_file=config.ca_file,
    )
    return SuiteRequest(
        plan=msgspec.Raw(plan.model_dump_json().encode()),
        cases=[],
        folder=str(contact.folder.path.resolve()),
        settle_s=target.settle_s,
        tries=config.tries or (QUICK_TRIES if config.quick else TRIES),
        quick=config.quick,
        seed=config.seed,
        page_urls=contact.access.metrics_urls,
        pid=config.pid,
        upstream=upstream,
        usage=usage,
    )


def _place(text: str) -> tuple[str, int]:
    """The host and port that [HOST:]PORT names. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"--upstream {text}: must be [HOST:]PORT")
    return host.strip("[]") or "127.0.0.1", int(port)


def _start(host: str, port: int, contact: Contact, children: ExitStack) -> UpstreamAt:
    contact.progress.phase("starting the upstream")
    file = (contact.folder.path / "upstream.jsonl").resolve()
    flags = [
        *("--host", host, "--port", str(port), "--log", str(file), "--exit-with-stdin"),
        *("--step-ms", f"{STEP_MS:g}", "--slots", str(SLOTS), "--model", MODEL),
    ]
    command = python_module("harness", "upstream", *flags)
    child = children.enter_context(Child("upstream", command, contact.folder.log("upstream")))
    ready = child.wait_until(
        lambda: find_ready_line(child.log.read_text(errors="replace")),
        timeout_s=_STARTS_S,
        interruption=contact.interruption,
    )
    url = f"http://127.0.0.1:{port}" if host in _ALL else str(ready["url"])
    return UpstreamAt(url=url, port=port, log=str(file), step_s=STEP_MS / 1e3)


def _ask_for_model(contact: Contact, url: str) -> str:
    """The upstream's model, unless the gateway lists others. Raises ConfigError if the gateway
    cannot be reached."""
    place = contact.access.place
    with contact.new_client() as client:
        try:
            answer = client.get(f"{url}/v1/models")
            names = [str(one["id"]) for one in answer.json()["data"]]
        except httpx.ConnectError as error:
            host, port = (place.host, place.port) if place is not None else (url, 0)
            raise ConfigError(
                f"the gateway cannot be asked: {why_unreached(error, host, port)}"
            ) from error
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            names = []
    return MODEL if MODEL in names or not names else names[0]
