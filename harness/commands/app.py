"""What all commands share: the app, how their help looks, and the flags that several have."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

app = typer.Typer(
    name="walkaway",
    help=(
        "What does an LLM server do after the user walks away? Opens streams the way users do, "
        "abandons them on purpose, and measures what it cost.\n\nExample: walkaway demo"
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class Command(TyperCommand):
    """A command whose usage line names its arguments plainly: WORKLOAD, not {WORKLOAD}."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces = super().collect_usage_pieces(ctx)
        return [piece.replace("{", "").replace("}", "") for piece in pieces]


def workload_names(incomplete: str) -> list[str]:
    """For a shell that completes: the shipped workloads that begin so."""
    from harness.workload.workload import SHIPPED_WORKLOADS, shipped

    return [name for name in shipped(SHIPPED_WORKLOADS) if name.startswith(incomplete)]


def target_names(incomplete: str) -> list[str]:
    """The same of the kinds of server."""
    from harness.workload.workload import SHIPPED_TARGETS, shipped

    return [name for name in shipped(SHIPPED_TARGETS) if name.startswith(incomplete)]


Setting = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Override a key of the workload, e.g. run.users=4. Repeatable.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="The run's folder; must be new or empty."),
]
NoScrape = Annotated[
    bool,
    typer.Option(
        "--no-scrape",
        help="Read /metrics before and after the load only: watching costs the watched.",
    ),
]
All = Annotated[bool, typer.Option("--all", help="Show every figure and note.")]
Json = Annotated[bool, typer.Option("--json", help="Print summary.json instead of a table.")]
JsonResult = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, only the result.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")]


WorkloadName = Annotated[
    str, typer.Argument(metavar="WORKLOAD", hidden=True, autocompletion=workload_names)
]

# Which server, and how to speak to it.
Target = Annotated[
    str | None,
    typer.Option(metavar="URL", help="The server; without it the bundled engine is started."),
]
Engine = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="What kind of server (walkaway targets) or a path.",
        autocompletion=target_names,
    ),
]
Model = Annotated[str | None, typer.Option(metavar="NAME", help="The model's name on the server.")]
MetricsUrl = Annotated[
    list[str] | None,
    typer.Option(metavar="URL", help="Where its metrics are, if not URL/metrics. Repeatable."),
]
ApiKeyEnv = Annotated[
    str | None, typer.Option(metavar="VAR", help="Environment variable with the API key.")
]
Header = Annotated[
    list[str] | None,
    typer.Option(metavar="K=V", help="A header for each request. Repeatable."),
]
CaFile = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="CAs (PEM) to trust over https, in place of the usual."),
]

# How the load is made.
Processes = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Share the load between N processes. Default 1."),
]
CancellationRate = Annotated[
    float | None,
    typer.Option(metavar="PERCENT", help="So many of the requests are left (as in AIPerf)."),
]
CancellationDelay = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="So long after a request was fully sent. Default 0."),
]

# In the browser.
Web = Annotated[
    bool, typer.Option("--web", help="Start and stop it in a browser, and watch it there.")
]
WebPort = Annotated[int, typer.Option(metavar="PORT", min=1, help="Of that page.")]


RunPath = Annotated[Path, typer.Argument(metavar="RUN", hidden=True)]
Limits = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Limits, one a line; else the workload's.")
]
BaselineFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Default: results/baselines/WORKLOAD.json, if it is."),
]
SaveBaseline = Annotated[
    bool, typer.Option("--save-baseline", help="Keep this run as the baseline, if it passes.")
]
Junit = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a JUnit report there.")]
Markdown = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a Markdown table there.")
]
Verdicts = Annotated[bool, typer.Option("--json", help="Print the verdicts as JSON.")]
OnlyExitCode = Annotated[bool, typer.Option("--quiet", help="Print nothing: the exit code.")]
