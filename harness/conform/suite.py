"""A conformance run from its flags to conform.json: the side that makes no load.

It finds or starts the target, gives its load process the cases, and takes their results. Where that
process crashes or a case takes too long, the case is undecided and a new process goes on with the
rest. Each result is on disk before the next case begins.
"""

import os
import platform
import secrets as random_names
import shlex
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import httpx
import msgspec

from harness.conform.case import CASES, Case, Selection, select
from harness.conform.cases import load_cases
from harness.conform.contact import Contact, Published
from harness.conform.order import Event, Order
from harness.conform.verdict import (
    Expectation,
    exit_code,
    hold_against,
    read_expectations,
    settle_case,
)
from harness.errors import ConfigError, InterruptedRunError, TargetError
from harness.experiments.outcome import CannotDecideError, RefusedError
from harness.http_client import LOAD_THIS_HOST, check_host, check_target_url
from harness.load.wire_log import MASK, masked, secrets_of
from harness.run.preflight import published_context, published_slots
from harness.run.process import Child, Interruption, python_module
from harness.run.progress import Progress
from harness.run.run_config import Access, find_target
from harness.run.run_state import RESULTS
from harness.run.server import Server
from harness.store.conform_result import (
    Aftermath,
    CaseResult,
    ConformResult,
    ConformTarget,
    Machine,
)
from harness.store.manifest import find_hardware, find_versions, utc_now
from harness.store.run_folder import RunFolder
from harness.workload.target import Target
from harness.workload.workload import EngineSettings, why_unspoken

TRIES: Final = 8
QUICK_TRIES: Final = 5
_BEGIN_S: Final = 180.0  # until the load process knows the server
_REST_S: Final = 120.0  # after a run of a case, until all is at rest
_POLL_S: Final = 0.05  # until an interruption is seen
_END_S: Final = 10.0  # of a load process that reports no more

