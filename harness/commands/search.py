"""`walkaway search`: its flags, and what a terminal shows of it."""

import json
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.status import Status
from rich.text import Text

from harness.commands.app import JsonResult, server_flag, typed_variables
from harness.commands.conform import Adapter, Pid, Slots
from harness.commands.run import (
    ApiKeyEnv,
    CaFile,
    Engine,
    Header,
    MetricsUrl,
    Model,
    Out,
    Quiet,
    Target,
    YesLoadThisHost,
)

if TYPE_CHECKING:
    from harness.store.search_result import SearchFinding, SearchResult

_search = partial(typer.Option, rich_help_panel="The search")
Restart = Annotated[
    str | None,
    server_flag(
        metavar="COMMAND",
        help="Starts the server afresh: it stays in the foreground, or restarts one and returns.",
    ),
]
Log = Annotated[
    Path | None,
    server_flag(metavar="FILE", help="The server's log: no traceback may come into it."),
]
Minutes = Annotated[float, _search(metavar="M", min=0.1, max=1440.0, help="How long. Default 30.")]
Only = Annotated[
    str | None,
    _search(metavar="THEME,...", help="Draw schedules of these themes alone, such as pressure."),
]
ScheduleFile = Annotated[
    Path | None,
    _search("--schedule", metavar="FILE", help="Play this schedule instead of drawing any."),
]
Seed = Annotated[int, _search(metavar="N", min=0, help="Draws all schedules.")]


def search(  # noqa: PLR0913  one argument a flag
    *,
    target: Target = None,
    engine: Engine = None,
    model: Model = None,
    metrics_url: MetricsUrl = None,
    api_key_env: ApiKeyEnv = None,
    header: Header = None,
    ca_file: CaFile = None,
    yes_load_this_host: YesLoadThisHost = False,
    restart: Restart = None,
    slots: Slots = None,
    pid: Pid = None,
    log: Log = None,
    adapter: Adapter = None,
    minutes: Minutes = 30.0,
    seed: Seed = 0,
    only: Only = None,
    schedule: ScheduleFile = None,
    out: Out = None,
    as_json: JsonResult = False,
    quiet: Quiet = False,
) -> None:
    """Search for cancellation bugs: random clients who leave, and what must hold afterwards.

    Schedules of requests and leaves are drawn and played; one that breaks an invariant is played
    again, made small, and written as repro.py. The exit code is 3 if something was found. The
    server must be used by nobody else.

    Example: walkaway search --target http://127.0.0.1:8000 --minutes 10
    """
    from harness.conform.reports import draw_page
    from harness.http_client import check_ca_file, parse_headers, typed_command
    from harness.run.process import Interruption
    from harness.run.progress import ProgressConsole, choose_progress
    from harness.run.recognition import OWN
    from harness.search.schedule import read_schedule
    from harness.search.search import SearchConfig, without_secrets
    from harness.search.search import search as run_search
    from harness.store.search_result import SEARCH_FILE

    config = SearchConfig(
        target_url=target,
        engine=engine or OWN,
        model=model,
        metrics_urls=metrics_url or [],
        api_key_env=api_key_env,
        headers=parse_headers(header or []),
        ca_file=check_ca_file(ca_file),
        loads_any_host=yes_load_this_host,
        restart=restart,
        slots=slots,
        pid=pid,
        log=log,
        adapter=adapter,
        minutes=minutes,
        seed=seed,
        themes=[one for one in (only or "").split(",") if one],
        schedule=None if schedule is None else read_schedule(schedule),
        out=out,
        names_kind=engine is not None or target is None,
        command=[*typed_variables(), *without_secrets(typed_command(header or []))],
    )
    show = SearchTerminal(Console(stderr=as_json), is_quiet=quiet)
    progress = choose_progress(ProgressConsole(), is_quiet=quiet)
    with Interruption() as interruption:
        try:
            folder, result, failure = run_search(
                config, show=show, progress=progress, interruption=interruption
            )
        finally:
            show.close()
        page = draw_page(folder, "search")
    if as_json:
        print(json.dumps(msgspec.to_builtins(result), indent=2))  # noqa: T201
    show.end(result, page or folder / SEARCH_FILE)
    if failure is not None:
        raise failure
    raise typer.Exit(result.exit_code)


class SearchTerminal:
    """A line for each finding, and a status line meanwhile."""

    def __init__(self, console: Console, *, is_quiet: bool) -> None:
        self._console = console
        self._is_quiet = is_quiet
        self._status: Status | None = None
        self._standing = ""
        self._shown_s = 0.0

    def begin(self, result: "SearchResult") -> None:
        target = result.target
        version = f" {target.version}" if target.version else ""
        self._print(Text(f"search: {target.engine}{version} at {target.url}, {target.model}"))
        self.doing("measuring the idle server: its first token, its step, its slots")

    def played(self, result: "SearchResult", left_s: float) -> None:
        found = f", {len(result.findings)} found" if result.findings else ""
        self._standing = f"{result.played} schedules{found}, {left_s / 60:.0f} min left: "
        if not self._console.is_terminal and time.monotonic() - self._shown_s > 60.0:
            self._shown_s = time.monotonic()
            self._print(Text(self._standing.removesuffix(": "), style="dim"))

    def doing(self, what: str) -> None:
        if self._is_quiet or not self._console.is_terminal:
            return
        if self._status is None:
            self._status = self._console.status("")
            self._status.start()
        self._status.update(Text(f"{self._standing}{what}"))

    def found(self, finding: "SearchFinding") -> None:
        self.close()
        if finding.is_sure:
            sign, style = f"FOUND {finding.rate}", "bold red"
        elif finding.is_repeat:
            sign, style = "as before", "dim"
        elif not finding.rate.tries:
            sign, style = "not tried", "dim"
        elif not finding.rate.hits:
            sign, style = "not again", "dim"
        else:
            sign, style = f"{finding.rate}, without leaves {finding.control}", "yellow"
        line = Text.assemble((f"{sign}  ", style), f"{finding.broken}: {finding.sentence}")
        self._print(line)

    def end(self, result: "SearchResult", where: Path) -> None:
        self._print(Text(f"\nended: {result.end}", style="dim"))
        self._print(Text(f"result: {where}"))
        self._print(Text(result.sentence, style="bold"))

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _print(self, line: Text) -> None:
        if not self._is_quiet:
            self._console.print(line, soft_wrap=True)
