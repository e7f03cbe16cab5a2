"""All commands of `walkaway`, in the order in which its help lists them.

A module of flags imports what its commands do when one is called: `walkaway --help` and a mistyped
flag are answered at once, while pandas and scipy alone take a second to import.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import typer

from harness.commands.app import Command, LoadCommand, app
from harness.commands.calibrate import calibrate
from harness.commands.catalogue import init, targets, workloads
from harness.commands.conform import conform
from harness.commands.doctor import doctor
from harness.commands.results import collect, compare, export, gate, matrix, report, trend
from harness.commands.run import demo, run
from harness.commands.search import search
from harness.commands.simulate import simulate
from harness.commands.upstream import upstream
from harness.run.process import become, python_module

__all__ = ["app"]


def engine(context: typer.Context) -> None:
    """Serve the bundled engine alone (its flags: walkaway engine -h).

    Example: walkaway engine --port 8000 --runner simulated --sim-fixed-ms 20
    """
    become(python_module("reference_engine", *context.args))


GROUPS: Final[Mapping[str, Sequence[Callable[..., None]]]] = {
    "Measure": (demo, run, conform, search),
    "Judge and show what was measured": (
        *(gate, report, compare, trend, matrix),
        *(export, collect),
    ),
    "Simulate in virtual time": (simulate, calibrate),
    "Start a server": (engine, targets, upstream),
    "Look up, begin your own": (workloads, init, doctor),
}
LIGHT: Final = (
    conform,
    search,
    matrix,
    engine,
    upstream,
    workloads,
    targets,
    init,
    doctor,
)  # need no extra
ITS_OWN_FLAGS: Final = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}

for group, commands in GROUPS.items():
    for command in commands:
        app.command(
            cls=Command if command in LIGHT else LoadCommand,
            rich_help_panel=group,
            context_settings=ITS_OWN_FLAGS if command is engine else None,
        )(command)
