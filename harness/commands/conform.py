"""`walkaway conform`: its flags, and what a terminal shows while it runs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.status import Status
from rich.text import Text

from harness.commands.app import RESULT, SERVER
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
from harness.errors import ConfigError
from harness.store.conform_result import CONFORM_FILE, Aftermath, Verdict, counted
from harness.store.output import check_output, is_stdout, write_output

if TYPE_CHECKING:
    from harness.conform.case import Case
    from harness.conform.suite import ConformConfig
    from harness.store.conform_result import CaseResult, ConformResult

CASES: Final = "The cases"
Wanted = Annotated[list[str] | None, typer.Argument(metavar="ID|GROUP/", hidden=True)]
Slots = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Requests that it runs at once. Default: found out.",
        rich_help_panel=SERVER,
    ),
]
Pid = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="Its process here, for leak/process.", rich_help_panel=SERVER
    ),
]
Direct = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="The server behind the hop at --target, for hop/.",
        rich_help_panel=SERVER,
    ),
]
Configuration = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT", help="How it was started, for walkaway matrix.", rich_help_panel=SERVER
    ),
]
Tries = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="Leaves a timed case. Default 8, quick 5.", rich_help_panel=CASES
    ),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Judge the `should` cases too.", rich_help_panel=CASES)
]
Quick = Annotated[
    bool, typer.Option("--quick", help="The quick cases only: one minute.", rich_help_panel=CASES)
]
List = Annotated[
    bool, typer.Option("--list", help="List the cases, and run none.", rich_help_panel=CASES)
]
Expected = Annotated[
    Path | None,
    typer.Option(
        "--expected-failures",
        metavar="FILE",
        help="Known failures, one a line.",
        rich_help_panel=RESULT,
    ),
]
Junit = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Write a JUnit report there; -: print it.", rich_help_panel=RESULT
    ),
]
Markdown = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Write a Markdown table there; -: print it.", rich_help_panel=RESULT
    ),
]
Json = Annotated[
    bool,
    typer.Option("--json", help="Print conform.json, or the list as JSON.", rich_help_panel=RESULT),
]
Seed = Annotated[
    int, typer.Option(metavar="N", help="Draws all random choices.", rich_help_panel=CASES)
]


def conform(  # noqa: PLR0913  one argument a flag
    *,
    wanted: Wanted = None,
    target: Target = None,
    engine: Engine = "reference",
    model: Model = None,
    metrics_url: MetricsUrl = None,
    api_key_env: ApiKeyEnv = None,
    header: Header = None,
    ca_file: CaFile = None,
    yes_load_this_host: YesLoadThisHost = False,
    slots: Slots = None,
    pid: Pid = None,
    direct: Direct = None,
    configuration: Configuration = None,
    quick: Quick = False,
    lists: List = False,
    tries: Tries = None,
    strict: Strict = False,
    seed: Seed = 0,
    expected_failures: Expected = None,
    junit: Junit = None,
    markdown: Markdown = None,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check how a server cancels: pass, fail, or cannot decide, case by case.

    ID is a case such as stream/fin-decode, GROUP/ a group such as queue/. Default: all. The exit
    code is 0 if all is well, 3 for an unexpected failure or a stale expectation, 4 if a case that
    must be decided was not, and 5 if the server failed before the first case.

    Example: walkaway conform --target http://127.0.0.1:8000 --engine openai
    """
    from harness.conform.suite import all_cases

    if lists:
        _list(all_cases(), wanted or [], as_json=as_json)
        return
    from harness.conform.suite import ConformConfig
    from harness.http_client import check_ca_file, parse_headers, typed_command

    config = ConformConfig(
        wanted=wanted or [],
        target_url=target,
        engine=engine,
        model=model,
        metrics_urls=metrics_url or [],
        api_key_env=api_key_env,
        headers=parse_headers(header or []),
        ca_file=check_ca_file(ca_file),
        loads_any_host=yes_load_this_host,
        slots=slots,
        pid=pid,
        direct=direct,
        configuration=configuration,
        tries=tries,
        strict=strict,
        quick=quick,
        seed=seed,
        expected=expected_failures,
        out=out,
        command=typed_command(header or []),
    )
    raise typer.Exit(_run(config, junit=junit, markdown=markdown, as_json=as_json, quiet=quiet))


