"""What there is on this machine, looked at and not judged: `harness.commands.doctor` judges.

torch is asked in a process of its own, as nothing here may load it; so is the clock, because the
question is whether two processes read the same one.
"""

import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Final

import msgspec
import psutil

from harness.collect.clock import ClockReading, judge_clock
from harness.collect.gpu import NoGpu, open_gpu_sampler
from harness.store.manifest import local_clock

ASK_TORCH: Final = (
    "import json, torch; cuda = torch.cuda.is_available(); print(json.dumps(dict("
    "version=torch.__version__, gpus=[torch.cuda.get_device_name(i) "
    "for i in range(torch.cuda.device_count())] if cuda else [])))"
)
ASK_CLOCK: Final = (
    "import time; from harness.store.manifest import local_clock; "
    "print(time.perf_counter_ns(), local_clock())"
)
LONGEST_ANSWER_S: Final = 60.0  # a cold disk takes long to load torch
PORT_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
CPU_LIMIT: Final = Path("/sys/fs/cgroup/cpu.max")
ROUND_TRIPS: Final = 200


class TorchFacts(msgspec.Struct, frozen=True, kw_only=True):
    """torch as installed here: its version and the GPUs that it can use, or why it does not load"""

    version: str = ""
    gpus: list[str] = []
    error: str | None = None


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of one machine. `torch` is null where it is not installed; `nvml` says why no GPU
    counters can be read; `ports` is null where the system does not tell; an `error` is null where
    all went well. `handles`: how many files a process may open, and how far it may raise that.
    """

    python: str
    missing_packages: list[str]
    torch: TorchFacts | None
    gpus: list[str]
    nvml: str | None
    handles: tuple[int, int]
    ports: int | None
    clock_resolution_ns: float
    clock_is_shared: bool
    cores: float
    memory_bytes: int
    memory_available_bytes: int
    loopback_round_trip_ns: float | None
    loopback_error: str | None
    results: str
    results_error: str | None
    disk_free_bytes: int


def look_at_machine(results: Path) -> Machine:
    """Look at everything; takes as long as torch takes to load. `results`: where runs would go."""
    sampler = open_gpu_sampler()
    sampler.close()
    memory = psutil.virtual_memory()
    round_trip_ns, loopback_error = _loopback()
    return Machine(
        python=".".join(map(str, sys.version_info[:3])),
        missing_packages=_missing_packages(),
        torch=_torch(),
        gpus=sampler.names,
        nvml=sampler.reason if isinstance(sampler, NoGpu) else None,
        handles=resource.getrlimit(resource.RLIMIT_NOFILE),
        ports=_ports(),
        clock_resolution_ns=1e9 * time.get_clock_info("perf_counter").resolution,
        clock_is_shared=_clock_is_shared(time.perf_counter_ns),
        cores=_cores(),
        memory_bytes=memory.total,
        memory_available_bytes=memory.available,
        loopback_round_trip_ns=round_trip_ns,
        loopback_error=loopback_error,
        results=str(results),
        results_error=_cannot_write(results),
        disk_free_bytes=shutil.disk_usage(_existing(results)).free,
    )


def _missing_packages() -> list[str]:
    """What walkaway needs in any case and is not installed."""
    try:
        needed = [line for line in requires("walkaway") or [] if "extra ==" not in line]
    except PackageNotFoundError:
        return ["walkaway"]
    names = [re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0] for line in needed]
    return [name for name in names if not _is_installed(name)]


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _torch() -> TorchFacts | None:
    if find_spec("torch") is None:
        return None
    try:
        answer = _ask_python(ASK_TORCH)
        return msgspec.convert(json.loads(answer), TorchFacts)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        return TorchFacts(error=said[-1] if said else type(error).__name__)


def _ask_python(script: str) -> str:
    """What a Python of our own prints. Raises OSError, SubprocessError."""
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=LONGEST_ANSWER_S,
    ).stdout


def _clock_is_shared(clock_ns: Callable[[], int]) -> bool:
    """Does another process's reading lie between two of ours?"""
    before_ns = clock_ns()
    try:
        server_ns, boot_id = _ask_python(ASK_CLOCK).split(maxsplit=1)
    except (OSError, subprocess.SubprocessError, ValueError):
        return False
    reading = ClockReading(
        before_ns=before_ns, server_ns=int(server_ns), after_ns=clock_ns(), boot_id=boot_id.strip()
    )
    return judge_clock([reading], local_boot_id=local_clock()).comparable


def _cores() -> float:
    """Those that this process may run on, or fewer where a container is given less of them."""
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    try:
        quota, period = CPU_LIMIT.read_text().split()
        return min(cores, int(quota) / int(period))
    except (OSError, ValueError):  # no such file, or no limit ("max")
        return cores


def _ports() -> int | None:
    try:
        first, last = PORT_RANGE.read_text().split()
    except (OSError, ValueError):
        return None
    return int(last) - int(first) + 1


def _loopback() -> tuple[float | None, str | None]:
    """The median round trip of one byte (ns), or why there is none."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname(), timeout=5) as here,
        ):
            there, _ = listener.accept()
            with there:
                return median(_round_trip_ns(here, there) for _ in range(ROUND_TRIPS)), None
    except OSError as error:
        return None, str(error)


def _round_trip_ns(here: socket.socket, there: socket.socket) -> int:
    sent_ns = time.perf_counter_ns()
    here.sendall(b"?")
    there.sendall(there.recv(1))
    here.recv(1)
    return time.perf_counter_ns() - sent_ns


def _cannot_write(folder: Path) -> str | None:
    """Why a run could not be saved there; the folder itself is not made."""
    try:
        with tempfile.TemporaryFile(dir=_existing(folder)):
            return None
    except OSError as error:
        return str(error)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest above it that there is."""
    return next(path for path in (folder, *folder.resolve().parents) if path.is_dir())
