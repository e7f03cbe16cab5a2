"""A run made of nothing: a small scheduler played through by hand, always in the same way.

Times are whole steps of 20 ms, so what a report must show can be computed in one's head.
"""

from pathlib import Path
from typing import Any

import msgspec

from harness.records import (
    ClientSample,
    CpuSample,
    GpuSample,
    LifecycleEvent,
    Metric,
    MetricSample,
    Outcome,
    RequestRow,
    StepRow,
    Summary,
    WireClose,
)
from harness.store.manifest import ClockCheck, Manifest, Window
from harness.store.run_folder import RunFolder, RunRows
from tests.made_up.rows import (
    lifecycle_event,
    made_up_manifest,
    request_row,
    step_row,
    target_facts,
)
from tests.made_up.summaries import made_up_summary

MS = 1_000_000
STEP = 20 * MS
BEGIN = 5_000 * MS  # the load begins here on the monotonic clock
SLOTS = 4
BLOCKS = 64
SETTLE = 2_000 * MS
ABANDON_POINTS = (0, 4, 16)


WORKLOAD: dict[str, Any] = {
    "name": "synthetic",
    "run": {},
    "load": {},
    "arrivals": {},
    "arms": [],
    "gate": {"limits": [], "min_abandons": 10},
}


class SyntheticRun:
    """`abandons` requests leave, one after the other in each of four slots; the server never lets
    go of the first `ghosts`. Every fourth request stays to its end.
    """

    def __init__(self, *, abandons: int, ghosts: int) -> None:
        self.requests: list[RequestRow] = []
        self.lifecycle: list[LifecycleEvent] = []
        self.spans: list[tuple[str, int, int, int]] = []  # id, first step, last step, sampled until
        next_free = [0] * SLOTS
        for number in range(abandons + abandons // 3):
            slot = min(range(SLOTS), key=next_free.__getitem__)
            stays = number % 4 == 3
            is_ghost = not stays and number < ghosts
            next_free[slot] = self._play(number, next_free[slot], stays=stays, is_ghost=is_ghost)
        last = max((end for _, _, end, _ in self.spans), default=-1)
        self.ended_ns = BEGIN + (last + 1) * STEP
        self.steps = [self._step(number) for number in range(last + 1)]

    def _play(self, number: int, first: int, *, stays: bool, is_ghost: bool) -> int:
        """One request from step `first` on. Returns the step from which its slot is free."""
        request_id = f"u-{number}"
        read = 24 if stays else ABANDON_POINTS[number % len(ABANDON_POINTS)]
        sent = BEGIN + first * STEP + 2 * MS
        left = first + read + (0 if stays else 1)  # leaves during the step after its last token
        end = left - 1 if stays else left + (30 if is_ghost else 0)
        left_ns = BEGIN + left * STEP + (number * 7 % 16) * MS
        self.spans.append((request_id, first, end, read))
        self.requests.append(_request(number, request_id, sent, read, None if stays else left_ns))
        self._log(request_id, sent, None if stays else left_ns, end, is_ghost=is_ghost)
        return end + 1

    def _log(
        self, request_id: str, sent: int, left_ns: int | None, end: int, *, is_ghost: bool
    ) -> None:
        over = BEGIN + (end + 1) * STEP
        told: list[tuple[str, int, str | None]] = [
            ("arrived", sent, None),
            ("admitted", sent + MS, None),
        ]
        if left_ns is not None and not is_ghost:
            told += [
                ("disconnected", left_ns + MS, "user_disconnect"),
                ("abort_sent", left_ns + MS + 1, "user_disconnect"),
                ("abort_received", left_ns + 2 * MS, "user_disconnect"),
            ]
        reason = "length" if left_ns is None or is_ghost else "abort"
        told += [("removed", over, reason), ("blocks_freed", over + MS // 10, reason)]
        told.append(("finished", over + MS // 5, reason))
        for event, t_ns, why in told:
            row = lifecycle_event(
                len(self.lifecycle) + 1,
                t_ns,
                event,
                request_id,
                num_generated=0 if event in {"arrived", "admitted"} else 5,
                num_blocks=4 if event == "blocks_freed" else 0,
                reason=why,
            )
            self.lifecycle.append(row)

    def _step(self, number: int) -> StepRow:
        running = [name for name, first, last, _ in self.spans if first <= number <= last]
        started = BEGIN + number * STEP
        return step_row(
            number,
            started,
            started + STEP - MS,
            dict.fromkeys(running, 1),
            running,
            num_waiting=2,
            free_blocks=BLOCKS - 4 * len(running),
        )


def _request(number: int, name: str, sent: int, read: int, left_ns: int | None) -> RequestRow:
    times = [sent + (k + 1) * STEP for k in range(read)]
    left: dict[str, Any] = {}
    if left_ns is not None:
        left = {"planned_abandon": read, "think_ns": 10 * MS, "wire_close": WireClose.FIN}
    return request_row(
        name,
        sent_ns=sent,
        ended_ns=times[-1] if left_ns is None else left_ns,
        outcome=Outcome.COMPLETED if left_ns is None else Outcome.ABANDONED,
        token_times_ns=times,
        user=number % 6,
        max_tokens=400,
        **left,
    )


def figures(*, abandons: int, ghosts: int) -> dict[str, Metric]:
    enough = ghosts * 100 <= abandons
    latency = Metric(
        unit="s",
        n=abandons,
        n_censored=ghosts,
        mean=0.0131,
        p50=0.0131,
        p50_ci95=(0.0129, 0.0133),
        p90=0.0131,
        p95=0.0131,
        p99=0.0131 if enough else None,
        lower_bounds={} if enough else {"p99": 2.0},
        max=0.0131 if not ghosts else None,
        method="exact",
    )
    stage = Metric(unit="s", n=abandons, mean=1e-3, p50=1e-3, p90=1e-3, p99=2e-3, method="exact")
    wait = Metric(unit="s", n=abandons, mean=0.011, p50=0.011, p99=0.012, method="exact")
    tokens = Metric(unit="tokens", n=abandons, mean=1.02, p50=1.0, p99=2.0, method="exact")
    times = Metric(unit="s", n=20, mean=0.02, p50=0.02, p90=0.04, p99=0.09, method="client")
    return {
        "detect_s": stage,
        "signal_s": stage,
        "wait_s": wait,
        "free_s": Metric(unit="s", n=abandons, mean=1e-4, p50=1e-4, p99=1e-4, method="exact"),
        "cancel_latency_s": latency,
        "cancel_latency_steps": Metric(unit="steps", n=abandons, p50=1, p99=1, method="exact"),
        "slot_refill_s": stage,
        "wasted_tokens": tokens,
        "wasted_after_close_tokens": tokens,
        "ghost_rate": Metric(
            unit="ratio", n=abandons, mean=ghosts / abandons, upper95=0.031, method="exact"
        ),
        "leaked_slots": Metric(unit="slots", n=1, mean=0.0, method="gauge"),
        "leaked_blocks": Metric(unit="blocks", n=1, mean=0.0, method="gauge"),
        "ttft_s": times,
        "itl_s": times,
        "client_lag_s": Metric(unit="s", n=100, mean=2e-4, p50=1e-4, p99=8e-4, method="client"),
    }


def summary_of(run: SyntheticRun, metrics: dict[str, Metric], **more: Any) -> Summary:
    outcomes = {outcome.value: 0 for outcome in Outcome}
    for row in run.requests:
        outcomes[row.outcome] += 1
    points = [
        {"planned_abandon": k, "n": 10, "in_flight_mean": 0.4, "after_close_mean": 1.0 + k / 50}
        for k in ABANDON_POINTS
    ]
    content = {
        "run_id": "20260102-030405-synthetic",
        "workload": "synthetic",
        "outcomes": outcomes,
        "metrics": msgspec.to_builtins(metrics),
        "validity": [{"level": "info", "text": "scraped every 50 ms"}],
        "token_counting": "usage",
        "breakdown": {"waste_by_abandon_point": points if metrics else []},
    }
    return made_up_summary({**content, **more})


def manifest_of(run: SyntheticRun, *, question: str, lifecycle: bool) -> Manifest:
    config = {"num_blocks": BLOCKS, "max_num_seqs": SLOTS, "runner": "simulated", "device": "cpu"}
    return made_up_manifest(
        run_id="20260102-030405-synthetic",
        created_at="2026-01-02T03:04:05Z",
        command=["walkaway", "run", "a workload.toml"],
        seed=7,
        versions={"walkaway": "0.1.0", "python": "3.11.7"},
        hardware={"cpu": "abacus", "cores": 2, "memory_bytes": 4 * 2**30, "gpus": []},
        workload=WORKLOAD | {"question": question},
        target=target_facts(
            spec={"metrics": {"running": {"name": "slots_busy", "labels": {}, "trust": "exact"}}},
            config=config if lifecycle else None,
        ),
        clock=ClockCheck(comparable=lifecycle),
        window=Window(
            load_started_ns=BEGIN, load_ended_ns=run.ended_ns, settled_ns=run.ended_ns + SETTLE
        ),
    )


def rows_of(run: SyntheticRun, *, lifecycle: bool, gpu: bool) -> RunRows:
    stamps = range(BEGIN, run.ended_ns, 50 * MS)
    watched = range(BEGIN, run.ended_ns + SETTLE, 50 * MS) if run.steps else stamps
    return RunRows(
        requests=run.requests,
        client=[
            ClientSample(t_ns=t, pid=41, lag_ns=100_000 + t % 7, cpu_s=0.1, streams=4)
            for t in range(BEGIN - 495 * MS, run.ended_ns + 500 * MS, 100 * MS)
        ],
        lifecycle=run.lifecycle if lifecycle else [],
        steps=run.steps if lifecycle else [],
        server_metrics=[
            MetricSample(
                t_ns=t,
                duration_ns=MS,
                name="slots_busy",
                labels="{}",
                value=3.0 if t < run.ended_ns else 0.0,
            )
            for t in watched
        ],
        gpu=[
            GpuSample(t_ns=t, gpu=0, utilisation=0.4, memory_bytes=2**31, power_w=None)
            for t in (stamps if gpu else ())
        ],
        cpu=[
            CpuSample(t_ns=t, process=name, cores=cores, rss_bytes=10**8)
            for t in stamps
            for name, cores in (("engine worker", 0.8), ("load", 0.3))
        ],
    )


def save_played(
    path: Path,
    *,
    abandons: int = 30,
    ghosts: int = 0,
    lifecycle: bool = True,
    gpu: bool = False,
    question: str = "What does a synthetic server do?",
    **summary: Any,
) -> Path:
    run = SyntheticRun(abandons=abandons, ghosts=ghosts)
    metrics = figures(abandons=abandons, ghosts=ghosts) if abandons and lifecycle else {}
    folder = RunFolder.create(path)
    folder.write_rows(rows_of(run, lifecycle=lifecycle, gpu=gpu))
    folder.write_manifest(manifest_of(run, question=question, lifecycle=lifecycle))
    folder.write_summary(summary_of(run, metrics, **summary))
    return folder.path
