"""Runs as the gate reads them, made up: a summary, a manifest and as many rows as were counted."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from harness.gate.measured import Measured, read_measured
from harness.records import (
    SCHEMA_VERSION,
    ClientSample,
    CpuSample,
    GpuSample,
    LifecycleEvent,
    Metric,
    MetricSample,
    Outcome,
    RequestRow,
    Role,
    StepRow,
    TokenCounting,
)
from harness.store.run_folder import RunFolder, RunRows
from harness.workload.workload import as_plain_data, load_workload

Values = Mapping[str, Sequence[float | None]]


def steps(mean: float = 1.0, half: float = 0.02, n: int = 500, **more: Any) -> Metric:
    """Cancel latencies with a mean that is known to ± half, and p99 between 1 and 2."""
    known = {"p50": 1.0, "p50_ci95": (1.0, 1.0), "p99": 2.0, "p99_ci95": (1.0, 2.0), "max": 2.0}
    interval = (mean - half, mean + half)
    figures = {"mean": mean, "mean_ci95": interval, **known, **more}
    return Metric(unit="steps", n=n, method="exact", **figures)


def share(hits: int, n: int) -> Metric:
    return Metric(unit="ratio", n=n, mean=hits / n, upper95=0.0, method="exact")


def count(value: float, unit: str = "blocks", **more: Any) -> Metric:
    return Metric(unit=unit, n=1, mean=value, method="gauge", **more)


GOOD = {
    "cancel_latency_steps": steps(),
    "ghost_rate": share(0, 500),
    "leaked_slots": count(0, "slots"),
    "leaked_blocks": count(0),
}


def arm(
    metrics: Mapping[str, Metric],
    rounds: Mapping[str, Values] | None = None,
    counting: str | None = "usage",
) -> dict[str, Any]:
    return {
        "token_counting": counting,
        "outcomes": {"abandoned": 2, "completed": 1},
        "metrics": {name: msgspec.to_builtins(one) for name, one in metrics.items()},
        "not_measurable": {"slot_recovery_s": "the workload has no probes"},
        "per_round": {name: dict(values) for name, values in (rounds or {}).items()},
    }


def summary(metrics: Mapping[str, Metric] = GOOD, **more: Any) -> dict[str, Any]:
    """Of a run without arms."""
    one = arm(metrics)
    del one["per_round"]
    return {**_head(), **one, "wedged": False, **more}


def summary_of_arms(arms: Mapping[str, dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {**_head(), "arms": dict(arms), **more}


def _head() -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": "the-run",
        "status": "complete",
        "workload": "gate",
        "engine": "reference",
        "model": "tiny",
        "validity": [],
    }


def manifest(arms: Sequence[str] = (), **more: Any) -> dict[str, Any]:
    named = ", ".join(f'{{name="{name}"}}' for name in arms)
    workload = as_plain_data(load_workload("gate", [f"arms=[{named}]", "gate.min_abandons=2"]))
    return {
        "schema_version": SCHEMA_VERSION,
        "created_at": "2026-11-21T05:30:12+00:00",
        "status": "complete",
        "hardware": {"cpu": "a processor", "cores": 2, "gpus": []},
        "workload": workload,
        "target": {"config": {"max_num_seqs": 12, "device": "cpu"}},
        **more,
    }


def measured(summary_: Mapping[str, Any], arms: Sequence[str] = (), **more: Any) -> Measured:
    plain = manifest(arms, **more)
    return read_measured(summary_, plain, dict.fromkeys(arms, plain))


def save(path: Path, summary_: Mapping[str, Any] | None = None, **more: Any) -> Path:
    """A run's folder; its rows are as many as `arm` counts."""
    folder = RunFolder.claim(path)
    folder.write_rows(ROWS)
    folder.write_summary(summary() if summary_ is None else summary_)
    (path / "manifest.json").write_text(json.dumps(manifest(**more)))
    return path


def of_rounds(*values: float) -> dict[str, Any]:
    """Of a run with one arm, whose mean latency in each round is given."""
    rounds = {"cancel_latency_steps": {"mean": list(values)}}
    return summary_of_arms({"build": arm({"cancel_latency_steps": steps()}, rounds)})


def save_rounds(path: Path, *values: float) -> Path:
    """A run with one arm; the server's facts are in the manifest of its first round, which has all
    the rows."""
    run = save(path, of_rounds(*values), arms=["build"])
    save(run / "rounds" / "1-build")
    return run


def _row(number: int, outcome: Outcome) -> RequestRow:
    return RequestRow(
        request_id=str(number),
        arm="main",
        role=Role.USER,
        trial=None,
        user=number,
        stream=True,
        planned_abandon=None,
        think_ns=None,
        max_tokens=1,
        intended_start_ns=0,
        sent_ns=0,
        ended_ns=1,
        token_counting=TokenCounting.USAGE,
        outcome=outcome,
    )


ROWS = RunRows(
    requests=[
        _row(number, outcome)
        for number, outcome in enumerate((Outcome.ABANDONED, Outcome.ABANDONED, Outcome.COMPLETED))
    ],
    lifecycle=[
        LifecycleEvent(
            seq=1,
            t_ns=5,
            event="arrived",
            request_id="s0",
            client_request_id="0",
            step=None,
            num_generated=0,
            num_blocks=0,
            reason=None,
        )
    ],
    steps=[
        StepRow(
            step=1,
            started_ns=5,
            ended_ns=9,
            num_running=1,
            num_waiting=0,
            free_blocks=3,
            scheduled={"s0": 1},
            sampled={"s0": 1},
        )
    ],
    server_metrics=[MetricSample(t_ns=1, duration_ns=2, name="m", labels="{}", value=3.5)],
    cpu=[CpuSample(t_ns=1, process="machine", cores=0.5, rss_bytes=7)],
    gpu=[GpuSample(t_ns=1, gpu=0, utilisation=0.25, memory_bytes=9, power_w=None)],
    client=[ClientSample(t_ns=1, pid=2, lag_ns=3, cpu_s=0.1, streams=4)],
)
