"""`walkaway gate`: read the run, judge it, write the reports, return the exit code."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from harness.compare.pairs import FEWEST_ROUNDS
from harness.errors import ConfigError, in_words
from harness.formatting import quantity
from harness.gate.baseline import (
    AGAINST_BASELINE,
    figures_to_hold_to,
    limits_against_baseline,
    load_baseline,
    place_of,
    save_baseline,
)
from harness.gate.judge import (
    EXIT_CODES,
    GateVerdict,
    Judgement,
    Measured,
    judge,
    num_rounds,
    refuse,
)
from harness.gate.limits import (
    BASELINE,
    Limit,
    arm_names,
    fewest_abandons,
    of_the_run_alone,
    parse_limits,
    workload_limits,
)
from harness.gate.reports import (
    LEFT_OUT,
    MARKDOWN_MARK,
    as_junit,
    as_markdown,
    gravest_first,
)
from harness.gate.run import read_run
from harness.store.output import check_output, is_stdout, write_output
from harness.store.run_folder import RunFolder, UnusableRunError
from harness.text.ci import JUNIT_MARK

WIDEST_LIMIT: Final = 33  # of the terminal's columns: the longest name of a figure
LEAST_LIMIT, WIDTH_OF_OTHERS = 10, 47  # on a narrower terminal than 80 columns
_STYLES: Final = {
    GateVerdict.PASS: "green",
    GateVerdict.FAIL: "bold red",
    GateVerdict.CANNOT_DECIDE: "yellow",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOrder:
    run: Path
    limits: Path | None = None
    baseline: Path | None = None
    saves_baseline: bool = False
    junit: Path | None = None
    markdown: Path | None = None
    may_overwrite: bool = False


def gate_and_show(order: GateOrder, *, as_json: bool, quiet: bool) -> int:
    _check_apart(order, as_json=as_json)
    check_output(order.junit, ours=JUNIT_MARK, may_overwrite=order.may_overwrite)
    check_output(order.markdown, ours=MARKDOWN_MARK, may_overwrite=order.may_overwrite)
    saved = None
    try:
        measured = read_run(order.run)
    except UnusableRunError as error:
        judgement = refuse(str(order.run), error.reason, error.remedy)
    else:
        if order.saves_baseline:
            _check_has_rounds(measured)
        judgement = _judged(order, measured)
        saved = _save(order, measured, judgement)
    _write_reports(order, judgement)
    if as_json:
        print(json.dumps(msgspec.to_builtins(judgement), indent=2))  # noqa: T201
    elif not quiet:
        is_taken = is_stdout(order.junit) or is_stdout(order.markdown)
        print_judgement(Console(stderr=is_taken), judgement, saved)
    return EXIT_CODES[judgement.verdict]


def _write_reports(order: GateOrder, judgement: Judgement) -> None:
    may_overwrite = order.may_overwrite
    if order.junit is not None:
        content = as_junit(judgement)
        write_output(order.junit, content, ours=JUNIT_MARK, may_overwrite=may_overwrite)
    if order.markdown is not None:
        text = as_markdown(judgement).encode()
        write_output(order.markdown, text, ours=MARKDOWN_MARK, may_overwrite=may_overwrite)


def print_judgement(console: Console, judgement: Judgement, saved: str | None) -> None:
    title = Text.assemble(
        ("gate: ", "bold"),
        (f"{judgement.verdict}", _STYLES[judgement.verdict]),
        f"  {judgement.question} in {judgement.run}",
    )
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("verdict", no_wrap=True)
    longest = max(len("limit"), *(len(one.name) for one in judgement.checks))
    room = max(LEAST_LIMIT, console.width - WIDTH_OF_OTHERS)
    table.add_column("limit", overflow="fold", width=min(longest, WIDEST_LIMIT, room))
    table.add_column("measured, or why not", overflow="fold")
    for one in gravest_first(judgement.checks):
        lines = [one.measured or one.reason]
        if one.verdict is GateVerdict.CANNOT_DECIDE:
            lines += [one.reason] if one.measured else []
            lines += [f"would decide: {one.to_decide}"] if one.to_decide else []
        table.add_row(
            Text(str(one.verdict), style=_STYLES[one.verdict]),
            Text(one.name),
            Text("\n".join(lines)),
        )
    parts: list[Text | Table] = [title, table]
    if judgement.baseline is not None:
        parts.append(Text(f"baseline: run {judgement.baseline}", style="dim"))
    if judgement.left_out:
        parts.append(Text(f"{LEFT_OUT}: {', '.join(judgement.left_out)}", style="dim"))
    if saved is not None:
        parts.append(Text(saved))
    console.print(Group(*parts), soft_wrap=False)


def _judged(order: GateOrder, measured: Measured) -> Judgement:
    workload = RunFolder(order.run).read_manifest()["workload"]
    limits = _limits(order, workload)
    names_baseline = any(limit.against == BASELINE for limit in limits)
    if order.saves_baseline:
        if not names_baseline:
            _check_can_be_held_to(measured)
        limits = of_the_run_alone(limits)
    baseline, left_out = _baseline(order, measured), list[str]()
    if baseline is not None and not names_baseline:
        noise = float((workload.get("gate") or {}).get("noise", 0.1))
        against, left_out = limits_against_baseline(measured, baseline, noise)
        limits += against
    if not limits and not order.saves_baseline:
        raise ConfigError(
            f"{order.run}: no limit to judge it by: write limits into the workload ([gate] limits) "
            "or into a file (--limits), or save a baseline of a good run (--save-baseline)"
        )
    return judge(
        measured,
        limits,
        run=str(order.run),
        baseline=baseline,
        fewest_abandons=fewest_abandons(workload),
        left_out=left_out,
    )


def _limits(order: GateOrder, workload: Mapping[str, Any]) -> list[Limit]:
    if order.limits is None:
        return workload_limits(workload, source=f"{order.run}: [gate]")
    try:
        text = order.limits.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--limits {order.limits}: cannot be read: {in_words(error)}; name a file with a limit "
            "a line, such as: ghost_rate.upper95 < 0.01"
        ) from error
    lines, source = text.splitlines(), str(order.limits)
    found = parse_limits(lines, source=source, arms=arm_names(workload))
    if not found:
        raise ConfigError(f"{order.limits}: has no limit: a gate without one would pass anything")
    return found


def _baseline(order: GateOrder, measured: Measured) -> Measured | None:
    """The named baseline, else the workload's, if it exists.

    None while a baseline is to be saved: a run is not compared with the baseline that it replaces.
    """
    workload = measured.conditions.workload
    path = order.baseline or place_of(workload)
    if order.saves_baseline or (order.baseline is None and not path.is_file()):
        return None
    return load_baseline(path, workload=workload)


def _save(order: GateOrder, measured: Measured, judgement: Judgement) -> str | None:
    if not order.saves_baseline:
        return None
    if judgement.verdict is not GateVerdict.PASS:
        return "not saved as the baseline: only a passing run is saved"
    path = order.baseline or place_of(measured.conditions.workload)
    save_baseline(measured, path, may_overwrite=order.may_overwrite)
    return f"saved as the baseline: {path}"


def _check_has_rounds(measured: Measured) -> None:
    rounds = min(num_rounds(side) for side in measured.sides.values())
    if rounds < FEWEST_ROUNDS:
        raise ConfigError(
            f"--save-baseline: this run has {quantity(rounds, 'rounds')}, and a comparison needs "
            f"at least {FEWEST_ROUNDS}: {_more_rounds(measured)}"
        )


def _more_rounds(measured: Measured) -> str:
    workload = measured.conditions.workload
    if measured.simulated is None:
        return f"walkaway run {workload} --rounds 5"
    return f"walkaway simulate {workload} --set 'arms=[{{name=\"build\"}}]' --set run.rounds=5"


def _check_can_be_held_to(measured: Measured) -> None:
    """If no limit names the baseline, later runs are held to the usual figures: each arm must have
    one."""
    for arm, side in measured.sides.items():
        if not figures_to_hold_to(side):
            raise ConfigError(
                f"--save-baseline: arm {arm} has none of {', '.join(AGAINST_BASELINE)} in "
                f"{FEWEST_ROUNDS} rounds or more, and no limit names another figure to compare "
                f"later runs by: write one, such as `{arm} / {BASELINE}: leaked_slots.mean <= 1`"
            )


def _check_apart(order: GateOrder, *, as_json: bool) -> None:
    named = {
        "--junit": order.junit,
        "--markdown": order.markdown,
        "--baseline": order.baseline,
        "--limits": order.limits,
    }
    flags: dict[Path, str] = {}
    for flag, path in named.items():
        if path is None:
            continue
        if (other := flags.setdefault(path.resolve(), flag)) != flag:
            raise ConfigError(f"{path}: is named by {other} and by {flag}: name a file for each")
        if is_stdout(path) and (as_json or flag in ("--baseline", "--limits")):
            why = "--json prints the verdicts there" if as_json else "that is standard output"
            raise ConfigError(f"{flag} {path}: {why}; name a file")
