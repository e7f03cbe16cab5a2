"""A conformance run from its flags to conform.json: the side that makes no load."""

import secrets as random_names
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx

from harness.client.wire_log import masked, secrets_of
from harness.conform.behind import order_for_gateway
from harness.conform.case import CASES, Case, Selection
from harness.conform.config import ConformConfig, chosen_cases
from harness.conform.contact import Contact, Published, this_machine
from harness.conform.following import Show, Suite
from harness.conform.gateway.cases import gateway_cases
from harness.conform.gateway.routes import secrets_of_routes
from harness.conform.gentle_case import GENTLE_ID
from harness.conform.messages import SuiteRequest
from harness.conform.verdict import Expectation, read_expectations
from harness.errors import ConfigError, InterruptedRunError, TargetError
from harness.http_client import check_target_url
from harness.place import check_host
from harness.run.preflight import note_kind
from harness.run.process import Interruption
from harness.run.progress import Progress
from harness.run.run_config import Access, find_target
from harness.run.run_state import RESULTS
from harness.run.server import Server
from harness.store.conform_result import ConformResult, ConformTarget
from harness.store.manifest import find_versions, utc_now
from harness.store.run_folder import RunFolder
from harness.workload.target import Target
from harness.workload.workload import why_unspoken

TRIES: Final = 8
QUICK_TRIES: Final = 4  # with as many controls, the fewest that chance cannot explain


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """`failure`: why it ended before its last case, if it did."""

    folder: Path
    result: ConformResult
    failure: TargetError | InterruptedRunError | None = None


def conform(
    config: ConformConfig, *, show: Show, progress: Progress, interruption: Interruption
) -> Finished:
    """Raises ConfigError, and TargetError if the target failed before the first case."""
    began_s = time.monotonic()
    chosen = chosen_cases(config)
    access = _access(config)
    if config.direct is not None:
        check_host(
            check_target_url(config.direct, flag="--direct"), is_allowed=config.loads_any_host
        )
    expected: list[Expectation] = []
    if config.expected is not None:
        of_gateways = gateway_cases()
        known = {name.rpartition("/")[0] for name in of_gateways} | {*of_gateways}
        expected = read_expectations(config.expected, [*CASES, GENTLE_ID, *sorted(known)])
    path = config.out or RESULTS / f"{utc_now():%Y%m%d-%H%M%S}-conform-{random_names.token_hex(2)}"
    folder = RunFolder.claim(path)
    result = _blank(config, access.target)
    contact = Contact(access=access, folder=folder, progress=progress, interruption=interruption)
    note_kind(contact, config)
    try:
        with ExitStack() as children:
            suite = _prepare(config, contact, result, expected, chosen, show, children)
            if config.max_seconds is not None and not config.gentle:
                suite.until_s = began_s + config.max_seconds
            failure = suite.run()
            if failure is not None:
                result.notes.append(str(failure).splitlines()[0])
    except (ConfigError, TargetError, InterruptedRunError):
        if not result.cases:
            _discard_if_empty(folder)
        raise
    return Finished(folder=folder.path, result=suite.finish(), failure=failure)


def _discard_if_empty(folder: RunFolder) -> None:
    """Logs are kept: they say why."""
    for log in folder.path.glob("*.log"):
        if not log.stat().st_size:
            log.unlink()
    if not any(folder.path.iterdir()):
        folder.path.rmdir()


def _access(config: ConformConfig) -> Access:
    """Raises ConfigError."""
    if config.upstream is not None and config.target_url is None:
        raise ConfigError("--upstream needs --target URL: the gateway before it")
    target = find_target(config.engine, is_named=config.target_url is not None)
    if (why := why_unspoken(target.protocol, target)) is not None:
        raise ConfigError(f"--engine {config.engine}: {why}")
    return Access.of(target, config)


def _blank(config: ConformConfig, target: Target) -> ConformResult:
    return ConformResult(
        walkaway=find_versions().get("walkaway", ""),
        started_at=utc_now().isoformat(timespec="seconds"),
        command=" ".join(config.command),
        seed=config.seed,
        suite=config.suite,
        quick=config.quick,
        strict=config.strict,
        machine=this_machine(),
        target=ConformTarget(
            engine=target.name,
            url=config.target_url or "",
            model="",
            disconnect=target.disconnect,
        ),
    )


def _prepare(
    config: ConformConfig,
    contact: Contact,
    result: ConformResult,
    expected: list[Expectation],
    chosen: list[Case],
    show: Show,
    children: ExitStack,
) -> Suite:
    secrets = secrets_of(contact.access.headers) + secrets_of_routes(contact.target)
    if config.upstream is not None:
        order = order_for_gateway(config, contact, result, children)
        given = {"usage": order.usage is not None, "gauges": bool(order.page_urls)}
        selection = _selected(chosen, config.wanted, given, {})
        result.not_run = selection.not_run
    else:
        order, selection = _prepare_server(config, contact, result, chosen, secrets, children)
    return Suite(
        config=config,
        secrets=secrets,
        order=order,
        selection=selection,
        result=result,
        folder=contact.folder,
        expected=expected,
        show=show,
        interruption=contact.interruption,
    )


def _prepare_server(
    config: ConformConfig,
    contact: Contact,
    result: ConformResult,
    chosen: list[Case],
    secrets: list[str],
    children: ExitStack,
) -> tuple[SuiteRequest, Selection]:
    client = children.enter_context(contact.new_client())
    server = contact.find_server(client, children, model=config.model, own_engine=config.own_engine)
    contact.ask_first(client, server, secrets)
    published = contact.read_pages(client, server)
    notes = [*contact.notes.texts(), *contact.notes.warnings()]
    result.notes = [masked(note, secrets) for note in notes]
    result.target = contact.described(server, published, configuration=config.configuration)
    order = _order(config, contact, client, server, published)
    selection = _choose(config, order, contact.target, chosen)
    result.not_run = selection.not_run
    return order, selection


def _order(
    config: ConformConfig,
    contact: Contact,
    client: httpx.Client,
    server: Server,
    published: Published,
) -> SuiteRequest:
    """The order, with no case in it yet."""
    order = contact.order(config, client, server, published)
    order.tries = config.tries or (QUICK_TRIES if config.quick else TRIES)
    order.quick, order.direct = config.quick, config.direct
    order.gentle_s = config.gentle_s if config.gentle else None
    return order


def _choose(
    config: ConformConfig, order: SuiteRequest, target: Target, chosen: list[Case]
) -> Selection:
    given = {
        "pid": order.pid is not None,
        "direct": order.direct is not None,
        "drop_packets": sys.platform == "linux",
        "adapter": order.adapter is not None,
        "resume": target.disconnect == "resume",
    }
    offered = {
        "metrics": bool(order.metrics_urls),
        "cancel_path": target.cancel_path is not None,
        "deadline": target.deadline_key is not None,
        "http": target.http,
    }
    return _selected(chosen, config.wanted, given, offered)


def _selected(
    chosen: list[Case], wanted: Sequence[str], given: dict[str, bool], offered: dict[str, bool]
) -> Selection:
    """Raises ConfigError if nothing is left to run."""
    selection = Selection.of(chosen, wanted, given, offered)
    lacking = selection.not_run | selection.missing
    if len(lacking) == len(chosen):
        name, why = next(iter(lacking.items()))
        more = f" (and {len(lacking) - 1} more)" if len(lacking) > 1 else ""
        raise ConfigError(f"no case can be run: {name}{more}: {why}")
    return selection
