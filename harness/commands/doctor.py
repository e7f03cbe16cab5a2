"""What this machine can do, what it cannot, and how to mend that: `walkaway doctor`.

Pure: one finding for each fact of `machine`. Only what `walkaway demo` cannot do
without is `missing`; with the rest lacking it measures less, or less finely, and says so.
"""

import json
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Final

import msgspec

from harness.commands.machine import Machine, look_at_machine
from harness.errors import ConfigError
from harness.formatting import number, quantity
from harness.run.pipeline import RESULTS
from harness.run.server import INSTALL_TORCH

FEW_HANDLES: Final = 4096
FEW_PORTS: Final = 10_000
PORT_RESTS_S: Final = 60  # of a port whose connection was closed here: TIME_WAIT of Linux
COARSE_CLOCK_NS: Final = 1000  # the stages of a cancel take some ten microseconds
FEW_CORES: Final = 2  # one for the engine, one for those who measure it
LITTLE_MEMORY: Final = 2 * 2**30
LITTLE_DISK: Final = 2**30


class State(StrEnum):
    """How it stands with one thing."""

    GOOD = "good"
    LIMITED = "limited"  # runs, but measures less or less finely
    MISSING = "missing"  # without it `walkaway demo` does not run


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at; `mend` says what to do about it, where something can be."""

    name: str
    state: State
    text: str
    mend: str | None = None


def examine(machine: Machine) -> list[Finding]:
    """A finding for each thing, in the order in which one would mend them."""
    return [
        _packages(machine),
        _loopback(machine),
        _results(machine),
        _torch(machine),
        _gpu(machine),
        _gpu_counters(machine),
        _clock(machine),
        _cores(machine),
        _memory(machine),
        _handles(machine),
        _ports(machine),
    ]


def missing(findings: Sequence[Finding]) -> list[Finding]:
    """Those without which the demo does not run."""
    return [one for one in findings if one.state is State.MISSING]


def _packages(machine: Machine) -> Finding:
    if not machine.missing_packages:
        return _good("python", f"{machine.python}, with all that walkaway needs")
    names = ", ".join(machine.missing_packages)
    return Finding(
        name="python",
        state=State.MISSING,
        text=f"{machine.python}, in which is not installed: {names}",
        mend="install walkaway again: pip install walkaway (from its sources: pip install -e .)",
    )


def _loopback(machine: Machine) -> Finding:
    if machine.loopback_round_trip_ns is not None:
        trip = quantity(machine.loopback_round_trip_ns / 1e9, "s")
        return _good("loopback", f"127.0.0.1 answers, a byte there and back in {trip}")
    return Finding(
        name="loopback",
        state=State.MISSING,
        text=f"no connection over 127.0.0.1: {machine.loopback_error}",
        mend="let this process listen and connect there (ip link set lo up; a sandbox may forbid)",
    )


def _results(machine: Machine) -> Finding:
    free = quantity(machine.disk_free_bytes, "bytes")
    if machine.results_error is not None:
        return Finding(
            name="results",
            state=State.MISSING,
            text=f"{machine.results} cannot be written: {machine.results_error}",
            mend="change to a folder that you may write to, or name one with --out",
        )
    text = f"{machine.results} can be written, {free} free"
    if machine.disk_free_bytes < LITTLE_DISK:
        return _limited("results", text, "make room: a long run takes a GiB and more")
    return _good("results", text)


def _torch(machine: Machine) -> Finding:
    torch = machine.torch
    if torch is None:
        text = "not installed: the engine simulates its model's time"
        return _limited("torch", text, INSTALL_TORCH)
    if torch.error is not None:
        return Finding(
            name="torch",
            state=State.MISSING,
            text=f"installed, but it does not load: {torch.error}",
            mend=INSTALL_TORCH,
        )
    return _good("torch", torch.version)


def _gpu(machine: Machine) -> Finding:
    usable = machine.torch.gpus if machine.torch is not None else []
    if usable:
        return _good("gpu", ", ".join(usable))
    if machine.gpus:
        names = ", ".join(machine.gpus)
        text = f"{names}, but torch cannot use it: the engine computes on the CPU"
        return _limited("gpu", text, "install torch's CUDA build: pip install torch")
    return _limited("gpu", "none that torch can use: the engine computes on the CPU", None)


def _gpu_counters(machine: Machine) -> Finding:
    if machine.nvml is None:
        return _good("gpu counters", f"NVML reads {len(machine.gpus)}")
    has_gpu = machine.torch is not None and bool(machine.torch.gpus)
    return _limited(
        "gpu counters",
        machine.nvml.removeprefix("no GPU counters: "),
        "load and power of the GPU stay unknown; see nvidia-smi" if has_gpu else None,
    )


def _clock(machine: Machine) -> Finding:
    resolution = f"{number(machine.clock_resolution_ns)} ns"
    if not machine.clock_is_shared:
        return _limited(
            "clock",
            f"resolution {resolution}; two processes here do not read the same clock",
            "stages of a cancel cannot be told apart; run server and harness in one container",
        )
    text = f"resolution {resolution}, the same in all processes"
    if machine.clock_resolution_ns > COARSE_CLOCK_NS:
        return _limited("clock", text, "figures of less than that mean nothing; take another host")
    return _good("clock", text)


def _cores(machine: Machine) -> Finding:
    text = quantity(machine.cores, "cores")
    if machine.cores < FEW_CORES:
        mend = f"engine and load take turns: give it {FEW_CORES} cores, or trust figures in steps"
        return _limited("cores", text, mend)
    return _good("cores", text)


def _memory(machine: Machine) -> Finding:
    free, all_ = (
        quantity(n, "bytes") for n in (machine.memory_available_bytes, machine.memory_bytes)
    )
    text = f"{free} of {all_} free"
    if machine.memory_available_bytes < LITTLE_MEMORY:
        mend = "the demo takes about 1 GiB with torch: end something else, or simulate the model"
        return _limited("memory", text, mend)
    return _good("memory", text)


def _handles(machine: Machine) -> Finding:
    soft, hard = machine.handles
    if hard < 0:  # RLIM_INFINITY
        return _good("file handles", "as many as wanted")
    text = f"{hard:,} for a process (now {soft:,}; raised as needed): one for each open stream"
    if hard < FEW_HANDLES:
        return _limited("file handles", text, "ulimit -Hn 65536, or LimitNOFILE= of the service")
    return _good("file handles", text)


def _ports(machine: Machine) -> Finding:
    if machine.ports is None:
        return _limited("ports", "the system does not tell how many there are", None)
    rate = machine.ports // PORT_RESTS_S
    text = f"{machine.ports:,}: about {rate:,} new connections a second to one server"
    if machine.ports < FEW_PORTS:
        mend = "sysctl -w net.ipv4.ip_local_port_range='10000 65535'"
        return _limited("ports", text, mend)
    return _good("ports", text)


def _good(name: str, text: str) -> Finding:
    return Finding(name=name, state=State.GOOD, text=text)


def _limited(name: str, text: str, mend: str | None) -> Finding:
    return Finding(name=name, state=State.LIMITED, text=text, mend=mend)


MARKS: Final = {State.GOOD: "ok", State.LIMITED: "less", State.MISSING: "MISSING"}
WIDEST: Final = 100
INDENT: Final = " " * 23


def show_machine(*, as_json: bool) -> None:
    """Print what this machine can do. Raises ConfigError where the demo cannot run on it."""
    findings = examine(look_at_machine(RESULTS))
    lacking = missing(findings)
    if as_json:
        shown = {"can_run_demo": not lacking, "findings": msgspec.to_builtins(findings)}
        print(json.dumps(shown, indent=2))  # noqa: T201
    else:
        width = min(shutil.get_terminal_size().columns, WIDEST)
        print("\n".join(lines(findings, width=width)))  # noqa: T201
    if lacking:
        names = ", ".join(one.name for one in lacking)
        raise ConfigError(
            f"`walkaway demo` cannot run here for want of: {names}; mend it as said above (exit "
            f"code {ConfigError.exit_code}: what it runs on is not set up for it)"
        )


def lines(findings: Sequence[Finding], *, width: int) -> Iterator[str]:
    """The findings as text, no wider than `width`."""
    for one in findings:
        head = f"{MARKS[one.state]:<9}{one.name:<14}"
        yield from textwrap.wrap(one.text, width, initial_indent=head, subsequent_indent=INDENT)
        if one.mend is not None:
            yield from textwrap.wrap(
                one.mend, width, initial_indent=f"{INDENT}-> ", subsequent_indent=f"{INDENT}   "
            )
    if not missing(findings):
        yield "`walkaway demo` can run here."
