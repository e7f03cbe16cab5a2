"""The flags of `walkaway gate`."""

from pathlib import Path
from typing import Annotated

import typer

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
