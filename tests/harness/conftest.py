"""Synthetic runs whose every figure can be worked out by hand.

Times are milliseconds after an arbitrary origin. The rows go through the store, so that the
analysis is given exactly the frames that it is given in earnest.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.records import (
    ClientSample,
    LifecycleEvent,
    MetricSample,
    Outcome,
    RequestRow,
    Role,
    StepRow,
    TokenCounting,
)
from harness.store.frames import RunFrames
from harness.store.manifest import Clock, Idle, Manifest, TargetFacts, Window
from harness.store.run_folder import RunFolder, RunRows

ORIGIN_NS = 5_000_000_000_000


def at(ms: float) -> int:
    return ORIGIN_NS + round(ms * 1e6)


class RunBuilder:
    """Collects the rows of a run. The server's id of request "a" is "cmpl-a"."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.requests: list[RequestRow] = []
        self.lifecycle: list[LifecycleEvent] = []
        self.step_log: list[StepRow] = []
        self.server_metrics: list[MetricSample] = []
        self.client: list[ClientSample] = []
        self.manifest = Manifest(
            run_id="made-up",
            status="complete",
            created_at="2026-01-01T00:00:00+00:00",
            command=["walkaway"],
            seed=1,
            versions={},
            hardware={},
            workload={"name": "hand-made"},
            target=TargetFacts(
                engine="reference",
                url="http://127.0.0.1:1",
                metrics_urls=[],
                model="tiny",
                started_by_us=True,
                spec={"metrics": {}},
                config={"max_num_seqs": 2, "block_size": 4},
            ),
            clock=Clock(comparable=True),
            window=Window(load_started_ns=at(0), load_ended_ns=at(1000), settled_ns=at(4000)),
            settle_s=2.0,
            scrape_interval_s=0.05,
        )

    def request(
        self, name: str, *, sent: float, tokens: list[float], outcome: str, end: float, **more: Any
    ) -> None:
        """A request that read one token at each of the times `tokens`."""
        times = [at(t) for t in tokens]
        row = RequestRow(
            request_id=name,
            arm="main",
            role=Role.USER,
            trial=None,
            user=0,
            stream=True,
            planned_abandon=None,
            think_ns=None,
            max_tokens=100_000,
            intended_start_ns=at(sent),
            sent_ns=at(sent),
            first_token_ns=times[0] if times else None,
            last_token_ns=times[-1] if times else None,
            abandoned_ns=at(end) if outcome == "abandoned" else None,
            ended_ns=at(end),
            tokens_read=len(times),
            token_times_ns=times,
            event_tokens=[1] * len(times),
            token_counting=TokenCounting.USAGE,
            outcome=Outcome(outcome),
        )
        self.requests.append(msgspec.structs.replace(row, **more))

    def abandon(self, name: str, *, t0: float, tokens: list[float], **more: Any) -> None:
        more = {"planned_abandon": len(tokens), **more}
        self.request(name, sent=0, tokens=tokens, outcome="abandoned", end=t0, **more)

    def events(self, name: str, reason: str = "abort", generated: int = 0, **times: float) -> None:
        """Lifecycle events at the given times; `reason` is that of `finished`."""
        for event, t in times.items():
            self.lifecycle.append(
                LifecycleEvent(
                    seq=len(self.lifecycle) + 1,
                    t_ns=at(t),
                    event=event,
                    request_id=f"cmpl-{name}",
                    client_request_id=name,
                    step=None,
                    num_generated=generated,
                    num_blocks=0,
                    reason=reason if event == "finished" else None,
                )
            )

    def step(
        self,
        start: float,
        end: float,
        *,
        waiting: int = 0,
        sampled: tuple[str, ...] = (),
        **scheduled: int,
    ) -> None:
        """A step that computed so many tokens of each request, and sampled one of each named."""
        self.step_log.append(
            StepRow(
                step=len(self.step_log) + 1,
                started_ns=at(start),
                ended_ns=at(end),
                num_running=len(scheduled),
                num_waiting=waiting,
                free_blocks=0,
                scheduled={f"cmpl-{name}": n for name, n in scheduled.items()},
                sampled={f"cmpl-{name}": 1 for name in sampled},
            )
        )

    def steps(self, first: int, last: int, *names: str, length: float = 10) -> None:
        """Steps number first..last, each of `length`, that sampled one token of each request."""
        for i in range(first, last + 1):
            self.step(i * length, (i + 1) * length, sampled=names, **dict.fromkeys(names, 1))

    def scrape(self, t: float, name: str, value: float, labels: str = "{}") -> None:
        sample = MetricSample(t_ns=at(t), duration_ns=0, name=name, labels=labels, value=value)
        self.server_metrics.append(sample)

    def lag(self, t: float, lag: float) -> None:
        sample = ClientSample(t_ns=at(t), pid=1, lag_ns=round(lag * 1e6), cpu_s=0.0, streams=0)
        self.client.append(sample)

    def metrics(self, **trust: str) -> None:
        """The target's metrics, by role, with their trust."""
        assert self.manifest.target is not None
        self.manifest.target.spec["metrics"] = {
            role: {"name": f"its_{role}", "labels": {}, "refresh": "live", "trust": level}
            for role, level in trust.items()
        }

    def idle(self, before: dict[str, float], after: dict[str, float]) -> None:
        self.manifest.idle = Idle(before=before, after=after)

    def another_engine(self) -> None:
        """A server that tells nothing of its inside."""
        assert self.manifest.target is not None
        self.manifest.target.engine = "llamacpp"
        self.manifest.target.config = None
        self.manifest.clock = Clock(comparable=False)

    def frames(self) -> RunFrames:
        folder = RunFolder(self._folder)
        rows = RunRows(
            requests=self.requests,
            lifecycle=self.lifecycle,
            steps=self.step_log,
            server_metrics=self.server_metrics,
            client=self.client,
        )
        folder.write_rows(rows)
        folder.write_manifest(self.manifest)
        return folder.frames()


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[[], RunBuilder]:
    return lambda: RunBuilder(tmp_path)
