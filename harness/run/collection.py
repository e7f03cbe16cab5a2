"""One run from the shards of load processes, on one machine or many.

The rows come from plain Locust, from workers on other machines, or from a run whose harness was
killed. A killed run's folder also holds the manifest and what was collected from the server: the
new run keeps both.

Each machine has its own monotonic clock. Stamps are aligned by the wall clocks at the start of each
load process: good enough for the order of events and the length of the load. No figure subtracts
stamps of two machines. Without stamps of a server, all figures are client-side: times and probes.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from harness.client.shards import ShardReader
from harness.collect.source import gathered_path, read_gathered
from harness.errors import ConfigError
from harness.records import ProcessMark, WorkerSeen
from harness.run.shards import LoadTally, note_missed_arrivals
from harness.store.manifest import Manifest, TargetFacts, find_hardware, find_versions, utc_now
from harness.store.run_folder import RECORDS, OtherVersionError, RunFolder, RunRows
from harness.workload.plan import LoadPlan, plan_from_mark
from harness.workload.workload import as_plain_data, load_target

_NOT_SAVED = (
    "the run was not saved to its end (its harness was killed, or the disk was full): the figures "
    "rest on what was collected by then, perhaps before the server had settled"
)
_HOLDS_NONE = (
    "holds no shards of a load (process-HOST-PID.ndjson next to requests-...); name the DIR of "
    "--walkaway-rows, or the shards/ of a run that was killed"
)


class _Found(NamedTuple):
    """`marks` in the order of time; `seen`: the workers that a master saw; `plan`: the last load's,
    if it was an open loop."""

    marks: Sequence[ProcessMark]
    tallies: Sequence[LoadTally]
    seen: set[str]
    plan: LoadPlan | None


def collect(shards: Sequence[Path], out: Path, *, command: list[str]) -> RunFolder:
    """Write a run's folder and leave the shards unchanged.

    Raises ConfigError if a folder holds no shards that can be read, or `out` is not empty.
    """
    found = _find(shards)
    killed = _killed_run(shards)
    folder = RunFolder.claim(out)
    manifest = _manifest_of_clients(found.marks[0]) if killed is None else killed
    manifest.run_id, manifest.command = folder.name, command
    _save(folder, found, manifest, {} if killed is None else _of_the_server(shards[0]))
    return folder


def save_killed(folder: RunFolder) -> None:
    """Save the rows of a run that could not do that itself, from the shards in its folder, which
    stay. Raises ConfigError if they hold no request."""
    found = _find([folder.shards])
    manifest = _killed_run([folder.shards]) or _manifest_of_clients(found.marks[0])
    _save(folder, found, manifest, _of_the_server(folder.shards))


def _find(shards: Sequence[Path]) -> _Found:
    marks = {path: ShardReader(path, ProcessMark).read_new() for path in shards}
    seen = {path: _workers_seen(path) for path in shards}
    for path in shards:
        if not marks[path] and not seen[path]:
            raise ConfigError(f"{path}: {_HOLDS_NONE}")
    in_order = sorted(chain.from_iterable(marks.values()), key=lambda mark: mark.at)
    if not in_order:
        raise ConfigError(f"{shards[0]}: {_HOLDS_NONE}")
    tallies = list(_tallies(marks, in_order))
    return _Found(in_order, tallies, set().union(*seen.values()), _open_plan(in_order))


def _open_plan(marks: Sequence[ProcessMark]) -> LoadPlan | None:
    last = max(_began(marks), key=lambda mark: mark.at, default=None)
    if last is None or last.open_plan is None:
        return None
    return plan_from_mark(last.open_plan, source=f"process-{last.host}-{last.pid}.ndjson")


def _began(marks: Sequence[ProcessMark]) -> list[ProcessMark]:
    return [mark for mark in marks if mark.event == "began"]


def _save(
    folder: RunFolder, found: _Found, manifest: Manifest, of_the_server: dict[str, Any]
) -> None:
    folder.write_rows(
        RunRows(
            requests=chain.from_iterable(tally.requests() for tally in found.tallies),
            client=chain.from_iterable(tally.samples() for tally in found.tallies),
            **of_the_server,
        )
    )
    _note_load(manifest, found.tallies)
    _note_absent(manifest, found.marks, found.seen)
    if found.plan is not None:
        _note_schedule(manifest, folder, found.plan, _began(found.marks))
    folder.write_manifest(manifest)


def _workers_seen(shards: Path) -> set[str]:
    return {seen.name for seen in ShardReader(shards, WorkerSeen).read_new()}


def _killed_run(shards: Sequence[Path]) -> Manifest | None:
    run = RunFolder(shards[0].resolve().parent)
    if len(shards) > 1 or shards[0].resolve() != run.shards:
        return None
    try:
        manifest = run.load_manifest()
    except OtherVersionError:
        raise
    except ConfigError:
        return None
    if _NOT_SAVED not in manifest.warnings:
        manifest.warnings.append(_NOT_SAVED)
    return manifest


def _of_the_server(shards: Path) -> dict[str, Any]:
    return {
        kind: read_gathered(path, row_type)
        for kind, row_type in RECORDS.items()
        if (path := gathered_path(shards, kind)).exists()
    }


def _tallies(
    marks: Mapping[Path, Sequence[ProcessMark]], in_order: Sequence[ProcessMark]
) -> Iterator[LoadTally]:
    """One for each host and folder. Hosts may share a name; the clock distinguishes them."""
    first, began = in_order[0], {mark.clock: mark for mark in reversed(in_order)}
    clocks: dict[tuple[Path, str], str] = {}
    for path, of_one in marks.items():
        for mark in of_one:
            if clocks.setdefault((path, mark.host), mark.clock) != mark.clock:
                raise ConfigError(
                    f"{path}: holds rows of {mark.host} stamped by two clocks (two machines of one "
                    "name, or one that was restarted): put the rows of each into its own folder"
                )
    hosts = Counter(host for _, host in clocks)
    for (path, host), clock in sorted(clocks.items()):
        called = host if hosts[host] == 1 else f"{host}, {path}"
        yield LoadTally(path, host=host, called=called, ahead_ns=_ahead_ns(began[clock], first))


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
        notes=["collected from shards: the server was not watched, so all figures are client-side"],
    )


def _note_load(manifest: Manifest, tallies: Sequence[LoadTally]) -> None:
    manifest.load_processes = [process for tally in tallies for process in tally.processes()]
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


def _note_absent(manifest: Manifest, marks: Sequence[ProcessMark], workers: set[str]) -> None:
    """`workers`: the names of those that a master saw."""
    present = {mark.name for mark in marks if mark.name}
    manifest.absent_workers = sorted(workers - present)
    if present - workers:
        manifest.notes.append(
            "the master's list of its workers is not in these folders (run the master with "
            "--walkaway-rows, too, and collect its folder with the others): a worker's rows may "
            "be missing unnoticed"
        )


def _note_schedule(
    manifest: Manifest, folder: RunFolder, plan: LoadPlan, began: Sequence[ProcessMark]
) -> None:
    if manifest.arrivals is None:
        if len({(mark.host, mark.clock, mark.pid) for mark in began}) < len(began):
            return  # a web page ran several loads
        manifest.seed = plan.run.seed
    if (problem := note_missed_arrivals(manifest, folder, plan)) is not None:
        manifest.warnings.append(problem)
