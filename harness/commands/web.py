"""`walkaway run --web`: Locust's page, with its start form filled in from the workload."""

import os
import signal
import subprocess
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

import msgspec

from harness.errors import InterruptedRunError, TargetError
from harness.run.load_process import LOOPBACK, together
from harness.run.process import HANDLED, check_can_listen, python_module
from harness.run.run_config import ResolvedRun, RunConfig, resolve_run
from harness.workload.form import check_startable, prefilled


def serve_page(config: RunConfig, *, port: int) -> int:
    """Returns the page's exit code. Raises InterruptedRunError after Ctrl-C."""
    resolved = resolve_run(config)
    check_startable(resolved.workload)
    check_can_listen(LOOPBACK, port, flag="--web-port")
    with TemporaryDirectory(prefix="walkaway-") as folder:
        file = Path(folder) / "config.json"
        file.touch(mode=0o600)  # its headers may hold a secret
        file.write_bytes(msgspec.json.encode(config, enc_hook=str))
        reading, writing = os.pipe()  # closes whenever this process ends, and Locust then ends
        command = page_command(resolved, file, port=port, exit_with=reading)
        try:
            return PageProcess().run(command, exit_with=reading)
        finally:
            os.close(writing)


class PageProcess:
    """Locust, in a session of its own: it gets no Ctrl-C of the terminal. So a signal comes to this
    process alone, however it was sent; Locust is then asked to end, and saves its run. A second
    signal kills it: the process that measures the run sees that and saves the run all the same."""

    def __init__(self) -> None:
        self._signals: list[int] = []
        self._locust: subprocess.Popen[bytes] | None = None

    def run(self, command: Sequence[str], *, exit_with: int) -> int:
        before = [signal.signal(number, self._handle) for number in HANDLED]
        try:
            with subprocess.Popen(command, pass_fds=[exit_with], start_new_session=True) as locust:
                self._locust = locust
                os.close(exit_with)
                if self._signals:  # one came before there was a process to end
                    locust.terminate()
                code = locust.wait()
        finally:
            for number, handler in zip(HANDLED, before, strict=True):
                signal.signal(number, handler)
        if signal.SIGINT in self._signals:
            raise InterruptedRunError("interrupted: the page has ended")
        if code < 0 and not self._signals:
            raise TargetError(f"the page's process was ended by signal {-code}")
        return max(code, 0)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)
        if self._locust is None:
            return
        if len(self._signals) == 1:
            self._locust.terminate()
        elif self._locust.returncode is None:
            os.killpg(self._locust.pid, signal.SIGKILL)


def page_command(
    resolved: ResolvedRun, config_file: Path, *, port: int, exit_with: int
) -> list[str]:
    """Locust with its page on loopback. Its processes end when the open file `exit_with` closes."""
    config, run = resolved.config, resolved.workload.run
    fields = {
        **prefilled(resolved.workload),
        "walkaway_engine": config.engine,
        "walkaway_model": config.model or "",
    }
    return python_module(
        "locust",
        *("-f", str(files("workloads") / "locustfile.py")),
        *("--web-host", LOOPBACK, "--web-port", str(port), "--walkaway-order", str(config_file)),
        *("--walkaway-exit-with", str(exit_with)),
        *("--loglevel", "WARNING"),  # of Locust: walkaway's own lines are shown
        *("--users", str(run.users), "--spawn-rate", str(run.users)),
        *(() if config.target_url is None else ("--host", config.target_url)),
        *(f"--{name.replace('_', '-')}={text}" for name, text in fields.items()),
        *(together(run.processes) if run.processes > 1 else ()),
    )
