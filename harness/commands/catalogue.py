"""`walkaway workloads`, `targets` and `init`: the shipped files, and a first one of your own."""

import json
import shlex
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from harness.commands.app import Force, JsonResult, target_names, workload_names
from harness.errors import ConfigError, did_you_mean
from harness.store.output import is_stdout, write_output

if TYPE_CHECKING:
    from harness.workload.values import TomlTable

WIDEST: Final = 100  # longer lines are hard to read
TEMPLATE: Final = "workload_template.toml"
MANAGED: Final = ("up", "down", "install")
_up = partial(typer.Option, rich_help_panel="Of targets up")

# The list of `walkaway workloads`, by what they ask: first the few that a newcomer needs.
GROUPS: Final[dict[str, Sequence[str]]] = {
    "Begin with one of these": (*("demo", "chat_stop", "slot_recovery", "gate_black_box", "gate"),),
    "How soon does the server let go, whenever and however users leave?": (
        *("cancel_steps", "navigate_away", "prefill_abandon", "queue_abandon", "cancel_storm"),
        *("last_token_race", "occupancy", "async_scheduling", "kserve"),
    ),
    "What do the other users feel?": (
        *("innocent_bystanders", "open_loop", "trace_replay", "observer_effect"),
    ),
    "What if users come back at once?": (
        *("agent_stop", "regenerate", "type_ahead", "retry_storm", "retry_outage"),
    ),
    "Does anything leak, or get lost?": ("soak", "worker_lost"),
    "What is cancellation worth, and what saves work?": (
        *("value_of_cancellation", "memory_pressure", "swap_or_recompute", "chunk_frontier"),
        *("early_stopping",),
    ),
    "Several servers": ("tiers", "disaggregated", "cluster"),
}

# Takes a name or path; returns its file's content, lines for the list, and lines for one alone.
Describe = Callable[[str], tuple["TomlTable", list[str], list[str]]]


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
    from harness.workload.workload import SHIPPED_WORKLOADS, load_workload, shipped

    if name is None and not as_json:
        _print_questions({one: load_workload(one).question for one in shipped(SHIPPED_WORKLOADS)})
        return

    def describe(name: str) -> tuple["TomlTable", list[str], list[str]]:
        one = load_workload(name)
        more = [f"Run it: walkaway run {name} (--set section.key=value changes any key)"]
        if arms := ", ".join(arm.name for arm in one.arms):
            more.append(f"Arms, run in turn: {arms}; rounds: {one.run.rounds}")
        return one, [one.question], more

    _show(name, describe, SHIPPED_WORKLOADS, "workload", as_json=as_json)


def targets(
    *,
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME|up|down|install", hidden=True, autocompletion=target_names),
    ] = None,
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", hidden=True)] = None,
    slots: Annotated[
        int, _up(metavar="N", min=1, max=512, help="Requests that it runs at once.")
    ] = 4,
    port: Annotated[
        int | None, _up(metavar="P", min=1, max=65_533, help="Default: a free one.")
    ] = None,
    model: Annotated[
        str | None,
        _up(
            metavar="NAME",
            help="Of an engine: tiny or small (the default), of random weights. Of a gateway: the "
            "model on the server behind; default: the first that it lists.",
        ),
    ] = None,
    direct: Annotated[str | None, _up(metavar="URL", help="The server behind a gateway.")] = None,
    as_json: JsonResult = False,
) -> None:
    """List or explain the kinds of server, or start one.

    With NAME (or a path): its file, with the metrics that are read, when each one moves, and how
    far to trust it. `walkaway run` takes a name with --engine.

    `targets install RECIPE` installs an engine (such as llamacpp) or a gateway (such as nginx) into
    a folder of its own; without RECIPE it says which ones there are. `targets up RECIPE` starts it
    on loopback, an engine with a model of random weights, and prints its address; `targets down
    RECIPE` ends it.

    Example: walkaway targets vllm
    """
    if name in MANAGED:
        _manage(name, recipe, slots=slots, port=port, model=model, direct=direct)
        return
    if recipe is not None:
        near = did_you_mean(str(name), MANAGED)
        raise ConfigError(
            f"targets {name} {recipe}: one name at a time, or one of {', '.join(MANAGED)} before "
            f"a recipe{near}"
        )
    from harness.workload.workload import SHIPPED_TARGETS, load_target

    def describe(name: str) -> tuple["TomlTable", list[str], list[str]]:
        one = load_target(name)
        flags = "" if one.lifecycle else f" --target URL --engine {name}"
        brief = [one.description, f"metrics: {', '.join(one.metrics) or 'none known'}"]
        return one, brief, [f"Measure one: walkaway run demo{flags}"]

    _show(name, describe, SHIPPED_TARGETS, "engine", as_json=as_json)


