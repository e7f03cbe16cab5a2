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

from harness.errors import InterruptedRunError, WalkawayError
from harness.records import SCHEMA_VERSION, VoidTrial
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
    """The server under test. `config` is the reference engine's own account of itself;
    `slots_found` its number of batch slots, where it tells otherwise or the harness had to find
    out; `blocks_found` its number of KV cache blocks and `version` its version, where it tells."""

    engine: str
    url: str
    metrics_urls: list[str]
    model: str
    started_by_us: bool
    spec: dict[str, Any]
    config: dict[str, Any] | None = None
    slots_found: int | None = None
    blocks_found: int | None = None
    version: str | None = None


class Clock(msgspec.Struct, kw_only=True):
    """May the server's time stamps be subtracted from the client's?"""

    name: str = "CLOCK_MONOTONIC"
    comparable: bool = False
    round_trip_ns: int | None = None


class Window(msgspec.Struct, kw_only=True):
    """When the load began and ended and when the server had settled; null where it never came.

    `held_until_ns`: until when connections that users left open were held, of each loop.
    """

    load_started_ns: int | None = None
    load_ended_ns: int | None = None
    settled_ns: int | None = None
    held_until_ns: list[int] = []


class IdleReading(msgspec.Struct, kw_only=True):
    """One idle reading of a loop: when, and the values by role."""

    t_ns: int
    values: dict[str, float]


class Idle(msgspec.Struct, kw_only=True):
    """Gauges and counters by role, read while nothing ran: before the load, after it settled, and a
    little later still; with several loops also after each of them but the last."""

    before: dict[str, float] = {}
    after: dict[str, float] = {}
    later: dict[str, float] = {}
    loops: list[IdleReading] = []


class UnsentArrivals(msgspec.Struct, kw_only=True):
    """How long each user whose request was due and never sent had waited when the load ended, in
    seconds: who would have stayed, and who would have left."""

    to_stay_s: list[float] = []
    to_leave_s: list[float] = []


class ScheduledArrivals(msgspec.Struct, kw_only=True):
    """An open loop: how many requests its schedule had (of all loops together), how many of them
    could be open at once, and which were due and not sent."""

    planned: int
    max_streams: int
    unsent: UnsentArrivals = msgspec.field(default_factory=UnsentArrivals)


class LoadProcess(msgspec.Struct, kw_only=True):
    """One process of the load. `ended_ns` is null for one that did not end in good order: it was
    last seen at `last_seen_ns`, with so many requests in flight (`open_streams`), and its
    `requests` are those whose rows it had written. `clock` names the clock of its stamps.
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
    """Does the server still serve, after all? A few short requests, one after the other.

    `healthy`: whether it says so itself (GET /health); null where it has no such page. `errors`:
    what became of those that were not answered, `ttft_s` the waits of those that were. `is_silent`:
    an error was that no answer came, or none to its end, and not a wrong answer.
    """

    sent: int
    healthy: bool | None
    ttft_s: list[float] = []
    errors: list[str] = []
    is_silent: bool = False


class Manifest(msgspec.Struct, kw_only=True):
    """`manifest.json`. Filled in as the run goes and written at its start and at its end.

    `status` says "interrupted" until the run has ended otherwise, so that the folder of a harness
    that was killed does not look complete. `scrape_interval_s` is null when nothing was scraped,
    `arrivals` where users were a closed loop. `absent_workers` connected to the master, and nobody
    brought what they wrote. `command` is what was typed, `repeat` the line that
    does the same again in a new folder; values of headers are in neither.
    `notes` are for information; `warnings` say why figures may be missing or wrong.
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
    clock: Clock = msgspec.field(default_factory=Clock)
    window: Window = msgspec.field(default_factory=Window)
    settle_s: float
    scrape_interval_s: float | None
    prompt_scale: PromptScale = BYTES_ARE_TOKENS
    arrivals: ScheduledArrivals | None = None
    idle: Idle = msgspec.field(default_factory=Idle)
    probing: Probing | None = None
    load_processes: list[LoadProcess] = []
    absent_workers: list[str] = []
    void_trials: list[VoidTrial] = []
    notes: list[str] = []
    warnings: list[str] = []


def status_after(failure: WalkawayError | None) -> Status:
    """How a run ended that ended with this failure, or with none."""
    match failure:
        case None:
            return "complete"
        case InterruptedRunError():
            return "interrupted"
        case _:
            return "target_failed"


def utc_now() -> datetime:
    """Wall time: names the run and appears in its manifest, nothing is measured with it."""
    return datetime.now(UTC)


def find_versions() -> dict[str, str]:
    """Python's version and those of the packages that the figures rest on, where installed."""
    found = {"python": platform.python_version()}
    for package in VERSIONS_OF:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def find_hardware(gpus: list[str]) -> dict[str, Any]:
    """The machine that the harness runs on."""
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
    """Names the clock of this process: all processes of one start of one machine share it."""
    return boot_id() or platform.node()


@cache  # at the end of a load there may be no file handle left to read it with
def boot_id() -> str | None:
    """The kernel's id of this start of the machine, if the system has one."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else None
