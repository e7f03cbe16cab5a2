"""The load process as the harness starts it: Locust, with a plan; its rows lie in a folder."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.client.shards import ShardReader
from harness.records import RequestRow
from harness.workload.arrivals import AnyArrivals, ClosedArrivals
from harness.workload.load import AnyLoad
from harness.workload.plan import LoadPlan, write_plan
from harness.workload.target import Target
from harness.workload.workload import RunSettings

LOCUSTFILE = Path(__file__).parents[3] / "workloads" / "locustfile.py"


class LoadProcess:
    """A load process; its standard input is a pipe that we hold."""

    def __init__(
        self,
        folder: Path,
        url: str,
        load: AnyLoad,
        users: int,
        timeout_s: float = 30.0,
        *,
        arrivals: AnyArrivals | None = None,
        max_seconds: float = 60.0,
        options: tuple[str, ...] = (),
        target: dict[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        described: dict[str, Any] = {"name": "t", "description": "d", "settle_s": 0.0}
        described["continuous_usage"] = True
        plan = LoadPlan(
            url=url,
            model="m",
            target=Target(**described | (target or {})),
            run=RunSettings(seed=3, users=users, timeout_s=timeout_s, max_seconds=max_seconds),
            load=load,
            arrivals=arrivals or ClosedArrivals(),
            rows_dir=str(folder),
        )
        write_plan(plan, folder / "plan.json")
        self.process = run_locust(
            *("--headless", "--only-summary", "--json", "--walkaway-exit-with", "0"),
            *("--walkaway-plan", str(folder / "plan.json")),
            *options,
        )
        # Out of reach of `communicate`, which would close it, and so end the load.
        assert self.process.stdin is not None
        self.stdin, self.process.stdin = self.process.stdin, None

    def result(self) -> list[RequestRow]:
        """Wait for the end, which must be orderly; the rows."""
        try:
            self.out, self.log = self.process.communicate(timeout=90)
        finally:
            self.process.kill()
            self.stdin.close()
        assert self.process.returncode == 0, self.log
        assert "Traceback" not in self.log
        return ShardReader(self.folder, RequestRow).read_new()

    @property
    def failures(self) -> dict[str, int]:
        """Locust's own account of a load that is over: failures by outcome."""
        return {entry["name"]: entry["num_failures"] for entry in json.loads(self.out)}


def run_locust(*options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def beside_the_locustfile(folder: Path, code: str) -> tuple[str, ...]:
    """The options of a load process that runs this code, too."""
    file = folder / "locustfile.py"
    file.write_text(f"import runpy\nglobals().update(runpy.run_path({str(LOCUSTFILE)!r}))\n{code}")
    return "-f", str(file)


def master_on(port: int, *, workers: int) -> tuple[str, ...]:
    return (
        *("--master", "--expect-workers", str(workers)),
        *("--master-bind-host", "127.0.0.1", "--master-bind-port", str(port)),
    )


def worker_on(port: int) -> tuple[str, ...]:
    return "--worker", "--master-host", "127.0.0.1", "--master-port", str(port)
