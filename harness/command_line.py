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
    from harness.config import SHIPPED_WORKLOADS, shipped

    return [name for name in shipped(SHIPPED_WORKLOADS) if name.startswith(incomplete)]


def target_names(incomplete: str) -> list[str]:
    """The same of the kinds of server."""
    from harness.config import SHIPPED_TARGETS, shipped

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
Json = Annotated[bool, typer.Option("--json", help="Print summary.json instead of a table.")]
JsonResult = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, only the result.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")]
