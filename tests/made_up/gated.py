"""Runs as the gate reads them, made up: a summary, a manifest and as many rows as were counted."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from harness.gate.judge import Measured
from harness.gate.run import read_measured
from harness.records import (
    SCHEMA_VERSION,
    ClientSample,
    CpuSample,
    GpuSample,
    Metric,
    MetricSample,
    Outcome,
)
from harness.store.run_folder import RunFolder, RunRows, as_summary
from harness.workload.workload import as_plain_data, load_workload
from tests.made_up.rows import lifecycle_event, request_row, step_row

FIRST_NIGHT = datetime(2026, 1, 1, 3, tzinfo=UTC)

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
    one = arm(metrics)
    del one["per_round"]
    return {**_head(), **one, "wedged": False, **more}


def summary_of_arms(arms: Mapping[str, dict[str, Any]], **more: Any) -> dict[str, Any]:
    rounds = {"reference": next(iter(arms)), "rounds": 1, "headlines": [], "differences": {}}
    return {**_head(), **rounds, "arms": dict(arms), **more}


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
        "kills": [],
        **more,
    }


def measured(summary_: Mapping[str, Any], arms: Sequence[str] = (), **more: Any) -> Measured:
    plain = manifest(arms, **more)
    return read_measured(as_summary(summary_), plain, dict.fromkeys(arms, plain))


def save(path: Path, summary_: Mapping[str, Any] | None = None, **more: Any) -> Path:
    folder = RunFolder.claim(path)
    folder.write_rows(ROWS)
    (path / "summary.json").write_text(json.dumps(summary() if summary_ is None else summary_))
    (path / "manifest.json").write_text(json.dumps(manifest(**more)))
    return path


def of_rounds(*values: float) -> dict[str, Any]:
    rounds = {"cancel_latency_steps": {"mean": list(values)}}
    return summary_of_arms({"build": arm({"cancel_latency_steps": steps()}, rounds)})


def save_rounds(path: Path, *values: float) -> Path:
    """A run with one arm; the server's facts are in the manifest of its first round, which has all
    the rows."""
    run = save(path, of_rounds(*values), arms=["build"])
    save(run / "rounds" / "1-build")
    return run


def latency(p50: float, **more: Any) -> Metric:
    figures: dict[str, Any] = {"p50": p50, "p50_ci95": (p50 * 0.98, p50 * 1.02), "p99": 2 * p50}
    return Metric(unit="s", n=500, method="exact", **figures | more)


def save_night(
    folder: Path,
    day: int,
    p50: float | Metric,
    *,
    of: dict[str, Any] | None = None,
    others: Mapping[str, Metric] | None = None,
    **more: Any,
) -> Path:
    """The run of a day. `of`: more of its summary; `others`: more metrics; `more`: of its
    manifest."""
    at = FIRST_NIGHT + timedelta(days=day)
    mine = {"cancel_latency_s": latency(p50) if isinstance(p50, float) else p50}
    content = summary({**mine, **(others or {})}, **(of or {}))
    return save(folder / f"night-{day:03}", content, created_at=at.isoformat(), **more)


def save_nights(folder: Path, values: Sequence[float]) -> list[Path]:
    return [save_night(folder, day, value) for day, value in enumerate(values)]


_OUTCOMES = (Outcome.ABANDONED, Outcome.ABANDONED, Outcome.COMPLETED)
ROWS = RunRows(
    requests=[
        request_row(str(number), sent_ns=0, ended_ns=1, outcome=outcome, user=number)
        for number, outcome in enumerate(_OUTCOMES)
    ],
    lifecycle=[lifecycle_event(1, 5, "arrived", "0")],
    steps=[step_row(1, 5, 9, {"0": 1}, "0")],
    server_metrics=[MetricSample(t_ns=1, duration_ns=2, name="m", labels="{}", value=3.5)],
    cpu=[CpuSample(t_ns=1, process="machine", cores=0.5, rss_bytes=7)],
    gpu=[GpuSample(t_ns=1, gpu=0, utilisation=0.25, memory_bytes=9, power_w=None)],
    client=[ClientSample(t_ns=1, pid=2, lag_ns=3, cpu_s=0.1, streams=4)],
)
