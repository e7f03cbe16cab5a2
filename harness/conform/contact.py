"""The server that a suite judges: found or started, and asked for what it publishes."""

import os
import platform
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import httpx
import msgspec

from harness.client.wire_log import masked
from harness.collect.scrape import read_roles
from harness.collect.source import Notes
from harness.conform.messages import SuiteRequest
from harness.errors import ConfigError, TargetError
from harness.experiments.patience import READY_S
from harness.records import Protocol
from harness.run.first_answers import check_requests
from harness.run.loading import unready_answer, wait_for_page, wait_while_loading
from harness.run.preflight import (
    find_scale,
    metrics_pages,
    note_misfit,
    published_context,
    published_slots,
    published_version,
    start_our_engine,
    take_own_series,
)
from harness.run.process import Interruption
from harness.run.progress import Progress
from harness.run.run_config import Access, ServerConfig
from harness.run.server import Server, attach
from harness.run.settle import Asker, IdlePages, NotServedError, SilentServerError
from harness.store.conform_result import ConformTarget, Machine
from harness.store.manifest import find_hardware, find_versions
from harness.store.run_folder import RunFolder
from harness.workload.plan import LoadPlan
from harness.workload.target import Target
from harness.workload.workload import EngineSettings, RunSettings

_PAGE_S: Final = 20.0
_LONGEST_S: Final = 86_400.0  # of all cases together; each has a limit of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedConfig(ServerConfig):
    """What a user typed about a server that is to be judged."""

    slots: int | None = None
    pid: int | None = None
    adapter: str | None = None
    seed: int = 0


class Published(NamedTuple):
    """`is_understood`: at least one metric of the pages is in the target's file."""

    version: str | None
    metrics_urls: list[str]
    is_understood: bool


