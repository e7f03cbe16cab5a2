"""One run of a web page, as its child process measures it (`harness.commands.page_run`).

It does a run like `walkaway run`, but with the load of the page's users, in Locust's process.

    in   {"config": {...}, "fields": {...}}   the first line: measure this
         a second line                       the users have stopped, or shall not start
         the end                             the page has ended: the run is interrupted
    out  {"event": "accepted"}               all fields are right; what follows can take a while
         {"event": "refused", "why": ...}    the run is refused; the process ends
         {"event": "plan", "plan": {...}}    users may start, by this plan
         {"event": "live", "live": {...}, "rows": [...], "requests": ...}
         {"event": "phase", "text": ...}
         {"event": "lost", "why": ...}       the server is gone: stop the users
         {"event": "done", "folder": ..., "rows": ..., "report": ..., "why": ...}
"""

import json
import math
import os
import re
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import count
from typing import Any, BinaryIO, Final

import msgspec

from harness.client.shards import ShardReader
from harness.errors import ConfigError, InterruptedRunError, TargetError, WalkawayError
from harness.http_client import check_target_url
from harness.place import LOAD_THIS_HOST
from harness.records import ClientSample, Outcome, ProcessMark, RequestRow, Summary
from harness.run.measurement import Measurement
from harness.run.pipeline import FinishedRun, execute
from harness.run.process import Interruption
from harness.run.progress import Progress, describe_load
from harness.run.run_config import SEED_KEY, ResolvedRun, RunConfig, resolve_run
from harness.store.conform_result import conformance_beside
from harness.store.run_folder import RunFolder
from harness.web.tab import final_rows, live_rows
from harness.workload.form import (
    FIELDS,
    HOST,
    about_fields,
    by_label,
    check_startable,
    form_settings,
)
from harness.workload.plan import LoadPlan
from harness.workload.workload import load_target

TICK_S: Final = 0.5
CHECK_EVERY: Final = 4  # ticks
SHOWN: Final = 2  # lines of an error
_FLAG: Final = re.compile(r"--(target|engine|model)(?: or an arm's `target`| URL\b|\b)")
_HOST: Final = f'"{HOST}"'
_FIELD_OF: Final = {
    "target": _HOST,
    "engine": by_label(FIELDS["walkaway_engine"]),
    "model": by_label(FIELDS["walkaway_model"]),
}
_STDOUT: Final = 1


def tell(event: str, **message: Any) -> None:
    """Write one message to standard output. If the page has ended, the run is still saved, as
    standard input has ended too."""
    line = msgspec.json.encode({"event": event, **message}) + b"\n"
    with suppress(BrokenPipeError):
        while line:
            line = line[os.write(_STDOUT, line) :]


class UserStop(threading.Event):
    """Set when the users have stopped. `interrupt` is called if none has started yet, as there is
    no load to be waited for, and when the page has ended."""

    def __init__(self, stdin: BinaryIO) -> None:
        super().__init__()
        self.interrupt: Callable[[], object] = lambda: None
        self.has_load = False
        self._stdin = stdin
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        has_page = bool(self._stdin.readline())
        self.set()
        while has_page and self.has_load:
            has_page = bool(self._stdin.readline())
        self.interrupt()


class PageLoad:
    """`cut_short`: settings that end a load at the moment when this one was stopped."""

    def __init__(self, stop: UserStop) -> None:
        self.cut_short: list[str] = []
        self._stop = stop

    def prepare(self, folder: RunFolder, *, processes: int, until_over: ExitStack) -> None:
        """The users already wait for their plan."""

    def run(self, plan: LoadPlan, run: Measurement, **_: object) -> None:
        """Run until the users have stopped. Raises TargetError after that if the server is gone,
        and InterruptedRunError if they shall not start."""
        self._stop.has_load = True
        if self._stop.is_set():
            raise InterruptedRunError("interrupted before the load began")
        assert run.server is not None
        assert run.live is not None
        live = run.live
        rows = ShardReader(run.folder.shards, RequestRow)
        samples = ShardReader(run.folder.shards, ClientSample)
        marks = ShardReader(run.folder.shards, ProcessMark)
        tell("plan", plan=plan.model_dump(mode="json"), run=run.folder.name)
        tell("phase", text=f"{describe_load(plan)}, or until Stop")
        lost = None
        for turn in count(1):
            is_over = self._stop.wait(TICK_S) or run.is_interrupted
            for mark in marks.read_new():
                run.watch(f"load {mark.worker}", mark.pid)
            run.follow(rows.read_new())
            live.take_lag(samples.read_new())
            live.tick(time.perf_counter_ns(), run.gauges())
            shown = live.shown() | {"slots": run.server.slots, "step_s": run.step_s()}
            tell("live", rows=live_rows(shown), live=shown, requests=live.outcomes.total())
            if is_over:
                break
            if lost is None and turn % CHECK_EVERY == 0:
                lost = _find_lost(run)
        left = live.outcomes[Outcome.ABANDONED.value]
        self.cut_short = until_stopped(plan, left=left, elapsed_s=live.elapsed_s)
        if lost is not None:
            raise lost


