"""A run in progress: what all of its steps share, and the manifest that they fill in."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from harness.collect.source import Notes
from harness.http_client import http_client
from harness.run.process import Interruption
from harness.run.progress import Progress
from harness.run.run_config import ResolvedRun, repeat_command
from harness.run.settle import settle_seconds
from harness.store.manifest import Manifest, find_hardware, find_versions, utc_now
from harness.store.run_folder import RunFolder
from harness.workload.target import Target
from harness.workload.workload import as_plain_data

RESULTS = Path("results")


@dataclass(kw_only=True)
class RunState:
    """Each step is noted in the manifest, so the manifest shows how far a run came."""

    resolved: ResolvedRun
    folder: RunFolder
    manifest: Manifest
    progress: Progress
    interruption: Interruption
    notes: Notes = field(default_factory=Notes)
    clock_ns: Callable[[], int] = time.perf_counter_ns

    @property
    def target(self) -> Target:
        return self.resolved.target

    @property
    def timeout_s(self) -> float:
        return self.resolved.workload.run.timeout_s

    def new_client(self, timeout_s: float) -> httpx.Client:
        """A request of the harness may take as long as one of the load."""
        return http_client(
            self.resolved.headers,
            ca_file=self.resolved.config.ca_file,
            timeout_s=timeout_s,
            longest_s=max(timeout_s, self.timeout_s),
            place=self.resolved.place,
        )


def choose_folder(resolved: ResolvedRun) -> Path:
    """Such as `20261121-053012-demo-4f2a`, which sorts by time, unless the user named one."""
    name = f"{utc_now():%Y%m%d-%H%M%S}-{resolved.workload.name}-{secrets.token_hex(2)}"
    return resolved.config.out or RESULTS / name


def begin_manifest(resolved: ResolvedRun, *, run_id: str) -> Manifest:
    return Manifest(
        run_id=run_id,
        created_at=utc_now().isoformat(timespec="seconds"),
        command=resolved.config.command,
        repeat=repeat_command(resolved.config.command, seed=resolved.workload.run.seed),
        seed=resolved.workload.run.seed,
        versions=find_versions(),
        hardware=find_hardware([]),
        workload=as_plain_data(resolved.workload),
        settle_s=settle_seconds(resolved.target, resolved.workload.settle, None),
        scrape_interval_s=resolved.scrape_interval_s,
    )
