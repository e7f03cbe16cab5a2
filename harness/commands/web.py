"""`walkaway run --web`: Locust's page, with its start form filled in from the workload."""

import os
import signal
import subprocess
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec

from harness.errors import ConfigError
from harness.run.load_process import LOOPBACK, together
from harness.run.process import python_module
from harness.run.run_config import ResolvedRun, RunConfig, resolve_run
from harness.workload.form import check_startable, prefilled

HIGHEST_PORT: Final = 65_535


def serve_page(config: RunConfig, *, port: int) -> int:
    if port > HIGHEST_PORT:
        raise ConfigError(f"--web-port {port}: must be from 1 to {HIGHEST_PORT}")
    resolved = resolve_run(config)
    check_startable(resolved.workload)
    with TemporaryDirectory(prefix="walkaway-") as folder:
        file = Path(folder) / "config.json"
        file.touch(mode=0o600)  # its headers may hold a secret
        file.write_bytes(msgspec.json.encode(config, enc_hook=str))
        reading, writing = os.pipe()  # closes whenever this process ends, and Locust then ends
        command = page_command(resolved, file, port=port, exit_with=reading)
        try:
            return _until_it_ends(command, reading)
        finally:
            os.close(writing)


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
        *("--users", str(run.users), "--spawn-rate", str(run.users)),
        *(() if config.target_url is None else ("--host", config.target_url)),
        *(f"--{name.replace('_', '-')}={text}" for name, text in fields.items()),
        *(together(run.processes) if run.processes > 1 else ()),
    )


def _until_it_ends(command: list[str], reading: int) -> int:
    """Ctrl-C reaches Locust from the terminal; SIGTERM is passed on. Locust then saves its run."""
    with subprocess.Popen(command, pass_fds=[reading]) as locust:
        os.close(reading)
        before = {
            signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
            signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: locust.terminate()),
        }
        try:
            return locust.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