def _manage(
    verb: str,
    name: str | None,
    *,
    slots: int,
    port: int | None,
    model: str | None,
    direct: str | None,
) -> None:
    from harness.run.installation import install
    from harness.run.process import Interruption
    from harness.run.recipes import find_recipe, load_recipes
    from harness.run.standing import Wish, as_json, bring_up, take_down

    if name is None:
        raise ConfigError(f"targets {verb}: name one of {', '.join(load_recipes())}")
    recipe = find_recipe(name)
    match verb:
        case "install":
            typer.echo(f"installing {name} into {recipe.home}", err=True)
            typer.echo(f"{name}: {'installed' if install(recipe) else 'is installed already'}")
        case "down":
            ended = take_down(recipe)
            what = f"ended {', '.join(map(str, ended))}" if ended else "nothing of it was running"
            typer.echo(f"{name}: {what}")
        case _:
            wish = Wish(slots=slots, port=port, model=model, direct=direct)
            with Interruption() as interruption:
                typer.echo(as_json(bring_up(recipe, wish, interruption=interruption)))


def init(
    *,
    file: Annotated[Path, typer.Argument(metavar="FILE", hidden=True)] = Path("workload.toml"),
    force: Force = False,
) -> None:
    """Write a first workload of your own.

    FILE (default: workload.toml) explains each key, and runs unchanged.

    Example: walkaway init mine.toml
    """
    template = (files("harness") / TEMPLATE).read_bytes()
    write_output(file, template, ours=None, may_overwrite=force)
    if not is_stdout(file):
        typer.echo(f"wrote {file}; run it: walkaway run {shlex.quote(str(file))}")


def _show(name: str | None, describe: Describe, package: str, noun: str, *, as_json: bool) -> None:
    from harness.workload.workload import as_plain_data, find_file, shipped

    if name is None:
        known = {one: (describe(one)[1], path) for one, path in shipped(package).items()}
        if as_json:
            _print_json({one: lines[0] for one, (lines, _) in known.items()})
            return
        for one, (lines, path) in known.items():
            _print_head(one, lines, path)
        return
    content, brief, more = describe(name)
    data = as_plain_data(content)
    if as_json:
        _print_json(data)
        return
    path = find_file(name, package=package, noun=noun)
    _print_head(data["name"], [*brief, *more], path)
    typer.echo(f"\n{path.read_text(encoding='utf-8-sig').rstrip()}")


def _print_questions(questions: Mapping[str, str]) -> None:
    grouped = {name for names in GROUPS.values() for name in names}
    others = [name for name in questions if name not in grouped]
    groups = GROUPS | ({"Others": others} if others else {})
    width, indent = _width(), " " * (max(map(len, questions)) + 4)
    for group, names in groups.items():
        typer.echo(group if group.endswith("?") else f"{group}:")
        for name in names:
            head = f"  {name}".ljust(len(indent))
            text = questions[name]
            typer.echo(textwrap.fill(text, width, initial_indent=head, subsequent_indent=indent))
        typer.echo()
    typer.echo("walkaway run NAME runs one; walkaway workloads NAME explains each of its keys.")


def _print_head(name: str, lines: list[str], path: Path) -> None:
    """A path is never wrapped, so it can be copied."""
    width = _width()
    typer.echo(name)
    for line in lines:
        typer.echo(textwrap.fill(line, width, initial_indent="  ", subsequent_indent="  "))
    typer.echo(f"  {path}")


def _width() -> int:
    return min(shutil.get_terminal_size().columns, WIDEST)


def _print_json(data: Mapping[str, Any]) -> None:
    typer.echo(json.dumps(data, indent=2))