def _find_lost(run: Measurement) -> TargetError | None:
    try:
        run.check_server()
    except TargetError as error:
        tell("lost", why=short(error))
        return error
    return None


class MessageProgress(Progress):
    def phase(self, text: str) -> None:
        tell("phase", text=text)


def record(resolved: ResolvedRun, stop: UserStop) -> FinishedRun:
    load = PageLoad(stop)
    with Interruption() as interruption:

        def interrupt() -> None:
            interruption.requested = True

        stop.interrupt = interrupt
        finished = execute(
            resolved,
            progress=MessageProgress(),
            interruption=interruption,
            load=load,
            repeat=lambda: command_of(
                _stopped(resolved.config, load), seed=resolved.workload.run.seed
            ),
        )
    if finished.summary is None and finished.failure is not None:
        if isinstance(finished.failure, InterruptedRunError):
            shutil.rmtree(finished.folder.path)  # it was stopped before its load: it holds nothing
        raise finished.failure
    summary, folder = finished.summary, finished.folder.path
    rows = []
    if isinstance(summary, Summary):
        rows = final_rows(summary, conformance_beside(folder, summary.engine))
    tell(
        "done",
        folder=str(folder),
        rows=rows,
        report=None if finished.report is None else str(finished.report.resolve()),
        why=None if finished.failure is None else short(finished.failure),
    )
    return finished


def _stopped(config: RunConfig, load: PageLoad) -> RunConfig:
    shorter = replace(config, settings=[*config.settings, *load.cut_short])
    try:
        resolve_run(shorter)
    except ConfigError:
        return config
    return shorter


def command_of(config: RunConfig, *, seed: int) -> str:
    flags = {
        "--target": [] if config.target_url is None else [config.target_url],
        "--engine": [config.engine],
        "--model": [] if config.model is None else [config.model],
        "--metrics-url": config.metrics_urls,
        "--api-key-env": [] if config.api_key_env is None else [config.api_key_env],
        "--header": [f"{name}=***" for name in config.headers],
        "--ca-file": [] if config.ca_file is None else [config.ca_file],
        "--set": _last_of_each_key([*config.settings, f"{SEED_KEY}{seed}"]),
    }
    typed = [text for flag, values in flags.items() for value in values for text in (flag, value)]
    scraping = [] if config.has_scraping else ["--no-scrape"]
    allowed = [LOAD_THIS_HOST] if config.loads_any_host else []
    return shlex.join(["walkaway", "run", config.workload, *scraping, *allowed, *typed])


def until_stopped(plan: LoadPlan, *, left: int, elapsed_s: float) -> list[str]:
    """The setting that ends a load when this one was stopped, in whole seconds; none if it ended
    by itself. `left`: the number of users that had left."""
    enough = plan.stop_after_abandons
    seconds = math.ceil(elapsed_s)
    is_at_its_end = seconds >= plan.run.max_seconds or (enough is not None and left >= enough)
    if plan.schedule is not None or is_at_its_end:
        return []
    return [f"run.max_seconds={seconds}"]


def _last_of_each_key(settings: Iterable[str]) -> Iterable[str]:
    kept: dict[str, str] = {}
    for setting in settings:
        key = setting.partition("=")[0]
        kept.pop(key, None)  # so that it moves to the end
        kept[key] = setting
    return kept.values()


def resolve(command: dict[str, Any]) -> ResolvedRun:
    fields: dict[str, str] = command["fields"]
    config = msgspec.convert(
        command["config"], type=RunConfig, dec_hook=lambda kind, value: kind(value)
    )
    host = fields.get("host", "").strip()
    config = replace(
        config,
        settings=[*config.settings, *form_settings(fields)],
        target_url=check_target_url(host, flag=_HOST) if host else None,
        engine=_named_kind(fields.get("walkaway_engine", "").strip()) or config.engine,
        model=fields.get("walkaway_model", "").strip() or None,
    )
    resolved = resolve_run(config)
    check_startable(resolved.workload)
    return resolved


def _named_kind(name: str) -> str:
    if name:
        try:
            load_target(name)
        except ConfigError as error:
            raise ConfigError(f"{_FIELD_OF['engine']}: {error}") from error
    return name


def record_as_ordered() -> FinishedRun | None:
    """None if the run was refused; the page then knows why."""
    # Not sys.stdin: a reading thread holds its lock, and the process could not end.
    with open(0, "rb", buffering=0, closefd=False) as stdin:
        if not (line := stdin.readline()):
            return None
        try:
            resolved = resolve(json.loads(line))
            tell("accepted")
            return record(resolved, UserStop(stdin))
        except WalkawayError as error:
            tell("refused", why=in_form_words(error))
            return None


def in_form_words(error: WalkawayError) -> str:
    """A refusal names the fields of the form: whoever reads it typed no flag and no key."""
    return _FLAG.sub(lambda flag: _FIELD_OF[flag[1]], about_fields(short(error)))


def short(error: WalkawayError) -> str:
    lines = str(error).splitlines()
    said = [line for line in lines if not line.startswith(" ")][:SHOWN]
    log = [line.strip() for line in lines if line.startswith(" ") and '{"event"' not in line]
    return " ".join([*said, *log[-1:]]).removesuffix(":")
