"""The command line's app, the layout of its help, and the flags that several commands share."""

import os
import sys
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from harness.errors import ConfigError, check_extra

# A flag names the part of the help that it stands in.
server_flag = partial(typer.Option, rich_help_panel="The server")
result_flag = partial(typer.Option, rich_help_panel="The result")

# What names a server once for all commands, each in place of a flag.
SERVER_VARIABLES: Final = {
    "--target": "WALKAWAY_TARGET",
    "--engine": "WALKAWAY_ENGINE",
    "--model": "WALKAWAY_MODEL",
    "--api-key-env": "WALKAWAY_API_KEY_ENV",
    "--header": "WALKAWAY_HEADER",
    "--ca-file": "WALKAWAY_CA_FILE",
}
_SECRET: Final = ("authorization", "cookie", "key", "secret", "token")


class Commands(TyperGroup):
    """The whole command line, whose help lists the commands in groups (`rich_help_panel`)."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        all_commands: Mapping[str, Any] = self.commands
        groups: dict[str, list[tuple[str, Any]]] = {}
        for name, command in all_commands.items():
            groups.setdefault(command.rich_help_panel or "Commands", []).append((name, command))
        widest = max(map(len, self.commands))
        for group, commands in groups.items():
            with formatter.section(group):
                room = formatter.width - widest - 4
                rows = [
                    (name.ljust(widest), one.get_short_help_str(room)) for name, one in commands
                ]
                formatter.write_dl(rows)
        with formatter.section("Options"):
            found = (one.get_help_record(ctx) for one in self.get_params(ctx))
            formatter.write_dl([record for record in found if record is not None])


app = typer.Typer(
    name="walkaway",
    cls=Commands,
    help=(
        "What does an LLM server do after the user walks away? Opens streams the way users do, "
        "abandons them on purpose, and measures what it cost.\n\nExample: walkaway demo\n\n"
        "`walkaway COMMAND -h` explains a command, with an example."
    ),
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(is_wanted: bool) -> None:  # noqa: FBT001  the signature of a callback
    if is_wanted:
        from importlib.metadata import version

        typer.echo(f"walkaway {version('walkaway')}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
]


@app.callback()
def walkaway(*, version: Version = False) -> None:
    pass


class Command(TyperCommand):
    """A command whose usage line names its arguments plainly (WORKLOAD, not {WORKLOAD}), and whose
    help lists its options in the parts that they name (`rich_help_panel`)."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        parts: dict[str, list[tuple[str, str]]] = {}
        for one in self.get_params(ctx):
            if (record := one.get_help_record(ctx)) is not None:
                part = getattr(one, "rich_help_panel", None) or "Options"
                parts.setdefault(part, []).append(record)
        others = parts.pop("Options", [])  # last
        for part, records in (*parts.items(), ("Options", others)):
            with formatter.section(part):
                formatter.write_dl(records)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces = super().collect_usage_pieces(ctx)
        return [piece.replace("{", "").replace("}", "") for piece in pieces]


class LoadCommand(Command):
    """A command of runs and their figures, which need more than `walkaway conform` does."""

    def invoke(self, ctx: Any) -> Any:
        check_extra("load", f"walkaway {ctx.info_name}")
        return super().invoke(ctx)


def typed_variables() -> list[str]:
    """The variables that took the place of flags, as a shell sets them before a command; of headers
    the names alone. Raises ConfigError for a header that may hold a key."""
    typed = {argument.partition("=")[0] for argument in sys.argv[1:]}
    found = {
        variable: os.environ[variable]
        for flag, variable in SERVER_VARIABLES.items()
        if os.environ.get(variable) and flag not in typed
    }
    for text in found.get("WALKAWAY_HEADER", "").split():
        name = text.partition("=")[0]
        if any(word in name.lower() for word in _SECRET):
            raise ConfigError(
                f"WALKAWAY_HEADER: the header {name} may hold a key in clear; put the key into a "
                "variable of its own, and name that by --api-key-env or WALKAWAY_API_KEY_ENV"
            )
    shown = [
        f"{variable}={'***' if variable == 'WALKAWAY_HEADER' else text}"
        for variable, text in found.items()
    ]
    return ["env", *shown] if shown else []


def workload_names(incomplete: str) -> list[str]:
    from harness.workload.workload import SHIPPED_WORKLOADS, shipped

    return [name for name in shipped(SHIPPED_WORKLOADS) if name.startswith(incomplete)]


def target_names(incomplete: str) -> list[str]:
    from harness.workload.workload import SHIPPED_TARGETS, shipped

    return [name for name in shipped(SHIPPED_TARGETS) if name.startswith(incomplete)]


JsonResult = Annotated[bool, result_flag("--json", help="Print the result as JSON.")]
Force = Annotated[bool, result_flag("--force", help="Overwrite an existing file.")]
