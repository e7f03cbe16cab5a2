"""`walkaway run` and `demo` on a terminal: do the run, show its result, raise how it ended."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from harness.errors import ConfigError, InterruptedRunError, UndecidedError
from harness.records import ArmsSummary, Summary
from harness.run.pipeline import FinishedRun, execute
from harness.run.process import Interruption
from harness.run.progress import Progress, ProgressConsole, choose_progress
from harness.run.run_config import ResolvedRun, RunConfig, resolve_run
from harness.store.output import check_output, is_stdout
from harness.store.run_folder import RunFolder
from harness.text.ci import JUNIT_MARK
from harness.text.headlines import StopVerdict, stop_verdict
from harness.workload.values import LONGEST_S
from harness.workload.workload import Workload, load_workload

ABOVE = "the line `invalid` above says why"


@dataclass(frozen=True, slots=True, kw_only=True)
class GateReports:
    """Where the verdicts of `run --gate` go besides the terminal."""

    junit: Path | None = None
    markdown: Path | None = None

    @classmethod
    def asked(cls, *, gates: bool, junit: Path | None, markdown: Path | None) -> Self | None:
        """None without --gate. Raises ConfigError for a flag that needs it, and for a place where
        nothing can be written."""
        if not gates:
            if (flag := "--junit" if junit else "--markdown" if markdown else None) is not None:
                raise ConfigError(f"{flag} needs --gate: it reports the verdicts of the gate")
            return None
        if is_stdout(junit) or is_stdout(markdown):
            raise ConfigError("--junit, --markdown: the run's own result is printed; name a file")
        if junit is not None and junit == markdown:
            raise ConfigError(
                f"{junit}: is named by --junit and by --markdown: name a file for each"
            )
        from harness.gate.reports import MARKDOWN_MARK

        check_output(junit, ours=JUNIT_MARK)
        check_output(markdown, ours=MARKDOWN_MARK)
        return cls(junit=junit, markdown=markdown)

    def check_can_judge(self, workload: Workload) -> None:
        """Raises ConfigError before the run if nothing could judge it, or there is nothing to
        report."""
        reports = self.junit or self.markdown
        if not _has_limits(workload) and (workload.arms or reports):
            raise ConfigError(
                f"--gate: workload {workload.name} has no limits, and no baseline is saved for it: "
                "write limits into its section [gate], or take gate or gate_black_box"
            )

    def judge(self, workload: Workload, folder: RunFolder, *, quiet: bool) -> int:
        """The exit code. A run without limits is judged by whether the server stops."""
        verdict = _whether_it_stops(folder)
        if not _has_limits(workload):
            return _CODES[None if verdict is None else verdict.stops]
        from harness.commands.gate import GateOrder, gate_and_show

        order = GateOrder(run=folder.path, junit=self.junit, markdown=self.markdown)
        return gate_and_show(order, as_json=False, quiet=quiet)


def run_and_show(
    config: RunConfig,
    *,
    as_json: bool,
    quiet: bool,
    shows_all: bool,
    gate: GateReports | None = None,
) -> None:
    progress = choose_progress(ProgressConsole(), is_quiet=quiet)
    resolved = resolve_run(config)
    if gate is not None:
        gate.check_can_judge(resolved.workload)
    with Interruption() as interruption:
        finished = _run(resolved, progress, interruption)
    try:
        show_finished(
            finished, is_interrupted=interruption.requested, as_json=as_json, shows_all=shows_all
        )
    except UndecidedError:
        if gate is None or not _has_limits(resolved.workload):
            raise
    if gate is not None:
        code = gate.judge(resolved.workload, finished.folder, quiet=quiet or as_json)
        raise typer.Exit(code)


def show_finished(
    finished: FinishedRun, *, is_interrupted: bool, as_json: bool, shows_all: bool
) -> None:
    """Raises how the run ended, if not well."""
    if finished.summary is not None:
        _show(finished.summary, finished.report, as_json=as_json, shows_all=shows_all)
        if not as_json and finished.failure is None and not _why_invalid(finished.summary):
            _say_whether_it_stops(finished.folder)
    if finished.failure is not None:
        kept = f"what was collected is in {finished.folder.path}"
        why = _not_said_yet(finished, as_json=as_json)
        raise type(finished.failure)(f"{why}\n{kept}") from finished.failure
    if finished.report is None:
        log = finished.folder.log("report")
        raise RuntimeError(f"the report could not be drawn, see {log}")
    if is_interrupted:
        raise InterruptedRunError(f"interrupted, but the run in {finished.folder.path} is whole")
    if why := _why_invalid(finished.summary):
        why = why if as_json else ABOVE
        raise UndecidedError(f"the run is invalid, and no gate passes it: {why}")


def _not_said_yet(finished: FinishedRun, *, as_json: bool) -> str:
    """The failure; if it stands among the summary's reasons already, that it does."""
    why, summary = str(finished.failure), finished.summary
    said = [] if as_json or summary is None else [one.text for one in summary.validity]
    is_said = any(text.startswith(why) for text in said)
    return f"this run shows nothing: {ABOVE}" if is_said else why


