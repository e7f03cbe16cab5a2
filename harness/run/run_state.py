"""A run in progress: what all of its steps share, and the manifest that they fill in."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import httpx

from harness.collect.source import Notes
from harness.run.process import Interruption
from harness.run.progress import Progress
from harness.run.run_config import ResolvedRun, repeat_command
from harness.run.settle import settle_seconds
from harness.store.manifest import Manifest, find_hardware, find_versions, utc_now
from harness.store.run_folder import RunFolder
from harness.workload.target import Target
from harness.workload.workload import as_plain_data

RESULTS = Path("results")


class Preparation(Protocol):
    """What the steps before any load need, of a run or of a conformance suite."""

    @property
    def target(self) -> Target: ...
    @property
    def progress(self) -> Progress: ...
    @property
    def interruption(self) -> Interruption: ...
    @property
    def notes(self) -> Notes: ...
    def take_target(self, target: Target) -> None: ...


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

    def take_target(self, target: Target) -> None:
        """Speak to the server as `target` says from now on."""
        self.resolved = self.resolved.with_target(target)

    @property
    def timeout_s(self) -> float:
        return self.resolved.workload.run.timeout_s

    def new_client(self, timeout_s: float) -> httpx.Client:
        """A request of the harness may take as long as one of the load."""
        longest_s = max(timeout_s, self.timeout_s)
        return self.resolved.access.new_client(timeout_s, longest_s=longest_s)


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
