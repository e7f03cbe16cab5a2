"""The child process that measures what a web page starts: `python -m harness.web.recorder`.

Locust's process is monkey-patched and busy with users; this one is neither. It does what
`walkaway run` does around a load, from finding the server to drawing the report, but the load is
somebody else's: it says which plan the users should follow, and is told when they have stopped.

Each line of its standard input is a JSON command, each of its output a JSON message:

    in   {"order": {...}, "fields": {...}}   measure this; may be said again after a refusal
         {"stop": true}                      the users have stopped; so does the end of the input
    out  {"event": "ready"}                  waiting for an order
         {"event": "refused", "why": ...}    it cannot be; waiting again
         {"event": "plan", "plan": {...}}    users may start, by this plan
         {"event": "live", "live": {...}, "rows": [...], "requests": ...}
                                             what is known so far, for the page and for the tab
         {"event": "phase", "text": ...}     what it is doing
         {"event": "lost", "why": ...}       there is no going on: stop the users
         {"event": "done", "folder": ..., "rows": ..., "report": ..., "why": ...}
"""

import json
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import count
from typing import Any, Final

import msgspec

from harness.errors import ConfigError, TargetError, WalkawayError
from harness.http_client import check_target_url
from harness.load.rows import ShardReader
from harness.records import ClientSample, Outcome, ProcessMark, RequestRow, Summary
from harness.run.measurement import Measurement
from harness.run.pipeline import execute
from harness.run.progress import Interruption, Snapshot, describe_load
from harness.run.run_config import ResolvedOrder, RunOrder, command_of, resolve_order, until_stopped
from harness.store.manifest import TargetFacts
from harness.store.run_folder import RunFolder
from harness.web.live import LiveRun
from harness.web.tab import final_rows, live_rows
from harness.workload.form import check_startable, form_settings, in_words_of_the_form
from harness.workload.plan import LoadPlan

TICK_S: Final = 0.5
CHECK_EVERY: Final = 4  # of these ticks
SHOWN: Final = 2  # of the lines of an error
_STDOUT: Final = 1


def tell(event: str, **message: Any) -> None:
    """One message on standard output. Where nobody listens any more the run is saved all the same:
    the end of standard input has been heard too."""
    line = msgspec.json.encode({"event": event, **message}) + b"\n"
    with suppress(BrokenPipeError):
        while line:
            line = line[os.write(_STDOUT, line) :]


class Commands:
    """The lines of standard input, read by a thread: whoever measures must not wait for them."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        # Not sys.stdin: its lock, held by a thread that reads, would not let the process end.
        with open(0, "rb", buffering=0, closefd=False) as stdin:
            for line in stdin:
                self._lines.put(line)
        self._lines.put(b"")

    def next(self, timeout_s: float | None = None) -> Any:
        """The next command; {"stop": true} at the end of the input, None when none came in time."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            return None
        return json.loads(line) if line else {"stop": True}


class WatchedLoad:
    """The load of somebody else, from the plan to the word that it has stopped.

    `cut_short`: the settings of a load that ends by itself when this one was stopped.
    """

    def __init__(self, commands: Commands) -> None:
        self.cut_short: list[str] = []
        self._commands = commands

    def prepare(self, folder: RunFolder, *, processes: int, until_over: ExitStack) -> None:
        """The users are there already, and wait for their plan."""

    def run(self, plan: LoadPlan, run: Measurement, **_: object) -> None:
        """Show what is known so far, until the users have stopped. Raises TargetError for a server
        that has gone, once they have."""
        started_ns = time.perf_counter_ns()
        rows = ShardReader(run.folder.shards, RequestRow)
        samples = ShardReader(run.folder.shards, ClientSample)
        marks = ShardReader(run.folder.shards, ProcessMark)
        live = LiveRun(has_log=run.manifest.clock.comparable, started_ns=started_ns)
        slots = _slots(run.manifest.target)
        tell("plan", plan=plan.model_dump(mode="json"), run=run.folder.name)
        tell("phase", text=_described(plan))
        num_events = 0
        lost: TargetError | None = None
        for turn in count(1):
            is_over = self._commands.next(TICK_S) is not None or run.is_interrupted
            for mark in marks.read_new():
                run.watch(f"load {mark.worker}", mark.pid)
            new, num_events = run.events_since(num_events)
            live.take_rows(rows.read_new())
            live.take_events(new)
            live.take_lag(samples.read_new())
            now_ns = time.perf_counter_ns()
            live.tick(now_ns, run.gauges())
            shown = live.shown()
            elapsed_s = (now_ns - started_ns) / 1e9
            of_server = {"slots": slots, "step_s": run.step_s()}
            tell(
                "live",
                rows=live_rows(shown),
                live=shown | of_server | {"elapsed_s": elapsed_s},
                requests=live.outcomes.total(),
            )
            if is_over:
                left = live.outcomes[Outcome.ABANDONED.value]
                self.cut_short = until_stopped(plan, left=left, elapsed_s=elapsed_s)
                break
            if lost is None and turn % CHECK_EVERY == 0:
                lost = _look(run.check_server)
        if lost is not None:
            raise lost


