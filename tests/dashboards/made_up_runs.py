"""Folders of runs, made up: one a day, each with a median cancel latency of its own."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from harness.records import Metric
from tests.harness.gate.gated import save, summary

FIRST = datetime(2026, 1, 1, 3, tzinfo=UTC)


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
    at = FIRST + timedelta(days=day)
    mine = {"cancel_latency_s": latency(p50) if isinstance(p50, float) else p50}
    content = summary({**mine, **(others or {})}, **(of or {}))
    return save(folder / f"night-{day:03}", content, created_at=at.isoformat(), **more)


def save_nights(folder: Path, values: Sequence[float]) -> list[Path]:
    return [save_night(folder, day, value) for day, value in enumerate(values)]