def _list(cases: "list[Case]", wanted: list[str], *, as_json: bool) -> None:
    import msgspec

    from harness.conform.case import select

    chosen = select(cases, wanted)
    if as_json:
        declared = [case.declaration() for case in chosen]
        print(json.dumps(msgspec.to_builtins(declared), indent=2))  # noqa: T201
        return
    longest = max(len(case.id) for case in chosen)
    console = Console()
    for case in chosen:
        mark = " (quick)" if case.quick else ""
        line = f"{case.id:{longest}}  {case.level:6}  {case.requirement}{mark}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _run(
    config: "ConformConfig",
    *,
    junit: Path | None,
    markdown: Path | None,
    as_json: bool,
    quiet: bool,
) -> int:
    from harness.conform.reports import MARKDOWN_MARK, as_junit, as_markdown, draw_page
    from harness.conform.suite import conform
    from harness.gate.reports import JUNIT_MARK
    from harness.run.process import Interruption
    from harness.run.progress import ProgressConsole, choose_progress

    check_output(junit, ours=JUNIT_MARK)
    check_output(markdown, ours=MARKDOWN_MARK)
    printed = [as_json, is_stdout(junit), is_stdout(markdown)]
    if sum(printed) > 1:
        raise ConfigError("of --json, --junit - and --markdown - only one can be printed")
    is_taken = any(printed)
    show = Terminal(Console(stderr=is_taken), is_quiet=quiet)
    progress = choose_progress(ProgressConsole(), is_quiet=quiet)
    with Interruption() as interruption:
        try:
            finished = conform(config, show=show, progress=progress, interruption=interruption)
        finally:
            show.close()
        result = finished.result
        if junit is not None:
            write_output(junit, as_junit(result), ours=JUNIT_MARK)
        if markdown is not None:
            write_output(markdown, as_markdown(result).encode(), ours=MARKDOWN_MARK)
        page = draw_page(finished.folder)
    if as_json:
        print((finished.folder / CONFORM_FILE).read_text(), end="")  # noqa: T201
    show.end(result, page or finished.folder / CONFORM_FILE)
    if finished.failure is not None:
        raise finished.failure
    return result.exit_code


SIGNS: Final = {
    Verdict.PASS: ("pass", "green"),
    Verdict.FAIL: ("FAIL", "bold red"),
    Verdict.NOT_SUPPORTED: ("not supported", "dim"),
    Verdict.CANNOT_DECIDE: ("cannot decide", "yellow"),
    Verdict.INFORMATIONAL: ("told", "cyan"),
}
_WIDTH: Final = 14


class Terminal:
    """A line a case as it is decided, with the reason for all that is not green."""

    def __init__(self, console: Console, *, is_quiet: bool) -> None:
        self._console = console
        self._is_quiet = is_quiet
        self._status: Status | None = None

    def begin(self, result: "ConformResult") -> None:
        target = result.target
        version = f" {target.version}" if target.version else ""
        self._print(Text(f"conform: {target.engine}{version} at {target.url}, {target.model}"))
        for note in result.notes:
            self._print(Text(f"  {note}", style="dim"))

    def started(self, case: "Case") -> None:
        if self._is_quiet or not self._console.is_terminal:
            return
        self.close()
        self._status = self._console.status(f"{case.id}: {case.requirement}")
        self._status.start()

    def decided(self, result: "CaseResult") -> None:
        self.close()
        sign, style = SIGNS[result.verdict]
        if result.expected == "listed" and result.verdict is Verdict.FAIL:
            sign, style = "expected fail", "yellow"
        line = Text.assemble((f"{sign:{_WIDTH}}", style), f"{result.id:22}", result.reason)
        if result.kind is not None:
            line.append(f" ({result.kind})")
        if result.expected == "stale":
            line.append("; it is listed as an expected failure: remove the line", style="bold red")
        if result.aftermath not in (None, Aftermath.CLEAN):
            line.append(f" [afterwards: {result.aftermath}]", style="yellow")
        self._print(line)

    def end(self, result: "ConformResult", where: Path) -> None:
        counts = [f"{num} {SIGNS[one][0].lower()}" for one, num in counted(result.cases).items()]
        for name, why in result.not_run.items():
            self._print(Text(f"{'not run':{_WIDTH}}{name:22}{why}", style="dim"))
        counts += [f"{len(result.not_run)} not run"] if result.not_run else []
        self._print(Text(f"\n{', '.join(counts) or 'nothing was decided'}", style="bold"))
        self._print(Text(f"result: {where}"))

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _print(self, text: Text) -> None:
        if not self._is_quiet:
            self._console.print(text, soft_wrap=True, highlight=False)