def _slots(target: TargetFacts | None) -> int | None:
    """How many batch slots the server has; None where it is not known."""
    if target is None:
        return None
    told: int | None = (target.config or {}).get("max_num_seqs")
    return told or target.slots_found


def _described(plan: LoadPlan) -> str:
    return f"{describe_load(plan)}, or until Stop"


def _look(check_server: Callable[[], None]) -> TargetError | None:
    try:
        check_server()
    except TargetError as error:
        tell("lost", why=short(error))
        return error
    return None


class ToldProgress:
    """Says in messages what the run is doing."""

    def phase(self, text: str) -> None:
        tell("phase", text=text)

    def update(self, snapshot: Snapshot) -> None:  # noqa: ARG002
        return

    def close(self) -> None:
        return


def record(resolved: ResolvedOrder, commands: Commands) -> None:
    """One run, from its folder to its report. Raises WalkawayError where no load began."""
    load = WatchedLoad(commands)
    with Interruption() as interruption:
        finished = execute(
            resolved,
            progress=ToldProgress(),
            interruption=interruption,
            load=load,
            repeat=lambda: command_of(
                _stopped(resolved.order, load), seed=resolved.workload.run.seed
            ),
        )
    why = None if finished.failure is None else short(finished.failure)
    if finished.summary is None and finished.failure is not None:
        raise finished.failure
    tell(
        "done",
        folder=str(finished.folder.path),
        rows=final_rows(finished.summary) if isinstance(finished.summary, Summary) else [],
        report=None if finished.report is None else str(finished.report.resolve()),
        why=why,
    )


def _stopped(order: RunOrder, load: WatchedLoad) -> RunOrder:
    """The order of a run that is as long as this one, unless its users would leave too late."""
    shorter = replace(order, settings=[*order.settings, *load.cut_short])
    try:
        resolve_order(shorter)
    except ConfigError:
        return order
    return shorter


def resolve(command: dict[str, Any]) -> ResolvedOrder:
    """The order of a command, with the fields of the form in it. Raises ConfigError."""
    fields: dict[str, str] = command["fields"]
    order = msgspec.convert(command["order"], type=RunOrder, dec_hook=_as_path)
    host = fields.get("host", "").strip()
    order = replace(
        order,
        settings=[*order.settings, *form_settings(fields)],
        target_url=check_target_url(host, flag="Host") if host else None,
        engine=fields.get("walkaway_engine", "").strip() or order.engine,
        model=fields.get("walkaway_model", "").strip() or None,
    )
    try:
        resolved = resolve_order(order)
    except ConfigError as error:
        raise ConfigError(in_words_of_the_form(str(error), fields)) from error
    check_startable(resolved.workload)
    return resolved


def _as_path(kind: type, value: Any) -> Any:
    return kind(value)


def main() -> None:
    """Wait for an order that can be, and do it."""
    commands = Commands()
    tell("ready")
    while not (command := commands.next()).get("stop"):
        try:
            record(resolve(command), commands)
        except WalkawayError as error:
            tell("refused", why=short(error))
        else:
            return


def short(error: WalkawayError) -> str:
    """An error on one line: its first lines, and of a log below them, which is indented and lies in
    the run's folder, the last, unless that is only what a process said when it was ready."""
    lines = str(error).splitlines()
    said = [line for line in lines if not line.startswith(" ")][:SHOWN]
    log = [line.strip() for line in lines if line.startswith(" ") and '{"event"' not in line]
    return " ".join([*said, *log[-1:]]).removesuffix(":")


if __name__ == "__main__":
    main()
