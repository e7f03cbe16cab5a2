"""Commands that need no run: what there is to choose from, a place to begin, and this machine."""

from pathlib import Path
from typing import Annotated

import typer

from harness.command_line import Force, JsonResult, target_names, workload_names


def workloads(
    *,
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", hidden=True, autocompletion=workload_names),
    ] = None,
    as_json: JsonResult = False,
) -> None:
    """List the shipped workloads, or explain one.

    With NAME (or the path of a workload of your own): its question, how to run it, and its file
    with what each key does.

    Example: walkaway workloads chunk_frontier
    """
    from harness.catalogue import show_workload, show_workloads

    show_workloads(as_json=as_json) if name is None else show_workload(name, as_json=as_json)


def targets(
    *,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", hidden=True, autocompletion=target_names)
    ] = None,
    as_json: JsonResult = False,
) -> None:
    """List the kinds of server that walkaway knows, or explain one.

    With NAME (or a path): which of its metrics are read, when each of them moves, and how far it
    can be believed. A name is for --engine of `walkaway run`.

    Example: walkaway targets vllm
    """
    from harness.catalogue import show_target, show_targets

    show_targets(as_json=as_json) if name is None else show_target(name, as_json=as_json)


def init(
    *,
    file: Annotated[Path, typer.Argument(metavar="FILE", hidden=True)] = Path("workload.toml"),
    force: Force = False,
) -> None:
    """Write a workload of your own to begin with.

    FILE (workload.toml, if you name none) says what each key does, and runs as it is.

    Example: walkaway init mine.toml
    """
    from harness.catalogue import write_template

    write_template(file, force=force)


def doctor(*, as_json: JsonResult = False) -> None:
    """Say what this machine can do, and how to mend what it cannot.

    Exit code 2 where something is missing without which the demo does not run.

    Example: walkaway doctor
    """
    from harness.doctor_command import show_machine

    show_machine(as_json=as_json)
