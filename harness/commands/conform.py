"""`walkaway conform`: its flags."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from harness.commands.app import result_flag, server_flag, typed_variables
from harness.commands.conform_terminal import Terminal
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
from harness.store.conform_result import CONFORM_FILE
from harness.store.output import check_output, is_stdout, write_output

if TYPE_CHECKING:
    from harness.conform.case import Case
    from harness.conform.config import ConformConfig

GATEWAY = "gateway"  # the kind of what stands before the upstream, unless one is named
_cases = partial(typer.Option, rich_help_panel="The cases")
Wanted = Annotated[list[str] | None, typer.Argument(metavar="ID|GROUP/", hidden=True)]
Slots = Annotated[
    int | None,
    server_flag(metavar="N", min=1, help="How many requests it runs at once. Default: measured."),
]
Pid = Annotated[
    int | None, server_flag(metavar="N", min=1, help="The server's process on this machine.")
]
Direct = Annotated[
    str | None, server_flag(metavar="URL", help="The server behind the hop at --target, for hop/.")
]
Upstream = Annotated[
    str | None,
    server_flag(
        metavar="[HOST:]PORT",
        help="Judge the gateway at --target: walkaway's upstream is started behind it, there.",
    ),
]
Usage = Annotated[
    str | None,
    server_flag(
        metavar="ADAPTER[=PLACE]",
        help="Hold the gateway to its bill: how that is read, and where it lies.",
    ),
]
Adapter = Annotated[
    str | None,
    server_flag(metavar="NAME", help="A LoRA adapter that may be unloaded, for adapter/."),
]
Configuration = Annotated[
    str | None, server_flag(metavar="TEXT", help="How the server was started, for a matrix.")
]
Tries = Annotated[
    int | None, _cases(metavar="N", min=1, help="Tries of a timed case. Default 8, quick 4.")
]
Strict = Annotated[bool, _cases("--strict", help="Judge the `should` cases too.")]
Quick = Annotated[bool, _cases("--quick", help="The quick cases only: one minute.")]
Suite = Annotated[
    str | None,
    _cases(metavar="DATE", help="The cases of a dated suite, such as 2026-12. Default: all."),
]
MaxSeconds = Annotated[
    float | None, _cases(metavar="S", min=1, help="End after this time; decided cases are kept.")
]
Gentle = Annotated[
    bool,
    _cases(
        "--gentle", help="Judge a server in use, by two streams, for --max-seconds (default 300)."
    ),
]
FailFast = Annotated[bool, _cases("--fail-fast", help="End at the first failure.")]
Against = Annotated[
    str | None,
    server_flag(
        metavar="good|bad",
        help="A server that comes with walkaway; bad: it is wrong in eight ways.",
    ),
]
List = Annotated[bool, _cases("--list", help="List the cases, and run none.")]
Expected = Annotated[
    Path | None,
    result_flag("--expected-failures", metavar="FILE", help="Known failures, one per line."),
]
Junit = Annotated[
    Path | None, result_flag(metavar="FILE", help="Write a JUnit report there; -: print it.")
]
Markdown = Annotated[
    Path | None, result_flag(metavar="FILE", help="Write a Markdown table there; -: print it.")
]
Badge = Annotated[
    Path | None, result_flag(metavar="FILE", help="Write a badge in the format of shields.io.")
]
Json = Annotated[bool, result_flag("--json", help="Print conform.json, or the list as JSON.")]
Seed = Annotated[int, _cases(metavar="N", help="Draws all random choices.")]


def conform(  # noqa: PLR0913  one argument a flag
    *,
    wanted: Wanted = None,
    target: Target = None,
    engine: Engine = None,
    model: Model = None,
    metrics_url: MetricsUrl = None,
    api_key_env: ApiKeyEnv = None,
    header: Header = None,
    ca_file: CaFile = None,
    against: Against = None,
    yes_load_this_host: YesLoadThisHost = False,
    slots: Slots = None,
    pid: Pid = None,
    direct: Direct = None,
    upstream: Upstream = None,
    usage: Usage = None,
    adapter: Adapter = None,
    configuration: Configuration = None,
    quick: Quick = False,
    suite: Suite = None,
    max_seconds: MaxSeconds = None,
    gentle: Gentle = False,
    fail_fast: FailFast = False,
    lists: List = False,
    tries: Tries = None,
    strict: Strict = False,
    seed: Seed = 0,
    expected_failures: Expected = None,
    junit: Junit = None,
    markdown: Markdown = None,
    badge: Badge = None,
    out: Out = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check how a server cancels: pass or fail, case by case.

    ID is a case such as stream/fin-decode, GROUP/ a group such as queue/. Default: all. The exit
    code is 0 if all is well, 3 for an unexpected failure or a stale expectation, 4 if a case that
    must be decided was not, and 5 if the server failed before the first case.

    Example: walkaway conform --target http://127.0.0.1:8000
    """
    from harness.conform.config import ConformConfig, chosen_cases

    if lists:
        asked = ConformConfig(wanted=wanted or [], suite=suite, quick=quick, upstream=upstream)
        _list(chosen_cases(asked), as_json)
        return
    from harness.http_client import check_ca_file, parse_headers, typed_command
    from harness.run.recognition import OWN, with_kind

    config = ConformConfig(
        wanted=wanted or [],
        target_url=target,
        engine=engine or (OWN if upstream is None else GATEWAY),
        model=model,
        metrics_urls=metrics_url or [],
        api_key_env=api_key_env,
        headers=parse_headers(header or []),
        ca_file=check_ca_file(ca_file),
        loads_any_host=yes_load_this_host,
        slots=slots,
        pid=pid,
        direct=direct,
        upstream=upstream,
        usage=usage,
        adapter=adapter,
        configuration=configuration,
        tries=tries,
        strict=strict,
        quick=quick,
        suite=suite,
        max_seconds=max_seconds,
        gentle=gentle,
        fail_fast=fail_fast,
        against=_own_server(against, target=target, engine=engine),
        seed=seed,
        expected=expected_failures,
        out=out,
        command=[*typed_variables(), *typed_command(header or [])],
    )
    config = with_kind(config) if engine is None and upstream is None else config
    outputs = _Outputs(junit=junit, markdown=markdown, badge=badge, as_json=as_json)
    raise typer.Exit(_run(config, outputs, quiet=quiet))


