"""`walkaway doctor`: can `walkaway demo` run on this machine, and if not, what is missing?"""

import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec

from harness.commands.app import JsonResult
from harness.errors import ConfigError, in_words

ASK_TORCH: Final = "import torch; print(torch.__version__)"
LONGEST_ANSWER_S: Final = 60.0  # a cold disk takes long to load torch
WIDEST: Final = 100
INDENT: Final = " " * 20


class DoctorFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One requirement of the demo; `mend` says what to do if it is missing."""

    name: str
    text: str
    mend: str | None = None


def doctor(*, as_json: JsonResult = False) -> None:
    """Check whether the demo can run here, and list what is missing.

    The exit code is 2 if something is missing.

    Example: walkaway doctor
    """
    from harness.run.run_state import RESULTS

    findings = [packages(), loopback(), results(RESULTS), torch(), engine()]
    lacking = [one.name for one in findings if one.mend is not None]
    if as_json:
        shown = {"can_run_demo": not lacking, "findings": msgspec.to_builtins(findings)}
        print(json.dumps(shown, indent=2))  # noqa: T201
    else:
        width = min(shutil.get_terminal_size().columns, WIDEST)
        print("\n".join(lines(findings, width=width)))  # noqa: T201
    if lacking:
        raise ConfigError(f"`walkaway demo` cannot run here; missing: {', '.join(lacking)}")


def lines(findings: Sequence[DoctorFinding], *, width: int) -> Iterator[str]:
    for one in findings:
        head = f"{'ok' if one.mend is None else 'MISSING':<9}{one.name:<11}"
        yield from textwrap.wrap(one.text, width, initial_indent=head, subsequent_indent=INDENT)
        if one.mend is not None:
            yield from textwrap.wrap(
                one.mend, width, initial_indent=f"{INDENT}-> ", subsequent_indent=f"{INDENT}   "
            )
    if all(one.mend is None for one in findings):
        yield "`walkaway demo` can run here."


def packages() -> DoctorFinding:
    python = ".".join(map(str, sys.version_info[:3]))
    try:
        needed = [line for line in requires("walkaway") or [] if "extra ==" not in line]
    except PackageNotFoundError:
        needed = ["walkaway"]
    names = [re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0] for line in needed]
    lacking = [name for name in names if not _is_installed(name)]
    if not lacking:
        return DoctorFinding(name="python", text=f"{python}, with all packages of walkaway")
    return DoctorFinding(
        name="python",
        text=f"{python} lacks {', '.join(lacking)}",
        mend="install walkaway again: pip install walkaway (from its sources: pip install -e .)",
    )


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def loopback(host: str = "127.0.0.1") -> DoctorFinding:
    try:
        with (
            socket.create_server((host, 0)) as listener,
            socket.create_connection(listener.getsockname(), timeout=5),
        ):
            return DoctorFinding(name="loopback", text=f"{host} answers")
    except OSError as error:
        return DoctorFinding(
            name="loopback",
            text=f"no connection over {host}: {in_words(error)}",
            mend="let this process listen and connect there (ip link set lo up; a sandbox may "
            "forbid it)",
        )


def results(folder: Path) -> DoctorFinding:
    existing = next(path for path in (folder, *folder.resolve().parents) if path.is_dir())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return DoctorFinding(name="results", text=f"{folder} can be written")
    except OSError as error:
        return DoctorFinding(
            name="results",
            text=f"{folder} cannot be written: {in_words(error)}",
            mend="change to a folder that you may write to, or name one with --out",
        )


def torch(script: str = ASK_TORCH) -> DoctorFinding:
    """Load torch in a process of its own, as the harness never imports it.

    The demo runs without torch, but not with a torch that fails to load.
    """
    from harness.run.server import INSTALL_TORCH

    if find_spec("torch") is None:
        return DoctorFinding(
            name="torch", text=f"not installed: the engine simulates its model; {INSTALL_TORCH}"
        )
    answer, is_good = _asked([sys.executable, "-c", script])
    if not is_good:
        text = f"installed, but it does not load: {answer}"
        return DoctorFinding(name="torch", text=text, mend=INSTALL_TORCH)
    return DoctorFinding(name="torch", text=answer)


def engine(*settings: str) -> DoctorFinding:
    """Which device and model the demo's engine would take, as the engine itself says."""
    from harness.run.server import choose_runner, engine_command
    from harness.workload.workload import load_workload

    wanted = load_workload("demo", settings).engine
    command = engine_command(wanted, choose_runner(wanted), model=None)
    answer, is_good = _asked([*command, "--check"])
    if not is_good:
        return DoctorFinding(
            name="engine", text=answer, mend="change [engine] with --set, or mend what it names"
        )
    if answer.startswith("cuda") and find_spec("pynvml") is None:
        answer += "; to read the GPU's counters: pip install 'walkaway[gpu]'"
    return DoctorFinding(name="engine", text=answer)


def _asked(command: Sequence[str]) -> tuple[str, bool]:
    """What it printed, and that it went well; or the last line of what went wrong."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=LONGEST_ANSWER_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        return (said[-1] if said else str(error)), False
    return done.stdout.strip(), True
