"""A process that has a box of time: near its end it is interrupted, at its end it is killed."""

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import NamedTuple, Protocol

import psutil


class BoxEnd(NamedTuple):
    """`was_stopped`: its box was over, and `status` says nothing then."""

    status: int
    seconds: float
    was_stopped: bool = False


class RunInBox(Protocol):
    def __call__(
        self, command: Sequence[str], *, root: Path, said: Path, box_s: float, grace_s: float
    ) -> BoxEnd: ...


def run_in_box(
    command: Sequence[str],
    *,
    root: Path,
    said: Path,
    box_s: float,
    grace_s: float,
    wait: Callable[["subprocess.Popen[bytes]", float], int] = subprocess.Popen.wait,
) -> BoxEnd:
    """Run a command in the folder `root`, with all that it says in the file `said`.

    It gets SIGINT `grace_s` seconds before its box is over. Whatever ends the wait, the command and
    all processes that it started are gone afterwards.
    """
    paths = filter(None, (str(root), os.environ.get("PYTHONPATH")))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    began = monotonic()
    with said.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        return BoxEnd(wait(process, box_s - grace_s), monotonic() - began)
    except subprocess.TimeoutExpired:
        descendants = _descendants(process.pid)
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            wait(process, grace_s)
        _kill(process, descendants)
        return BoxEnd(process.returncode, monotonic() - began, was_stopped=True)
    except BaseException:
        _kill(process, _descendants(process.pid))
        raise


def _descendants(pid: int) -> list[psutil.Process]:
    """An engine has a session of its own, so it is not in its run's process group."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def _kill(process: "subprocess.Popen[bytes]", descendants: Sequence[psutil.Process]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for one in descendants:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()