def _own_server(against: str | None, *, target: str | None, engine: str | None) -> str | None:
    if against not in (None, "good", "bad"):
        raise ConfigError(f"--against {against}: there are two such servers: good and bad")
    if against is not None and (target or engine) is not None:
        flag = "--engine (WALKAWAY_ENGINE)" if target is None else "--target (WALKAWAY_TARGET)"
        raise ConfigError(f"--against {against} starts a server of its own: leave out {flag}")
    return against


def _list(chosen: "list[Case]", as_json: bool) -> None:  # noqa: FBT001  a flag
    import msgspec

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outputs:
    """Where the result goes besides its folder."""

    junit: Path | None
    markdown: Path | None
    badge: Path | None
    as_json: bool

    @property
    def is_stdout_taken(self) -> bool:
        """Raises ConfigError if two of them are to be printed."""
        files = (self.junit, self.markdown, self.badge)
        printed = sum((self.as_json, *map(is_stdout, files)))
        if printed > 1:
            raise ConfigError(
                "of --json, --junit -, --markdown - and --badge - only one can be printed"
            )
        return bool(printed)


def _run(config: "ConformConfig", outputs: _Outputs, *, quiet: bool) -> int:
    from harness.conform import reports
    from harness.conform.bad_server import table
    from harness.conform.suite import conform
    from harness.run.process import Interruption
    from harness.run.progress import ProgressConsole, choose_progress
    from harness.text.ci import JUNIT_MARK

    files = (
        (outputs.junit, JUNIT_MARK, reports.as_junit),
        (outputs.markdown, reports.MARKDOWN_MARK, lambda one: reports.as_markdown(one).encode()),
        (outputs.badge, reports.BADGE_MARK, reports.as_badge),
    )
    for file, mark, _ in files:
        check_output(file, ours=mark)
    show = Terminal(Console(stderr=outputs.is_stdout_taken), is_quiet=quiet)
    progress = choose_progress(ProgressConsole(), is_quiet=quiet)
    with Interruption() as interruption:
        try:
            finished = conform(config, show=show, progress=progress, interruption=interruption)
        finally:
            show.close()
        result = finished.result
        for file, mark, made in files:
            if file is not None:
                write_output(file, made(result), ours=mark)
        page = reports.draw_page(finished.folder)
    if outputs.as_json:
        print((finished.folder / CONFORM_FILE).read_text(), end="")  # noqa: T201
    if config.against == "bad" and not config.gentle:
        show.table(table(result.cases))
    show.end(result, page or finished.folder / CONFORM_FILE)
    if finished.failure is not None:
        raise finished.failure
    return result.exit_code
