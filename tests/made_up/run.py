"""Synthetic runs whose every figure can be worked out by hand.

Times are milliseconds after an arbitrary origin. The rows go through the store, so that the
analysis is given exactly the frames that it is given in earnest.
"""

from pathlib import Path
from typing import Any

from harness.records import (
    ClientSample,
    GpuSample,
    LifecycleEvent,
    MetricSample,
    Outcome,
    RequestRow,
    StepRow,
)
from harness.run.pipeline import write_summary
from harness.store.frames import RunFrames
from harness.store.manifest import ClockCheck, Idle, TargetFacts
from harness.store.run_folder import RunFolder, RunRows
from tests.made_up.rows import at, lifecycle_event, made_up_manifest, request_row, step_row


class RunBuilder:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.requests: list[RequestRow] = []
        self.lifecycle: list[LifecycleEvent] = []
        self.step_log: list[StepRow] = []
        self.server_metrics: list[MetricSample] = []
        self.client: list[ClientSample] = []
        self.gpu: list[GpuSample] = []
        self.manifest = made_up_manifest()
        self.worker = ""  # which logs the events and steps that follow

    def request(
        self, name: str, *, sent: float, tokens: list[float], outcome: str, end: float, **more: Any
    ) -> None:
        row = request_row(
            name,
            sent_ns=at(sent),
            ended_ns=at(end),
            outcome=Outcome(outcome),
            token_times_ns=[at(t) for t in tokens],
            **more,
        )
        self.requests.append(row)

    def abandon(self, name: str, *, t0: float, tokens: list[float], **more: Any) -> None:
        more = {"planned_abandon": len(tokens), **more}
        self.request(name, sent=0, tokens=tokens, outcome="abandoned", end=t0, **more)

    def events(self, name: str, reason: str = "abort", generated: int = 0, **times: float) -> None:
        """Lifecycle events at the given times; `reason` is that of `finished`."""
        for event, t in times.items():
            why = reason if event == "finished" else None
            number = len(self.lifecycle) + 1
            more = {"num_generated": generated, "reason": why, "worker": self.worker}
            self.lifecycle.append(lifecycle_event(number, at(t), event, name, **more))

    def step(
        self,
        start: float,
        end: float,
        *,
        waiting: int = 0,
        sampled: tuple[str, ...] = (),
        **scheduled: int,
    ) -> None:
        number = len(self.step_log) + 1
        more = {"num_waiting": waiting, "worker": self.worker}
        self.step_log.append(step_row(number, at(start), at(end), scheduled, sampled, **more))

    def steps(self, first: int, last: int, *names: str, length: float = 10) -> None:
        """Steps number first..last, each of `length`, that sampled one token of each request."""
        for i in range(first, last + 1):
            self.step(i * length, (i + 1) * length, sampled=names, **dict.fromkeys(names, 1))

    def scrape(self, t: float, name: str, value: float, labels: str = "{}") -> None:
        sample = MetricSample(t_ns=at(t), duration_ns=0, name=name, labels=labels, value=value)
        self.server_metrics.append(sample)

    def gpu_reading(self, t: float, *, gpu: int = 0, **shown: Any) -> None:
        """`shown`: its quantities; the others are hidden."""
        hidden = dict.fromkeys(("utilisation", "memory_bytes", "power_w"))
        self.gpu.append(GpuSample(t_ns=at(t), gpu=gpu, **{**hidden, **shown}))

    def lag(self, t: float, lag: float) -> None:
        sample = ClientSample(t_ns=at(t), pid=1, lag_ns=round(lag * 1e6), cpu_s=0.0, streams=0)
        self.client.append(sample)

    @property
    def target(self) -> TargetFacts:
        assert self.manifest.target is not None
        return self.manifest.target

    def configure(self, **settings: Any) -> None:
        self.target.config = {**(self.target.config or {}), **settings}

    def metrics(self, **trust: str) -> None:
        self.target.spec["metrics"] = {
            role: {"name": f"its_{role}", "labels": {}, "refresh": "live", "trust": level}
            for role, level in trust.items()
        }

    def idle(self, before: dict[str, float], after: dict[str, float]) -> None:
        self.manifest.idle = Idle(before=before, after=after)

    def another_engine(self) -> None:
        self.target.engine = "llamacpp"
        self.target.config = None
        self.manifest.clock = ClockCheck(comparable=False)

    def frames(self) -> RunFrames:
        folder = RunFolder(self._folder)
        rows = RunRows(
            requests=self.requests,
            lifecycle=self.lifecycle,
            steps=self.step_log,
            server_metrics=self.server_metrics,
            client=self.client,
            gpu=self.gpu,
        )
        folder.write_rows(rows)
        folder.write_manifest(self.manifest)
        return folder.frames()


def save_judged(path: Path, *, step_ms: float = 10, freed_ms: float = 111) -> Path:
    """A run's folder: one request, left at 100 ms, and one that was completed."""
    path.mkdir(exist_ok=True)
    run = RunBuilder(path)
    run.manifest.workload = {"name": "hand-made", "question": "How long?"}
    run.abandon("a", t0=100, tokens=[50, 80])
    run.events(
        "a",
        generated=3,
        arrived=5,
        admitted=10,
        first_token=50,
        disconnected=101,
        abort_sent=102,
        abort_received=103,
        removed=freed_ms - 1,
        blocks_freed=freed_ms,
        finished=freed_ms + 1,
    )
    run.request("b", sent=0, tokens=[60, 90, 120], outcome="completed", end=125)
    run.steps(1, 12, "a", "b", length=step_ms)
    run.frames()
    write_summary(RunFolder(path))
    return path