def _why_invalid(summary: Summary | ArmsSummary | None) -> str:
    said = [] if summary is None else summary.validity
    return "; ".join(one.text for one in said if one.level == "invalid")


def _run(resolved: ResolvedRun, progress: Progress, interruption: Interruption) -> FinishedRun:
    if not resolved.arm_runs:
        return execute(resolved, progress=progress, interruption=interruption)
    from harness.run.rounds import execute_rounds  # analysis takes a second to import

    return execute_rounds(resolved, progress=progress, interruption=interruption)


def _show(
    summary: Summary | ArmsSummary, report: Path | None, *, as_json: bool, shows_all: bool
) -> None:
    if as_json:
        print(json.dumps(msgspec.to_builtins(summary), indent=2))  # noqa: T201
        return
    from harness.commands.run_table import print_arms, print_summary

    console = Console()
    if isinstance(summary, ArmsSummary):
        print_arms(console, summary, shows_all=shows_all)
    else:
        print_summary(console, summary, shows_all=shows_all)
    if report is not None:
        console.print(f"report: {report}", soft_wrap=True, markup=False, highlight=False)


def rounds_settings(workload: str, settings: list[str], rounds: int | None) -> list[str]:
    """A workload without arms gets one, since only arms have rounds."""
    if rounds is None:
        return []
    arms = [] if load_workload(workload, settings).arms else ['arms=[{name="build"}]']
    return [*arms, f"run.rounds={rounds}"]


_STYLES = {True: "green", False: "bold red", None: "yellow"}
_CODES = {True: 0, False: 3, None: 4}


def _has_limits(workload: Workload) -> bool:
    from harness.gate.baseline import place_of

    return bool(workload.gate.limits) or place_of(workload.name).is_file()


def _whether_it_stops(folder: RunFolder) -> StopVerdict | None:
    """None if nobody left, or for a run of several arms."""
    summary = folder.read_summary()
    if not isinstance(summary, Summary) or not summary.outcomes.get("abandoned"):
        return None
    return stop_verdict(summary.metrics, is_silent=_is_silent(folder))


def _is_silent(folder: RunFolder) -> bool:
    """Whether the server answered nobody any more after the load."""
    return bool((folder.read_manifest().get("probing") or {}).get("is_silent"))


def _say_whether_it_stops(folder: RunFolder) -> None:
    if (verdict := _whether_it_stops(folder)) is None:
        return
    text = f"{verdict.text[0].upper()}{verdict.text[1:]}"
    url = (folder.read_manifest().get("target") or {}).get("url")
    more = f"; `walkaway conform --target {url}` does" if verdict.stops is None and url else ""
    console = Console()
    console.print(Text(f"{text}{more}.", style=_STYLES[verdict.stops]), soft_wrap=True)


_RATE = "--request-cancellation-rate"
_DELAY = "--request-cancellation-delay"
_SET_BY_FLAGS = ("stay_share", "mix", "abandon_after_tokens")


def cancellation_settings(workload: str, *, rate: float | None, delay_s: float | None) -> list[str]:
    if rate is None:
        if delay_s is not None:
            raise ConfigError(f"{_DELAY} needs {_RATE}, the percentage of the requests")
        return []
    if not 0 <= rate <= 100:
        raise ConfigError(f"{_RATE} {rate:g}: must be a percentage from 0 to 100")
    _check_free_to_choose(load_workload(workload))
    delay_s = 0.0 if delay_s is None else delay_s
    if not 0 <= delay_s <= LONGEST_S:
        raise ConfigError(f"{_DELAY} {delay_s:g}: must be seconds from 0 to {LONGEST_S}")
    return [
        f"load.stay_share={1 - rate / 100!r}",
        f'load.mix=[{{plan="time", seconds={delay_s!r}, since="sent"}}]',
        "load.abandon_after_tokens=[]",
    ]


def _check_free_to_choose(workload: Workload) -> None:
    if workload.load.kind != "abandon":
        raise ConfigError(
            f"{_RATE}: workload {workload.name} has a fixed plan of which users leave, and when"
        )
    for arm in workload.arms:
        if own := [key for key in _SET_BY_FLAGS if key in arm.load]:
            raise ConfigError(
                f"{_RATE}: arm `{arm.name}` of workload {workload.name} plans itself which users "
                f"leave (`load.{own[0]}`): choose a workload whose arms do not"
            )
