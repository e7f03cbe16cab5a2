"""The server and the load over time, the users who stayed, and the measurement floor.

The server's numbers come from its step log, else from scrapes. An idle engine makes no steps, so
the scrapes after the last step show whether everything came back.
"""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pandas as pd

from dashboards.figures import timeline
from dashboards.figures.ladders import ladders
from dashboards.figures.look import BLUE, GREEN, HEIGHT_PX, ORANGE, Floats
from dashboards.figures.timeline import Marks, Series, column_series, levels_in_words, min_max
from dashboards.sections.section import CLIENT_TIMES, Part, Picture, median_and_p99, section
from harness.analysis.run_facts import run_facts
from harness.analysis.scraped import ScrapedReadings, readings_of
from harness.analysis.timeline import level_of_all
from harness.export.library import Run
from harness.formatting import bounded, in_all
from harness.metrics import spoken

Points = tuple[Floats, Floats]
GPU_COLUMNS: Final = (
    ("utilisation", "GPU busy, share of time", 1.0),
    ("memory_bytes", "GPU memory, GiB", 2.0**-30),
    ("power_w", "GPU power, watts", 1.0),
)


@section(
    "slots",
    "Batch slots over time",
    "Requests in a slot and in the queue; each mark on the axis is a user who left, each triangle "
    "a request that was preempted.",
    good="slots stay full while requests wait, and nothing is left when the load has ended.",
)
def slots(run: Run) -> Iterator[Part]:
    found = {
        name: points
        for name in ("running", "waiting")
        if (points := _joined(_stepped(run, f"num_{name}"), _scraped(run, name))) is not None
    }
    if "running" not in found:
        yield "No step log, and no scrape showed how many requests ran."
        return
    series = {name: min_max(*points) for name, points in found.items()}
    shown = {"running (in a slot)": (series["running"], BLUE, "solid")}
    if "waiting" in series:
        shown["waiting"] = (series["waiting"], ORANGE, "dot")
    look = {"y_title": "requests", "height": HEIGHT_PX}
    yield _levels(run, "slots", "Requests", series, shown, look)


@section(
    "kv",
    "KV cache over time",
    "How much of the KV cache is held by requests; marks as above.",
    good="it falls with every abandon and ends where it began.",
)
def kv(run: Run) -> Iterator[Part]:
    usage = _kv_usage(run)
    if usage is None:
        yield "No step log, and no scrape showed the KV cache."
        return
    series, unit, total = usage
    look = {"y_title": unit if total is None else f"{unit} (of {total:,})"}
    shown = {unit: (series, GREEN, "solid")}
    yield _levels(run, "kv", "KV cache", {unit: series}, shown, look)


def _levels(
    run: Run,
    name: str,
    of: str,
    series: dict[str, Series],
    shown: dict[str, tuple[Series, str, str]],
    look: dict[str, Any],
) -> Picture:
    abandons = run.frames.requests["abandoned_ns"].dropna()
    marks = Marks(
        abandons=run.clock.seconds(abandons), preemptions=run.clock.seconds(_preempted_ns(run))
    )
    return Picture(
        name=name,
        figure=timeline.levels(shown, marks, run.clock, **look),
        alt=f"{of} over the run, {levels_in_words(series)} {marks.text}",
        note=timeline.notes(list(series.values()), marks),
    )


@section(
    "hardware",
    "Processor and GPU over time",
    "How busy the server's processes, the load and the GPU (if there is one) were.",
    good="the load's processes leave the server room; a busy load measures itself.",
)
def hardware(run: Run) -> Iterator[Part]:
    gpu, cpu = run.frames.gpu, run.frames.cpu
    for column, title, scale in GPU_COLUMNS:
        if gpu[column].notna().any():
            series = {
                f"GPU {number}": column_series(rows, column, run.clock, scale=scale)
                for number, rows in gpu.groupby("gpu")
            }
            alt = f"{title}, over the run."
            yield _lines(run, f"gpu-{column.partition('_')[0]}", series, title, alt)
    if energy := _energy_in_words(run):
        yield energy
    if not cpu.empty:
        by_process = cpu.groupby("process")
        cores = {str(name): column_series(rows, "cores", run.clock) for name, rows in by_process}
        alt = "Processor cores in use, over the run."
        yield _lines(run, "cpu", cores, "processor cores in use", alt)
    if gpu.empty:
        yield (
            "Neither processor nor GPU were sampled in this run."
            if cpu.empty
            else "No GPU was sampled, so only the processor is shown."
        )


