"""One run from the shards of load processes, on one machine or many.

The rows come from plain Locust, from workers on other machines, or from a run whose harness was
killed. A killed run's folder also holds the manifest and what was collected from the server: the
new run keeps both.

Each machine has its own monotonic clock. Stamps are aligned by the wall clocks at the start of each
load process: good enough for the order of events and the length of the load. No figure subtracts
stamps of two machines. Without stamps of a server, all figures are client-side: times and probes.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from harness.collect.source import gathered_path, read_gathered
from harness.errors import ConfigError
from harness.load.rows import ShardReader
from harness.records import ClientSample, ProcessMark, WorkerSeen
from harness.run.load_plan import count_arrivals
from harness.run.shards import LoadTally, Sent, find_unsent
from harness.store.manifest import (
    LoadProcess,
    Manifest,
    ScheduledArrivals,
    TargetFacts,
    find_hardware,
    find_versions,
    utc_now,
)
from harness.store.run_folder import RECORDS, RunFolder, RunRows
from harness.workload.plan import plan_from_mark
from harness.workload.workload import as_plain_data, load_target

OfHost = TypeVar("OfHost", ClientSample, LoadProcess)

_HOLDS_NONE = "holds no shards of a load (process-HOST-PID.ndjson beside requests-...)"
_NOTE = "collected from shards: the server was not watched, so all figures are client-side"


class Source(NamedTuple):
    """The shards of one host in one folder.

    `called`: the host's name in the run, unique even if two hosts share a name. `ahead_ns` is added
    to its stamps.
    """

    folder: Path
    host: str
    called: str
    ahead_ns: int


def collect(shards: Sequence[Path], out: Path, *, command: list[str]) -> RunFolder:
    """Write a run's folder and leave the shards unchanged.

    Raises ConfigError if a folder holds no shards, or `out` is not empty.
    """
    marks = {path: _marks(path) for path in shards}
    in_order = sorted(chain.from_iterable(marks.values()), key=lambda mark: mark.at)
    if not in_order:
        raise ConfigError(f"{shards[0]}: {_HOLDS_NONE}")
    first = in_order[0]
    sources = sorted(set(_sources(marks, in_order)))
    tallies = [LoadTally(one.folder, host=one.host, ahead_ns=one.ahead_ns) for one in sources]
    killed = _killed_run(shards)
    folder = RunFolder.claim(out)
    folder.write_rows(
        RunRows(
            requests=chain.from_iterable(tally.requests() for tally in tallies),
            client=_by_name(sources, (tally.samples() for tally in tallies)),
            **({} if killed is None else _of_the_server(shards[0])),
        )
    )
    manifest = _manifest_of_clients(first) if killed is None else killed
    manifest.run_id, manifest.command = folder.name, command
    processes = _by_name(sources, (tally.processes() for tally in tallies))
    _note_load(manifest, tallies, list(processes))
    _note_absent(manifest, shards, in_order)
    _note_schedule(manifest, folder, in_order)
    folder.write_manifest(manifest)
    return folder


def _killed_run(shards: Sequence[Path]) -> Manifest | None:
    """The manifest of the killed run, if the shards lie in its folder."""
    run = RunFolder(shards[0].resolve().parent)
    if len(shards) > 1 or shards[0].resolve() != run.shards:
        return None
    try:
        manifest = msgspec.convert(run.read_manifest(), Manifest)
    except ConfigError:
        return None
    manifest.warnings.append(
        "the run was not saved to its end (its harness was killed, or the disk was full): the "
        "figures rest on what was collected by then, perhaps before the server had settled"
    )
    return manifest


def _of_the_server(shards: Path) -> dict[str, Any]:
    return {
        kind: read_gathered(path, row_type)
        for kind, row_type in RECORDS.items()
        if (path := gathered_path(shards, kind)).exists()
    }


def _marks(path: Path) -> list[ProcessMark]:
    found = ShardReader(path, ProcessMark).read_new()
    if not found and not _workers_seen([path]):
        raise ConfigError(f"{path}: {_HOLDS_NONE}")
    return found


def _workers_seen(shards: Sequence[Path]) -> set[str]:
    return {seen.name for path in shards for seen in ShardReader(path, WorkerSeen).read_new()}


def _sources(
    marks: dict[Path, list[ProcessMark]], in_order: Sequence[ProcessMark]
) -> Iterator[Source]:
    """One source for each host and folder. Hosts may share a name; the clock distinguishes them."""
    began = {mark.clock: mark for mark in reversed(in_order)}
    hosts = Counter(host for of_one in marks.values() for host in {mark.host for mark in of_one})
    for path, of_one in marks.items():
        clocks = {mark.host: mark.clock for mark in of_one}
        for mark in of_one:
            if mark.clock != clocks[mark.host]:
                raise ConfigError(
                    f"{path}: holds rows of {mark.host} stamped by two clocks (two machines of one "
                    "name, or one that was restarted): put the rows of each into its own folder"
                )
            called = mark.host if hosts[mark.host] == 1 else f"{mark.host}, {path}"
            yield Source(path, mark.host, called, _ahead_ns(began[mark.clock], in_order[0]))


def _by_name(sources: Sequence[Source], found: Iterable[Iterable[OfHost]]) -> Iterator[OfHost]:
    for source, rows in zip(sources, found, strict=True):
        for row in rows:
            row.host = source.called
            yield row


def _ahead_ns(mark: ProcessMark, first: ProcessMark) -> int:
    if mark.clock == first.clock:
        return 0
    later_s = (datetime.fromisoformat(mark.at) - datetime.fromisoformat(first.at)).total_seconds()
    return first.t_ns + round(later_s * 1e9) - mark.t_ns


def _manifest_of_clients(first: ProcessMark) -> Manifest:
    return Manifest(
        run_id="",
        status="complete",
        created_at=utc_now().isoformat(timespec="seconds"),
        command=[],
        seed=0,
        versions=find_versions(),
        hardware=find_hardware([]),
        workload={"name": "collected"},
        target=TargetFacts(
            engine="openai",
            url=first.url,
            metrics_urls=[],
            model=first.model,
            started_by_us=False,
            spec=as_plain_data(load_target("openai")),
        ),
        settle_s=0.0,
        scrape_interval_s=None,
        notes=[_NOTE],
    )


def _note_load(
    manifest: Manifest, tallies: Sequence[LoadTally], processes: list[LoadProcess]
) -> None:
    """Note the load's window and processes. Raises ConfigError if no request was made."""
    manifest.load_processes = processes
    started = [tally.first_sent_ns for tally in tallies if tally.first_sent_ns is not None]
    ended = [tally.last_ended_ns for tally in tallies if tally.last_ended_ns is not None]
    if not started:
        raise ConfigError("these shards hold no request: there is nothing to report")
    manifest.window.load_started_ns, manifest.window.load_ended_ns = min(started), max(ended)
    if manifest.status == "complete":
        manifest.window.settled_ns = max(ended)
    if damaged := sum(tally.damaged for tally in tallies):
        manifest.warnings.append(f"{damaged} rows of the load were damaged and are left out")
    if len({process.clock for process in manifest.load_processes}) > 1:
        manifest.notes.append(
            "several machines: stamps were aligned by wall clocks; no figure subtracts stamps of "
            "two machines"
        )


