"""The catalogue on a terminal: workloads, kinds of server, and a template."""

import json
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import typer

from harness.errors import ConfigError
from harness.formatting import quantity
from harness.records import Trust
from harness.workload.target import MetricSource, Target
from harness.workload.workload import (
    SHIPPED_TARGETS,
    SHIPPED_WORKLOADS,
    as_plain_data,
    find_file,
    load_target,
    load_workload,
    shipped,
)

WIDEST: Final = 100  # longer lines are hard to read
TEMPLATE: Final = "workload_template.toml"

TRUST_IN_WORDS: Final[Mapping[Trust, str]] = {
    "exact": "exact at any time",
    "exact_when_idle": "exact only while nothing runs",
    "lower": "the true value may be higher",
    "stuck": "never moves, despite the server's documentation: not used",
}
SLOTS_IN_WORDS: Final = {
    "config": "read from its /walkaway/config",
    "props": "read from its /props",
    "workload": "not published: set load.slots if a workload needs it, else found by trying",
}


def show_workloads(*, as_json: bool) -> None:
    known = {name: load_workload(name) for name in shipped(SHIPPED_WORKLOADS)}
    if as_json:
        _print_json({name: one.question for name, one in known.items()})
        return
    _print_list({name: [one.question] for name, one in known.items()}, SHIPPED_WORKLOADS)


def show_workload(name_or_path: str, *, as_json: bool) -> None:
    workload = load_workload(name_or_path)
    if as_json:
        _print_json(as_plain_data(workload))
        return
    path = find_file(name_or_path, package=SHIPPED_WORKLOADS, noun="workload")
    arms = ", ".join(arm.name for arm in workload.arms)
    lines = [
        workload.question,
        f"Run it: walkaway run {name_or_path} (--set section.key=value changes any key)",
        *([f"Arms, run in turn: {arms}; rounds: {workload.run.rounds}"] if arms else []),
    ]
    typer.echo(workload.name)
    _print_lines(lines)
    typer.echo(f"  {path}\n")
    typer.echo(path.read_text(encoding="utf-8-sig").rstrip())


def show_targets(*, as_json: bool) -> None:
    known = {name: load_target(name) for name in shipped(SHIPPED_TARGETS)}
    if as_json:
        _print_json({name: one.description for name, one in known.items()})
        return
    texts = {
        name: [one.description, f"metrics: {', '.join(one.metrics) or 'none known'}"]
        for name, one in known.items()
    }
    _print_list(texts, SHIPPED_TARGETS)


def show_target(name_or_path: str, *, as_json: bool) -> None:
    target = load_target(name_or_path)
    if as_json:
        _print_json(as_plain_data(target))
        return
    typer.echo(target.name)
    _print_lines(
        [*_about(target), f"Measure one: walkaway run demo {_flags(name_or_path, target)}"]
    )
    typer.echo(f"  {find_file(name_or_path, package=SHIPPED_TARGETS, noun='engine')}")
    if not target.metrics:
        typer.echo("\nNo metrics are known: only client-side figures are measured.")
    for role, source in target.metrics.items():
        typer.echo(f"\n{role}")
        _print_lines(_about_metric(source))


def write_template(file: Path, *, force: bool) -> None:
    if file.exists() and not force:
        raise ConfigError(f"{file}: exists already; name another file, or replace it with --force")
    try:
        file.write_text((files("harness") / TEMPLATE).read_text())
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error}") from error
    typer.echo(f"wrote {file}; run it: walkaway run {file}")


def _about(target: Target) -> Iterator[str]:
    yield target.description
    yield f"Requests go to {target.path}."
    if target.lifecycle:
        yield "Its log has each stage of a cancel: figures are exact, and metrics only check them."
    yield f"Batch slots: {SLOTS_IN_WORDS[target.slots_from]}."
    steps = "" if target.settle_steps is None else f" or {target.settle_steps} steps, if longer"
    yield f"Settle time after a load: {target.settle_s:g} s{steps}."
    if target.scrape_interval_s is not None:
        yield f"Metrics are read every {target.scrape_interval_s:g} s (collect.scrape_interval_s)."
    if target.min_scrape_interval_s is not None:
        yield f"Scrapes closer than {target.min_scrape_interval_s:g} s change how it behaves."


def _flags(name_or_path: str, target: Target) -> str:
    return "" if target.lifecycle else f"--target URL --engine {name_or_path}"


def _about_metric(source: MetricSource) -> Iterator[str]:
    labels = ",".join(f'{label}="{value}"' for label, value in source.labels.items())
    yield f"{source.name}{{{labels}}}" if labels else source.name
    yield f"Refreshed: {source.refresh}{_age(source)}. Trust: {TRUST_IN_WORDS[source.trust]}."


def _age(source: MetricSource) -> str:
    parts = [
        *([quantity(source.lag_steps, "steps")] if source.lag_steps else []),
        *([quantity(source.lag_s, "s")] if source.lag_s else []),
    ]
    return f"; up to {' and '.join(parts)} old" if parts else ""


def _print_list(texts: Mapping[str, list[str]], package: str) -> None:
    """Print names with their lines. A path is never wrapped, so it can be copied."""
    paths = shipped(package)
    for name, lines in texts.items():
        typer.echo(name)
        _print_lines(lines)
        typer.echo(f"  {paths[name]}")


def _print_lines(lines: Iterator[str] | list[str]) -> None:
    width = min(shutil.get_terminal_size().columns, WIDEST)
    for line in lines:
        typer.echo(textwrap.fill(line, width, initial_indent="  ", subsequent_indent="  "))


def _print_json(data: Mapping[str, Any]) -> None:
    typer.echo(json.dumps(data, indent=2))
