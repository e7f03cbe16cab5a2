"""`manifest.json`: everything needed to read a run's rows, and to run it again."""

import os
import platform
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil

from harness.errors import InterruptedRunError, PlanError, WalkawayError
from harness.records import SCHEMA_VERSION, ProcessKind, Simulated
from harness.workload.prompts import BYTES_ARE_TOKENS, PromptScale

Status = Literal["complete", "interrupted", "target_failed"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
VERSIONS_OF = (
    "walkaway",
    "locust",
    "gevent",
    "httpx",
    "httptools",
    "msgspec",
    "prometheus-client",
    "pandas",
    "numpy",
    "pyarrow",
    "torch",
)


class TargetFacts(msgspec.Struct, kw_only=True):
    """The server under test. `address`: of the host in `url`, the one that everything went to; null
    for a server that the run started. `config` is the reference engine's `/walkaway/config`.

    `slots_found`: the number of batch slots, from another page or by trying; `blocks_found`: the
    number of KV cache blocks.
    """

    engine: str
    url: str
    address: str | None = None
    metrics_urls: list[str]
    model: str
    started_by_us: bool
    spec: dict[str, Any]
    config: dict[str, Any] | None = None
    slots_found: int | None = None
    blocks_found: int | None = None
    version: str | None = None


class ClockCheck(msgspec.Struct, kw_only=True):
    """May the server's time stamps be subtracted from the client's?"""

    name: str = "CLOCK_MONOTONIC"
    comparable: bool = False
    round_trip_ns: int | None = None


class Kill(msgspec.Struct, kw_only=True):
    """The harness killed a process of the server at `t_ns`; at `back_ns` it served again. `name`:
    as in the server's logs."""

    t_ns: int
    kind: ProcessKind
    index: int
    name: str
    pid: int
    back_ns: int | None = None


class Window(msgspec.Struct, kw_only=True):
    """The times of the load's begin and end and of the settled server; null if not reached.

    `held_until_ns`: for each loop, when connections that users left open were closed.
    """

    load_started_ns: int | None = None
    load_ended_ns: int | None = None
    settled_ns: int | None = None
    held_until_ns: list[int] = []


class IdleReading(msgspec.Struct, kw_only=True):
    """One idle reading of a loop, by role."""

    t_ns: int
    values: dict[str, float]


class Idle(msgspec.Struct, kw_only=True):
    """Gauges and counters by role of the idle server: before the load, after the settle time, and a
    little later; `loops` after each of several loops."""

    before: dict[str, float] = {}
    after: dict[str, float] = {}
    later: dict[str, float] = {}
    loops: list[IdleReading] = []


class MissedArrivals(msgspec.Struct, kw_only=True):
    """The waits of unsent requests at the end of the load, in seconds: of users that would have
    stayed, and of users that would have left."""

    to_stay_s: list[float] = []
    to_leave_s: list[float] = []


class ScheduledArrivals(msgspec.Struct, kw_only=True):
    """An open loop: the planned requests (of all loops), the most streams at once, and the requests
    that were due but not sent."""

    planned: int
    max_streams: int
    missed: MissedArrivals = msgspec.field(name="unsent", default_factory=MissedArrivals)


class LoadProcessRecord(msgspec.Struct, kw_only=True):
    """One process of the load. `clock` names the clock of its stamps.

    `ended_ns` is null for a process that died: it was last seen at `last_seen_ns` with
    `open_streams` in flight, and had written `requests` rows.
    """

    worker: int
    host: str
    pid: int
    clock: str
    began_ns: int
    ended_ns: int | None
    last_seen_ns: int
    requests: int
    open_streams: int


class Probing(msgspec.Struct, kw_only=True):
    """Does the server still serve after the run? A few short requests, one after the other.

    `healthy`: the answer of GET /health; null without such a page. `ttft_s`: of answered requests;
    `errors`: of the others. `is_silent`: an error was a missing or incomplete answer, not a wrong
    one.
    """

    sent: int
    healthy: bool | None
    ttft_s: list[float] = []
    errors: list[str] = []
    is_silent: bool = False


class Simulation(Simulated, frozen=True, kw_only=True):
    """`machine`: the whole of the machine's file. `keep`: "thin" rows have no lists of tokens.
    `reached_s`: how far virtual time came."""

    machine: dict[str, Any]
    router: str
    keep: Literal["rows", "thin"]
    reached_s: float = 0.0


class Manifest(msgspec.Struct, kw_only=True):
    """`manifest.json`, filled in during the run and written at its start and at its end.

    `status` is "interrupted" until the run has ended otherwise, so that the folder of a killed
    harness does not look complete. `scrape_interval_s` is null without scraping, `arrivals` in a
    closed loop. `absent_workers` connected to the master, but their rows are missing. `command` is
    the command as typed, `repeat` the line that repeats the run in a new folder; both without
    values of headers. `notes` are for information; `warnings` say why figures may be missing or
    wrong.
    """

    schema_version: int = SCHEMA_VERSION
    run_id: str
    status: Status = "interrupted"
    created_at: str
    command: list[str]
    repeat: str = ""
    seed: int
    versions: dict[str, str]
    hardware: dict[str, Any]
    workload: dict[str, Any]
    target: TargetFacts | None = None
    clock: ClockCheck = msgspec.field(default_factory=ClockCheck)
    window: Window = msgspec.field(default_factory=Window)
    settle_s: float
    scrape_interval_s: float | None
    prompt_scale: PromptScale = BYTES_ARE_TOKENS
    arrivals: ScheduledArrivals | None = None
    idle: Idle = msgspec.field(default_factory=Idle)
    probing: Probing | None = None
    load_processes: list[LoadProcessRecord] = []
    absent_workers: list[str] = []
    kills: list[Kill] = []
    simulated: Simulation | None = None
    notes: list[str] = []
    warnings: list[str] = []


def status_after(failure: WalkawayError | None) -> Status:
    match failure:
        case None | PlanError():
            return "complete"
        case InterruptedRunError():
            return "interrupted"
        case _:
            return "target_failed"


def utc_now() -> datetime:
    """Wall time, for the run's name and manifest; no figure uses it."""
    return datetime.now(UTC)


def find_versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in VERSIONS_OF:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def find_hardware(gpus: list[str]) -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "platform": platform.platform(),
        "gpus": gpus,
    }


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def local_clock() -> str:
    """Names the monotonic clock, which all processes of one boot share."""
    return boot_id() or platform.node()


@cache  # at the end of a load there may be no file handle left
def boot_id() -> str | None:
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else None