def _energy_in_words(run: Run) -> str:
    shown = {"gpu_energy_j": "mean", "energy_per_token_j": "mean", "energy_wasted_j": "mean"}
    said = {
        name: f"{spoken(name, key)} {bounded(metric, key)}"
        for name, key in {**shown, "gpu_interval_s": "p50"}.items()
        if (metric := run.metrics.get(name)) is not None
    }
    if (wasted := run.metrics.get("energy_wasted_j")) is not None:
        said["energy_wasted_j"] += f" for each abandoned request, {in_all(wasted, unit='J')}"
    return (
        "" if run.frames.gpu.empty or not said else f"During the load: {', '.join(said.values())}."
    )


def _lines(run: Run, name: str, series: dict[str, Series], y_title: str, alt: str) -> Picture:
    return Picture(
        name=name,
        figure=timeline.lines(series, run.clock, y_title=y_title),
        alt=f"{alt} {levels_in_words(series)}",
        note=timeline.notes(list(series.values())),
    )


@section(
    "survivors",
    "The users who stayed",
    "Times of users who were to stay to the end: median (dot), p90 (diamond), p99 (bar).",
    good="no worse than in a run without abandons; only a comparison of two runs can show it.",
)
def survivors(run: Run) -> Iterator[Part]:
    metrics = run.metrics
    present = [(name, label) for name, label in CLIENT_TIMES if name in metrics and metrics[name].n]
    if not present:
        yield run.whole.not_measurable.get("ttft_s", "No user stayed to the end.")
        return
    said = " ".join(
        f"{name[:-2].upper().replace('_', ' ')}: {median_and_p99(metrics[name])}"
        for name, _ in present
    )
    yield Picture(
        name="survivors",
        figure=ladders([(label, metrics[name]) for name, label in present]),
        alt=f"Median, 90th and 99th percentile of the times of surviving users. {said}",
    )


@section(
    "lag",
    "The measurement floor",
    "How late the load process noticed each tick of its own timer while there was load: what the "
    "harness itself adds. Its 99th percentile is the floor.",
    good="far below every figure above; a figure smaller than this is not to be believed.",
)
def lag(run: Run) -> Iterator[Part]:
    is_load = run.frames.client["t_ns"].between(run.clock.started_ns, run.clock.ended_ns)
    ticks = run.frames.client[is_load]
    if ticks.empty:
        yield "The load process did not record its own lag in this run."
        return
    series = {
        f"load process {number}": column_series(rows, "lag_ns", run.clock, scale=1e-6)
        for number, (_, rows) in enumerate(ticks.groupby("pid"), start=1)
    }
    floor = median_and_p99(run.metrics.get("client_lag_s"))
    alt = f"Lag of the load process over the run, in milliseconds. {floor}"
    yield _lines(run, "lag", series, "late by, milliseconds", alt)


def _preempted_ns(run: Run) -> pd.Series:
    """The times at which requests were preempted, by the lifecycle log; without one, the scrapes at
    which the server's counter of preemptions had risen.
    """
    events = run.frames.lifecycle
    if not events.empty:
        return events.loc[events["event"] == "preempted", "t_ns"]
    readings = _readings(run, "preemptions")
    if readings is None:
        return pd.Series(dtype=np.int64)
    return pd.Series(readings.t_ns[1:][np.diff(readings.level) > 0])


def _kv_usage(run: Run) -> tuple[Series, str, int | None] | None:
    total = run_facts(run.frames).num_blocks
    free = _joined(_stepped(run, "free_blocks"), _scraped(run, "free_blocks"))
    if free is not None and total is not None:
        return min_max(free[0], total - free[1]), "blocks in use", total
    share = _scraped(run, "kv_usage")
    return None if share is None else (min_max(*share), "share in use", None)


def _joined(stepped: Points | None, scraped: Points | None) -> Points | None:
    if stepped is None or scraped is None:
        return stepped or scraped
    is_later = scraped[0] > stepped[0][-1]
    x, y = (np.append(a, b[is_later]) for a, b in zip(stepped, scraped, strict=True))
    return x, y


def _stepped(run: Run, column: str) -> Points | None:
    steps = run.frames.steps.sort_values("started_ns")
    if steps.empty:
        return None
    level = level_of_all(steps, column).to_numpy(dtype=np.float64)
    x = run.clock.seconds(pd.concat([steps["started_ns"], steps["ended_ns"].tail(1)]))
    return x, np.append(level, level[-1])


def _scraped(run: Run, role: str) -> Points | None:
    readings = _readings(run, role)
    if readings is None:
        return None
    return run.clock.seconds(pd.Series(readings.t_ns)), readings.level


def _readings(run: Run, role: str) -> ScrapedReadings | None:
    return readings_of(run.frames, run_facts(run.frames), role)
