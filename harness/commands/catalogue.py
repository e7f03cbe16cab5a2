"""The catalogue on a terminal: workloads, kinds of server, and a template."""

import json
import shutil
import textwrap
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import typer

from harness.errors import ConfigError
from harness.workload.target import Target
from harness.workload.workload import (
    SHIPPED_TARGETS,
    SHIPPED_WORKLOADS,
    Workload,
    as_plain_data,
    find_file,
    load_target,
    load_workload,
    shipped,
)

WIDEST: Final = 100  # longer lines are hard to read
TEMPLATE: Final = "workload_template.toml"


def show_workloads(*, as_json: bool) -> None:
    names = shipped(SHIPPED_WORKLOADS)
    _show_all(names, {name: [load_workload(name).question] for name in names}, as_json=as_json)


def show_targets(*, as_json: bool) -> None:
    names = shipped(SHIPPED_TARGETS)
    about = {}
    for name in names:
        target = load_target(name)
        about[name] = [target.description, f"metrics: {', '.join(target.metrics) or 'none known'}"]
    _show_all(names, about, as_json=as_json)


def show_workload(name_or_path: str, *, as_json: bool) -> None:
    workload = load_workload(name_or_path)
    lines = [
        workload.question,
        f"Run it: walkaway run {name_or_path} (--set section.key=value changes any key)",
    ]
    if arms := ", ".join(arm.name for arm in workload.arms):
        lines.append(f"Arms, run in turn: {arms}; rounds: {workload.run.rounds}")
    path = find_file(name_or_path, package=SHIPPED_WORKLOADS, noun="workload")
    _show_one(workload, lines, path, as_json=as_json)


def show_target(name_or_path: str, *, as_json: bool) -> None:
    target = load_target(name_or_path)
    flags = "" if target.lifecycle else f" --target URL --engine {name_or_path}"
    lines = [target.description, f"Measure one: walkaway run demo{flags}"]
    path = find_file(name_or_path, package=SHIPPED_TARGETS, noun="engine")
    _show_one(target, lines, path, as_json=as_json)


def write_template(file: Path, *, force: bool) -> None:
    if file.exists() and not force:
        raise ConfigError(f"{file}: exists already; name another file, or replace it with --force")
    try:
        file.write_text((files("harness") / TEMPLATE).read_text())
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error}") from error
    typer.echo(f"wrote {file}; run it: walkaway run {file}")


def _show_all(paths: Mapping[str, Path], about: Mapping[str, list[str]], *, as_json: bool) -> None:
    """Print each name with its lines and its path, or with its first line as JSON."""
    if as_json:
        _print_json({name: lines[0] for name, lines in about.items()})
        return
    for name, path in paths.items():
        _print_head(name, about[name], path)


def _show_one(one: Workload | Target, lines: Iterable[str], path: Path, *, as_json: bool) -> None:
    """Print a file below its lines: its comments explain each key."""
    if as_json:
        _print_json(as_plain_data(one))
        return
    _print_head(one.name, lines, path)
    typer.echo(f"\n{path.read_text(encoding='utf-8-sig').rstrip()}")


def _print_head(name: str, lines: Iterable[str], path: Path) -> None:
    """A path is never wrapped, so it can be copied."""
    width = min(shutil.get_terminal_size().columns, WIDEST)
    typer.echo(name)
    for line in lines:
        typer.echo(textwrap.fill(line, width, initial_indent="  ", subsequent_indent="  "))
    typer.echo(f"  {path}")


def _print_json(data: Mapping[str, Any]) -> None:
    typer.echo(json.dumps(data, indent=2))