# The bundled engine as a target: steps of a fixed length, and so few blocks that memory has an end.
OWN_ENGINE: Final = EngineSettings(
    runner="simulated",
    sim_fixed_ms=10,
    sim_decode_token_ms=0,
    max_num_seqs=8,
    max_model_len=4096,
    max_num_batched_tokens=256,  # a long prompt in many chunks
    num_blocks=512,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformConfig:
    """One `walkaway conform`, as typed."""

    wanted: Sequence[str] = ()
    target_url: str | None = None
    engine: str = "reference"
    model: str | None = None
    metrics_urls: list[str] = field(default_factory=list)
    api_key_env: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    ca_file: str | None = None
    loads_any_host: bool = False
    slots: int | None = None
    pid: int | None = None
    direct: str | None = None
    configuration: str | None = None
    tries: int | None = None
    strict: bool = False
    quick: bool = False
    seed: int = 0
    expected: Path | None = None
    out: Path | None = None
    command: list[str] = field(default_factory=list)
    own_engine: EngineSettings = OWN_ENGINE


class Show(Protocol):
    """Learns of each case while the run goes on."""

    def begin(self, result: ConformResult) -> None: ...
    def started(self, case: Case) -> None: ...
    def decided(self, result: CaseResult) -> None: ...


def all_cases() -> list[Case]:
    load_cases()
    return list(CASES.values())


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
    chosen = select(all_cases(), config.wanted)
    if config.quick and not config.wanted:
        chosen = [one for one in chosen if one.quick]
    access = _access(config)
    if config.direct is not None:
        check_host(
            check_target_url(config.direct, flag="--direct"), is_allowed=config.loads_any_host
        )
    expected: list[Expectation] = []
    if config.expected is not None:
        expected = read_expectations(config.expected, CASES)
    path = config.out or RESULTS / f"{utc_now():%Y%m%d-%H%M%S}-conform-{random_names.token_hex(2)}"
    folder = RunFolder.claim(path)
    result = _blank(config, access.target)
    contact = Contact(access=access, folder=folder, progress=progress, interruption=interruption)
    try:
        with ExitStack() as children:
            suite = _prepare(config, contact, result, expected, chosen, show, children)
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
    target = find_target(config.engine, is_named=config.target_url is not None)
    if (why := why_unspoken(target.protocol, target)) is not None:
        raise ConfigError(f"--engine {config.engine}: {why}")
    return Access.of(
        target,
        url=config.target_url,
        metrics_urls=config.metrics_urls,
        headers=config.headers,
        api_key_env=config.api_key_env,
        ca_file=config.ca_file,
        loads_any_host=config.loads_any_host,
    )


def _blank(config: ConformConfig, target: Target) -> ConformResult:
    hardware = find_hardware([])
    return ConformResult(
        walkaway=find_versions().get("walkaway", ""),
        started_at=utc_now().isoformat(timespec="seconds"),
        command=" ".join(config.command),
        seed=config.seed,
        quick=config.quick,
        strict=config.strict,
        machine=Machine(
            cpu=str(hardware["cpu"]),
            cores=os.cpu_count() or 0,
            python=platform.python_version(),
        ),
        target=ConformTarget(engine=target.name, url=config.target_url or "", model=""),
    )


def _prepare(
    config: ConformConfig,
    contact: Contact,
    result: ConformResult,
    expected: list[Expectation],
    chosen: list[Case],
    show: Show,
    children: ExitStack,
) -> "Suite":
    secrets = secrets_of(contact.access.headers)
    client = children.enter_context(contact.new_client())
    server = contact.find_server(client, children, model=config.model, own_engine=config.own_engine)
    contact.ask_first(client, server, secrets)
    published = contact.read_pages(client, server)
    notes = [*contact.notes.texts(), *contact.notes.warnings()]
    result.notes = [masked(note, secrets) for note in notes]
    is_own = server.engine is not None
    result.target = ConformTarget(
        engine=contact.target.name,
        url=server.url,
        model=server.model,
        version=published.version or (result.walkaway if is_own else None),
        configuration=config.configuration or ("started by walkaway" if is_own else ""),
        metrics_urls=published.metrics_urls,
    )
    order = _order(config, contact, client, server, published)
    selection = _choose(config, order, contact.target, chosen)
    result.not_run = selection.not_run
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


def _order(
    config: ConformConfig,
    contact: Contact,
    client: httpx.Client,
    server: Server,
    published: Published,
) -> Order:
    """For no case yet."""
    plan = contact.load_plan(
        client,
        server,
        seed=config.seed,
        api_key_env=config.api_key_env,
        headers=config.headers,
        ca_file=config.ca_file,
    )
    target, urls = contact.target, published.metrics_urls
    return Order(
        plan=msgspec.Raw(plan.model_dump_json().encode()),
        cases=[],
        folder=str(contact.folder.path.resolve()),
        settle_s=target.settle_s,
        tries=config.tries or (QUICK_TRIES if config.quick else TRIES),
        quick=config.quick,
        seed=config.seed,
        slots=config.slots or server.slots or published_slots(client, server, target),
        context=server.context or (published_context(client, server) if target.http else None),
        metrics_urls=urls if published.is_understood else [],
        page_urls=urls or ([f"{server.url}/metrics"] if target.http else []),
        pid=config.pid or (None if server.engine is None else server.engine.pid),
        direct=config.direct,
    )


def _choose(config: ConformConfig, order: Order, target: Target, chosen: list[Case]) -> Selection:
    """Raises ConfigError if nothing is left to run."""
    given = {
        "pid": order.pid is not None,
        "direct": order.direct is not None,
        "drop_packets": sys.platform == "linux",
    }
    offered = {
        "metrics": bool(order.metrics_urls),
        "cancel_path": target.cancel_path is not None,
        "http": target.http,
    }
    selection = Selection.of(chosen, config.wanted, given, offered)
    lacking = selection.not_run | selection.missing
    if len(lacking) == len(chosen):
        name, why = next(iter(lacking.items()))
        more = f" (and {len(lacking) - 1} more)" if len(lacking) > 1 else ""
        raise ConfigError(f"no case can be run: {name}{more}: {why}")
    return selection


@dataclass(slots=True, kw_only=True)
class Suite:
    """`_rest`: the cases that are still to be decided, in order."""

    config: ConformConfig
    secrets: Sequence[str]
    order: Order
    selection: Selection
    result: ConformResult
    folder: RunFolder
    expected: list[Expectation]
    show: Show
    interruption: Interruption
    command: Callable[[], list[str]] = lambda: python_module("harness.conform")
    clock_s: Callable[[], float] = time.monotonic
    _rest: deque[Case] = field(default_factory=deque)
    _lost: str | None = None
    _has_begun: bool = False

    def run(self) -> TargetError | InterruptedRunError | None:
        self._rest.extend(self.selection.cases)
        self.show.begin(self.result)
        self._decide_without_load()
        while self._rest and self._lost is None and not self.interruption.requested:
            self._run_child()
        if self.interruption.requested:
            return InterruptedRunError(f"interrupted; what was decided is in {self.folder.path}")
        if self._lost is not None and not self._has_begun:
            return TargetError(self._lost)
        for case in list(self._rest):
            self._add(settle_case(case, CannotDecideError(str(self._lost))))
        return None

    def finish(self) -> ConformResult:
        self.result.exit_code = exit_code(self.result.cases, strict=self.result.strict)
        self.result.write(self.folder.path)
        return self.result

    def _decide_without_load(self) -> None:
        for case in list(self._rest):
            if (why := self.selection.refused.get(case.id)) is not None:
                self._add(settle_case(case, RefusedError(why)))
            elif (why := self.selection.missing.get(case.id)) is not None:
                self._add(settle_case(case, CannotDecideError(why)))

    def _run_child(self) -> None:
        log = self.folder.log("conform")
        order = msgspec.structs.replace(self.order, cases=[case.id for case in self._rest])
        with Child("load process", self.command(), log, quit_s=1.0, reports=True) as child:
            child.say(msgspec.json.encode(order))
            self._follow(child)
        said = log.read_text(errors="replace")
        log.write_text(masked(said, self.secrets))

    def _follow(self, child: Child) -> None:
        current: Case | None = None
        until_s = self.clock_s() + _BEGIN_S
        while self._rest and self._lost is None and not self.interruption.requested:
            reports = child.read_reports(_POLL_S)
            for line in reports or ():
                current = self._take(msgspec.json.decode(line, type=Event))
                until_s = self.clock_s() + (_REST_S if current is None else self._limit_s(current))
            has_ended = reports is None
            if has_ended or self.clock_s() > until_s:
                self._give_up(current, child, child.wait(_END_S) if has_ended else None)
                return

    def _limit_s(self, case: Case) -> float:
        """A red one has a control and may run twice; the load process ends a longer one itself."""
        return 3 * (case.limit_s + 3 * self.order.settle_s) + 2 * _REST_S

    def _take(self, event: Event) -> Case | None:
        """Returns the case that now runs, if one does."""
        match event.event:
            case "facts":
                for name, value in event.facts.items():
                    if hasattr(self.result, name):
                        setattr(self.result, name, value)
                self.order.slots = self.result.slots or self.order.slots
                self.order.settle_s = event.facts.get("settle_s", self.order.settle_s)
            case "started":
                self._has_begun = True
                case = CASES[event.id]
                self.show.started(case)
                return case
            case "case":
                assert event.case is not None
                self._add(event.case)
                if event.case.aftermath is Aftermath.DEAD:
                    self._lost = f"the server is gone since {event.id}"
            case "unusable":
                self._has_begun, self._lost = True, event.why
            case "gone":
                self._lost = event.why
        return None

    def _give_up(self, current: Case | None, child: Child, code: int | None) -> None:
        if self._lost is not None or (code == 0 and not self._rest):
            return
        last = (
            masked(child.lines()[-1].strip(), self.secrets) if child.lines() else "without a word"
        )
        how = "took too long" if code is None else f"ended with code {code}: {last}"
        if current is not None:
            self._add(settle_case(current, CannotDecideError(f"the check's own process {how}")))
        elif self._rest:
            self._lost = f"the load process {how}"

    def _add(self, result: CaseResult) -> None:
        self._rest = deque(case for case in self._rest if case.id != result.id)
        result.repeat = self._repeat(result.id)
        hold_against([result], self.expected, self.result.target)
        self.result.cases.append(result)
        self.result.exit_code = exit_code(self.result.cases, strict=self.result.strict)
        self.result.write(self.folder.path)
        self.show.decided(result)

    def _repeat(self, case_id: str) -> str:
        """With all that was given but the cases and where the results go."""
        given = self.config
        values: list[tuple[str, object]] = [
            ("--target", given.target_url),
            ("--engine", given.target_url and given.engine),
            ("--model", given.target_url and self.result.target.model),
            ("--slots", given.target_url and self.order.slots),
            *(("--metrics-url", url) for url in given.metrics_urls),
            ("--api-key-env", given.api_key_env),
            *(("--header", f"{name}={MASK}") for name in given.headers),
            ("--ca-file", given.ca_file),
            ("--pid", given.pid),
            ("--direct", given.direct),
            ("--configuration", given.configuration),
            ("--tries", given.tries),
            ("--expected-failures", given.expected),
            ("--seed", given.seed),
        ]
        words = [word for flag, value in values if value is not None for word in (flag, str(value))]
        words += ["--strict"] if given.strict else []
        words += ["--quick"] if given.quick else []
        words += [LOAD_THIS_HOST] if given.loads_any_host else []
        return shlex.join(["walkaway", "conform", case_id, *words])
