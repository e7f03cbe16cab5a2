"""A search from its flags to search.json: the side that makes no load."""

import shlex
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol
from urllib.parse import urlsplit

import msgspec

from harness.client.wire_log import masked, secrets_of
from harness.conform.config import OWN_ENGINE
from harness.conform.contact import Contact, JudgedConfig, this_machine
from harness.errors import ConfigError, InterruptedRunError, TargetError, in_words
from harness.formatting import quantity
from harness.place import check_host
from harness.run.preflight import note_kind
from harness.run.process import Child, Interruption, python_module
from harness.run.progress import Progress
from harness.run.recognition import with_kind
from harness.run.run_config import Access, find_target
from harness.run.run_state import RESULTS
from harness.run.server import choose_runner, engine_command
from harness.search.grammar import THEMES
from harness.search.keeper import READY_S, TERMINATE_S, listens
from harness.search.messages import ALIVE_S, SearchEvent, SearchRequest
from harness.search.repro import write_repro
from harness.search.schedule import Schedule, check_playable
from harness.store.manifest import find_versions, utc_now
from harness.store.run_folder import RunFolder
from harness.store.search_result import SearchFinding, SearchResult
from harness.workload.target import Target
from harness.workload.workload import why_unspoken

SCHEDULE: Final = "schedule.json"
_POLL_S: Final = 0.1
_SPARE_S: Final = 3600.0  # beyond the search's time: findings are followed to their ends
_EXIT_FOUND: Final = 3
_SILENT_S: Final = 10 * ALIVE_S  # of the load process, which then hangs
_QUIT_S: Final = 2 * TERMINATE_S  # it ends the server first


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchConfig(JudgedConfig):
    """One `walkaway search`, as typed. `restart`: if nothing answers at the target, it starts the
    server first, too. `names_kind`: else the kind of server is recognised."""

    minutes: float = 30.0
    themes: Sequence[str] = ()
    restart: str | None = None
    schedule: Schedule | None = None
    log: Path | None = None
    names_kind: bool = True

    def check(self) -> None:
        """Raises ConfigError."""
        if unknown := [one for one in self.themes if one not in THEMES]:
            raise ConfigError(f"--only {unknown[0]}: there are {', '.join(THEMES)}")
        if self.log is not None and not self.log.is_file():
            raise ConfigError(f"--log {self.log}: there is no such file; name the server's log")
        if self.target_url is None and self.restart is not None:
            raise ConfigError(
                "--restart COMMAND needs --target URL: where that server then answers"
            )

    @property
    def restart_words(self) -> list[str] | None:
        """Raises ConfigError."""
        if self.restart is None:
            return None
        try:
            words = shlex.split(self.restart)
        except ValueError as error:
            raise ConfigError(f"--restart {self.restart}: {error}") from error
        if not words:
            raise ConfigError("--restart: name the command that starts the server")
        return words


def without_secrets(typed: Sequence[str]) -> list[str]:
    """The command line for search.json: of the command of --restart, which may hold secrets in any
    of its words, it has what `shortened` leaves."""
    flag, kept = "--restart", list[str]()
    for before, one in zip(["", *typed], typed, strict=False):
        if before == flag:
            kept.append(shortened(one))
        elif one.startswith(f"{flag}="):
            kept.append(f"{flag}={shortened(one.removeprefix(f'{flag}='))}")
        else:
            kept.append(one)
    return kept


def shortened(command: str) -> str:
    """The program's name, and the number of words after it."""
    try:
        program, *others = shlex.split(command)
    except ValueError:  # no words at all, or a quotation without an end
        return "…"
    name = "…" if "=" in program else Path(program).name  # a variable is no program
    return f"{name} … ({quantity(len(others), 'more words')})" if others else name


class Show(Protocol):
    """Learns of the search while it lasts."""

    def begin(self, result: SearchResult) -> None: ...
    def played(self, result: SearchResult, left_s: float) -> None: ...
    def doing(self, what: str) -> None: ...
    def found(self, finding: SearchFinding) -> None: ...


