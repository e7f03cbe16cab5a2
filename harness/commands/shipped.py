"""`walkaway workloads`, `targets` and `init`: the shipped files, and a first one of your own.

The catalogue is imported when a command is called, so that help is printed at once.
"""

from pathlib import Path
from typing import Annotated

import typer

from harness.commands.app import Force, JsonResult, target_names, workload_names


def workloads(
    *,
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", hidden=True, autocompletion=workload_names),
    ] = None,
    as_json: JsonResult = False,
) -> None:
    """List the shipped workloads, or explain one.

    With NAME (or the path of your own workload): its question, how to run it, and its file, which
    explains each key.

    Example: walkaway workloads chunk_frontier
    """
    from harness.commands.catalogue import show_workload, show_workloads

    show_workloads(as_json=as_json) if name is None else show_workload(name, as_json=as_json)


def targets(
    *,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", hidden=True, autocompletion=target_names)
    ] = None,
    as_json: JsonResult = False,
) -> None:
    """List the kinds of server that walkaway knows, or explain one.

    With NAME (or a path): its file, with the metrics that are read, when each one moves, and how
    far to trust it. `walkaway run` takes a name with --engine.

    Example: walkaway targets vllm
    """
    from harness.commands.catalogue import show_target, show_targets

    show_targets(as_json=as_json) if name is None else show_target(name, as_json=as_json)


def init(
    *,
    file: Annotated[Path, typer.Argument(metavar="FILE", hidden=True)] = Path("workload.toml"),
    force: Force = False,
) -> None:
    """Write a first workload of your own.

    FILE (default: workload.toml) explains each key, and runs unchanged.

    Example: walkaway init mine.toml
    """
    from harness.commands.catalogue import write_template

    write_template(file, force=force)