def _note_absent(manifest: Manifest, shards: Sequence[Path], marks: Sequence[ProcessMark]) -> None:
    """Note workers that the master saw but whose rows are missing."""
    present, seen = {mark.name for mark in marks if mark.name}, _workers_seen(shards)
    manifest.absent_workers = sorted(seen - present)
    if present - seen:
        manifest.notes.append(
            "the master's list of its workers is not in these folders (run the master with "
            "--walkaway-rows, too, and collect its folder with the others): a worker's rows may "
            "be missing unnoticed"
        )


def _note_schedule(manifest: Manifest, folder: RunFolder, marks: Sequence[ProcessMark]) -> None:
    """Note how many requests an open loop planned, and which were never sent."""
    began = [mark for mark in marks if mark.event == "began"]
    last = max(began, key=lambda mark: mark.at, default=None)
    if last is None or last.open_plan is None:
        return
    plan = plan_from_mark(last.open_plan)
    try:
        if manifest.arrivals is None:
            if len({(mark.host, mark.clock, mark.pid) for mark in began}) < len(began):
                return  # a web page ran several loads
            manifest.seed = plan.run.seed
            assert plan.schedule is not None
            manifest.arrivals = ScheduledArrivals(
                planned=count_arrivals(plan), max_streams=plan.schedule.max_streams
            )
        sent = [Sent(*row) for row in folder.read_sent()]
        if len(sent) < manifest.arrivals.planned:
            manifest.arrivals.unsent = find_unsent(plan, manifest, sent)
    except ConfigError as error:
        manifest.warnings.append(f"unsent requests are in no figure: {error}")