@dataclass(kw_only=True)
class Contact:
    """`access`: with the target as the server's first answers show it."""

    access: Access
    folder: RunFolder
    progress: Progress
    interruption: Interruption
    notes: Notes = field(default_factory=Notes)

    @property
    def target(self) -> Target:
        return self.access.target

    def take_target(self, target: Target) -> None:
        self.access = replace(self.access, target=target)

    def new_client(self) -> httpx.Client:
        return self.access.new_client(_PAGE_S, longest_s=READY_S)

    def find_server(
        self,
        client: httpx.Client,
        children: ExitStack,
        *,
        model: str | None,
        own_engine: EngineSettings,
    ) -> Server:
        """The server at its URL, or the bundled engine, which ends with `children`. Raises
        TargetError, ConfigError and InterruptedRunError."""
        url, engine, ready = self.access.url, None, dict[str, Any]()
        if url is None:
            log = self.folder.log("engine")
            engine, line = start_our_engine(self, own_engine, log, children, model=model)
            ready = dict(line)
            url = str(ready["url"])
        else:
            self.progress.phase(f"connecting to {url}")
            if self.target.http:
                wait_for_page(self, client, url)
        return attach(
            url,
            self.target,
            model=model,
            client=client,
            engine=engine,
            ready=ready,
            place=self.access.place,
            takes_first_model=True,
        )

    def ask_first(self, client: httpx.Client, server: Server, secrets: Sequence[str]) -> None:
        """Learn which requests it takes. Raises ConfigError and TargetError if it takes none."""
        asker = Asker(
            client=client,
            url=server.url,
            target=self.target,
            model=server.model,
            clock_ns=time.perf_counter_ns,
        )
        first = check_requests(self, asker)
        if first.error is not None and first.error.status == httpx.codes.SERVICE_UNAVAILABLE:
            wait_while_loading(self, lambda: unready_answer(first.asker, longest_s=READY_S))
            first = check_requests(self, first.asker)
        if self.target.http:
            check_serves(first.asker, secrets, silent=first.silent)

    def read_pages(self, client: httpx.Client, server: Server) -> Published:
        urls = metrics_pages(self.access, server)
        pages = IdlePages(client=client, urls=urls, target=self.target, notes=self.notes)
        samples = pages.samples()
        if samples is not None:
            take_own_series(self, samples, server.model)
            note_misfit(self, samples, urls)
        known = read_roles(samples or [], self.target.metrics)
        is_understood = any(role in known for role in self.target.metrics)
        return Published(published_version(client, server, self.target), urls, is_understood)

    def load_plan(
        self, client: httpx.Client, server: Server, *, seed: int, **given: Any
    ) -> LoadPlan:
        """The plan of requests that cases direct. `given`: more fields of the plan."""
        protocol = self.target.protocol
        urls = server.urls if protocol is Protocol.HTTP else server.kserve_urls
        plan = LoadPlan(
            url=urls[0],
            urls=urls if len(urls) > 1 else [],
            address=server.address,
            model=server.model,
            target=self.target,
            run=RunSettings(seed=seed, users=1, max_seconds=_LONGEST_S, timeout_s=READY_S),
            load=None,
            protocol=protocol,
            learns_events=False,
            **given,
        )
        scale = find_scale(self, client, server, plan)
        return plan if scale is None else plan.model_copy(update={"prompt_scale": scale})

    def order(
        self, config: JudgedConfig, client: httpx.Client, server: Server, published: Published
    ) -> SuiteRequest:
        """The server, for a load process; no case is in the order."""
        plan = self.load_plan(
            client,
            server,
            seed=config.seed,
            api_key_env=config.api_key_env,
            headers=config.headers,
            ca_file=config.ca_file,
        )
        target, urls = self.target, published.metrics_urls
        return SuiteRequest(
            plan=msgspec.Raw(plan.model_dump_json().encode()),
            cases=[],
            folder=str(self.folder.path.resolve()),
            settle_s=target.settle_s,
            tries=1,
            quick=False,
            seed=config.seed,
            slots=config.slots or server.slots or published_slots(client, server, target),
            context=server.context or (published_context(client, server) if target.http else None),
            metrics_urls=urls if published.is_understood else [],
            page_urls=urls or ([f"{server.url}/metrics"] if target.http else []),
            pid=config.pid or (None if server.engine is None else server.engine.pid),
            adapter=config.adapter,
        )

    def described(
        self, server: Server, published: Published, *, configuration: str | None = None
    ) -> ConformTarget:
        is_own = server.engine is not None
        return ConformTarget(
            engine=self.target.name,
            url=server.url,
            model=server.model,
            version=published.version or (find_versions().get("walkaway") if is_own else None),
            configuration=configuration or ("started by walkaway" if is_own else ""),
            metrics_urls=published.metrics_urls,
            disconnect=self.target.disconnect,
        )


def this_machine() -> Machine:
    return Machine(
        cpu=str(find_hardware([])["cpu"]),
        cores=os.cpu_count() or 0,
        python=platform.python_version(),
    )


def check_serves(
    asker: Asker, secrets: Sequence[str], *, silent: NotServedError | None = None
) -> None:
    """One short request, so that a wrong key or model is reported in one sentence. `silent`: why
    the request before it got no answer; then no other one is sent.

    Raises ConfigError for a refusal, and TargetError for no answer or a wrong one.
    """
    try:
        if silent is not None:
            raise silent
        asker.ask("is anybody there?", 4, longest_s=_PAGE_S)
    except NotServedError as error:
        why = masked(str(error), secrets)
        said = f"{asker.url}{asker.target.path} does not answer a first request: {why}"
        status = error.status
        if isinstance(error, SilentServerError):
            said += (
                "; start again if it only loads its model now: a server that always takes this "
                "long to its first token cannot be judged"
            )
        elif status in (401, 403):
            said += "; name the variable with its key: --api-key-env"
        elif status in (400, 404, 405, 422):
            said += (
                f"; is it --engine {asker.target.name}, and does it serve --model {asker.model}?"
            )
        if status is not None and 400 <= status < 500 and status != 429:
            raise ConfigError(said) from error
        raise TargetError(said) from error