@dataclass(slots=True, kw_only=True)
class Search:
    config: SearchConfig
    order: SearchRequest
    result: SearchResult
    folder: RunFolder
    secrets: Sequence[str]
    show: Show
    interruption: Interruption
    clock_s: Callable[[], float] = time.monotonic
    _covered: Counter[str] = field(default_factory=Counter)
    _is_over: bool = False
    _failure: str | None = None
    _shown: set[int] = field(default_factory=set)

    def run(self) -> TargetError | InterruptedRunError | None:
        """Why it ended early, if it did. Nothing that was found is lost."""
        began_s = self.clock_s()
        self.show.begin(self.result)
        log = self.folder.log("search")
        argv = python_module("harness.search")
        with Child("load process", argv, log, quit_s=_QUIT_S, reports=True) as child:
            child.say(msgspec.json.encode(self.order))
            self._follow(child, began_s)
        said = log.read_text(errors="replace")
        log.write_text(masked(said, self.secrets))
        self._finish(began_s)
        if self.interruption.requested:
            return InterruptedRunError(f"interrupted; what was found is in {self.folder.path}")
        if self._failure is not None and not (self._is_over and self.result.exit_code):
            return TargetError(masked(self._failure, self.secrets))
        return None  # also if the server is of no more use because of what was found

    def _follow(self, child: Child, began_s: float) -> None:
        until_s = began_s + self.order.seconds + _SPARE_S
        heard_s = began_s
        while not self._is_over:
            reports = child.read_reports(_POLL_S)
            now_s = self.clock_s()
            for line in reports or ():
                heard_s = now_s
                self._take(msgspec.json.decode(line, type=SearchEvent), now_s - began_s)
            if self.interruption.requested:
                self.result.end = "it was interrupted"
                return
            if reports is None:
                self._failure = f"the load process ended early: {_last_of(child)}"
                self.result.end = masked(self._failure, self.secrets)
                return
            if now_s > until_s or now_s - heard_s > _SILENT_S:
                self._failure = "the load process took too long"
                self.result.end = self._failure
                return

    def _take(self, event: SearchEvent, after_s: float) -> None:
        result = self.result
        match event.event:
            case "alive":
                pass
            case "facts":
                result.facts = event.facts
            case "played":
                result.played = event.played
                self._covered.update(", ".join(one) for one in event.covered)
                self.show.played(result, max(0.0, self.order.seconds - after_s))
            case "doing":
                self.show.doing(event.doing)
            case "found":
                assert event.finding is not None
                self._add(event.finding)
            case "over":
                result.end, self._is_over = event.why, True
            case "gone":
                result.end, self._is_over = event.why, True
                self._failure = event.why

    def _add(self, finding: SearchFinding) -> None:
        others = [one for one in self.result.findings if one.number != finding.number]
        self.result.findings = sorted([*others, finding], key=lambda one: one.number)
        place = self.folder.path / finding.folder
        place.mkdir(exist_ok=True)
        (place / SCHEDULE).unlink(missing_ok=True)  # of what was thought before
        if finding.schedule:
            schedule = msgspec.json.format(msgspec.json.encode(finding.schedule), indent=2)
            (place / SCHEDULE).write_bytes(schedule + b"\n")
        write_repro(place, finding, self.result)
        self.result.write(self.folder.path)
        if finding.took_s and finding.number not in self._shown:
            self._shown.add(finding.number)
            self.show.found(finding)

    def _finish(self, began_s: float) -> None:
        result = self.result
        result.took_s = round(self.clock_s() - began_s, 1)
        result.covered = dict(self._covered.most_common())
        sure = [one for one in result.findings if one.is_sure]
        result.exit_code = _EXIT_FOUND if sure else 0
        result.sentence = _sentence(result, sure)
        result.write(self.folder.path)


def _last_of(child: Child) -> str:
    lines = child.lines()
    return lines[-1].strip() if lines else "without a word"


def _sentence(result: SearchResult, sure: Sequence[SearchFinding]) -> str:
    played = f"{quantity(result.played, 'schedules')} in {result.took_s / 60:.1f} minutes"
    if sure:
        what = "1 thing breaks" if len(sure) == 1 else f"{len(sure)} things break"
        return f"{what} when clients leave ({played}): {sure[0].sentence}"
    if result.findings:
        return (
            f"{played}: what broke did not come back, could not be tried again, or comes without "
            "leaves, too."
        )
    return f"{played}: nothing broke."


