"""All commands of `walkaway`, in the order in which its help lists them.

A module of flags imports what its commands do when one is called: `walkaway --help` and a mistyped
flag are answered at once, while pandas and scipy alone take a second to import.
"""

from typing import Final

import typer

from harness.commands.app import Command, LoadCommand, app
from harness.commands.calibrate import calibrate
from harness.commands.catalogue import init, targets, workloads
from harness.commands.conform import conform
from harness.commands.doctor import doctor
from harness.commands.results import collect, compare, export, gate, matrix, report, trend
from harness.commands.run import demo, run
from harness.commands.simulate import simulate
from harness.commands.upstream import upstream
from harness.run.process import become, python_module

__all__ = ["app"]

LIGHT: Final = (conform, matrix, upstream, workloads, targets, init, doctor)  # need no extra


def engine(context: typer.Context) -> None:
    """Serve the bundled engine alone (flags: walkaway engine --help).

    Example: walkaway engine --port 8000 --runner simulated --sim-fixed-ms 20
    """
    become(python_module("reference_engine", *context.args))


for command in (
    *(demo, run, simulate, conform, report, gate, compare, trend, matrix, export, collect),
    *(calibrate, upstream, workloads, targets, init, doctor),
):
    app.command(cls=Command if command in LIGHT else LoadCommand)(command)
app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    }
)(engine)