def search(
    config: SearchConfig, *, show: Show, progress: Progress, interruption: Interruption
) -> tuple[Path, SearchResult, TargetError | InterruptedRunError | None]:
    """The folder, the result, and why it ended early. Raises ConfigError, and TargetError if the
    target cannot be searched at all."""
    config.check()
    if config.names_kind:
        target_of(config)  # before anything is started
    path = config.out or RESULTS / f"{utc_now():%Y%m%d-%H%M%S}-search"
    folder = RunFolder.claim(path)
    with ExitStack() as children:
        start = Starting(folder, progress, interruption, children)
        is_started = start.start_if_silent(config)
        config = config if config.names_kind else with_kind(config)
        contact = Contact(
            access=Access.of(target_of(config), config),
            folder=folder,
            progress=progress,
            interruption=interruption,
        )
        note_kind(contact, config)
        order, result = _prepare(config, contact, children)
        order.starts_first |= is_started
    # What was started to be asked has ended. The load process starts it again.
    one = Search(
        config=config,
        order=order,
        result=result,
        folder=folder,
        secrets=secrets_of(contact.access.headers),
        show=show,
        interruption=interruption,
    )
    failure = one.run()
    return folder.path, result, failure


def target_of(config: SearchConfig) -> Target:
    """Raises ConfigError, also for a schedule that its clients cannot play."""
    target = find_target(config.engine, is_named=config.target_url is not None)
    if (why := why_unspoken(target.protocol, target)) is not None:
        raise ConfigError(f"--engine {config.engine}: {why}")
    if config.schedule is not None:
        check_playable(config.schedule, target, adapter=config.adapter)
    return target


def _prepare(
    config: SearchConfig, contact: Contact, children: ExitStack
) -> tuple[SearchRequest, SearchResult]:
    client = children.enter_context(contact.new_client())
    server = contact.find_server(client, children, model=config.model, own_engine=OWN_ENGINE)
    contact.ask_first(client, server, secrets_of(contact.access.headers))
    published = contact.read_pages(client, server)
    suite = contact.order(config, client, server, published)
    suite.quick = True
    restart = config.restart_words
    if server.engine is not None:
        port = urlsplit(server.url).port or 0
        runner = choose_runner(OWN_ENGINE)
        restart = engine_command(OWN_ENGINE, runner, model=config.model, port=port)
        suite.pid = None
    order = SearchRequest(
        suite=suite,
        seconds=60 * config.minutes,
        seed=config.seed,
        themes=list(config.themes),
        restart=restart,
        starts_first=server.engine is not None,
        schedule=config.schedule,
        log=None if config.log is None else str(config.log),
    )
    result = SearchResult(
        walkaway=find_versions().get("walkaway", ""),
        started_at=utc_now().isoformat(timespec="seconds"),
        command=" ".join(config.command),
        seed=config.seed,
        minutes=config.minutes,
        target=contact.described(server, published),
        machine=this_machine(),
    )
    return order, result


@dataclass(frozen=True, slots=True)
class Starting:
    """A server that does not answer yet is started, so that it can be asked what it is."""

    folder: RunFolder
    progress: Progress
    interruption: Interruption
    children: ExitStack

    def start_if_silent(self, config: SearchConfig) -> bool:
        """Whether the command was needed. Raises ConfigError, and TargetError if the server does
        not come up."""
        command = config.restart_words
        if command is None or config.target_url is None:
            return False
        place = check_host(config.target_url, is_allowed=config.loads_any_host)
        if listens(place):
            return False
        self.progress.phase(f"starting the server: {shortened(config.restart or '')}")
        try:
            child = Child("server", command, self.folder.log("server"))
        except OSError as error:
            raise ConfigError(f"--restart {command[0]}: {in_words(error)}") from error
        self.children.enter_context(child)
        until_s = time.monotonic() + READY_S
        while not listens(place):
            self.interruption.check(" while the server was starting")
            code = child.wait(_POLL_S)
            if code == 0:  # it has started a server elsewhere, and returned
                self.interruption.pause(_POLL_S)
            elif code is not None:
                raise TargetError(f"--restart: the command ended with code {code}\n{child.tail()}")
            if time.monotonic() > until_s:
                raise TargetError(f"--restart: no server answers for {READY_S:g} s\n{child.tail()}")
        return True
