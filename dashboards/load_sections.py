"""The sections about everybody else: slots, KV cache, hardware, survivors, the floor."""

from dashboards import timelines
from dashboards.gauges import kv_usage, preempted_ns, requests_in
from dashboards.ladders import CLIENT_TIMES, client_times
from dashboards.section import Picture, Section, levels_in_words, median_and_p99, over_time
from dashboards.source import Run
from dashboards.timelines import Marks, column_series


def slots(run: Run) -> Section:
    section = Section(
        name="slots",
        title="Batch slots over time",
        shows="Requests in a slot and in the queue; each mark on the axis is a user who left, each "
        "triangle a request that was preempted.",
        good="slots stay full while anybody waits, and nothing is left when the load has ended.",
    )
    running = requests_in(run, "running")
    if running is None:
        return section.without("No step log, and no scrape showed how many requests ran.")
    waiting = requests_in(run, "waiting")
    marks = _marks(run)
    timeline = timelines.batch_slots(running, waiting, marks, run.clock)
    levels = levels_in_words(
        {"running": running} | ({} if waiting is None else {"waiting": waiting})
    )
    alt = f"Requests over the run, {levels} {_marks_in_words(marks)}"
    return section.drawn(over_time(timeline, "slots", alt))


def _marks(run: Run) -> Marks:
    abandons = run.frames.requests["abandoned_ns"].dropna()
    return Marks(
        abandons=run.clock.seconds(abandons), preemptions=run.clock.seconds(preempted_ns(run))
    )


def _marks_in_words(marks: Marks) -> str:
    return (
        f"Marked: users who left, {len(marks.abandons):,}; preemptions, {len(marks.preemptions):,}."
    )


def kv(run: Run) -> Section:
    section = Section(
        name="kv",
        title="KV cache over time",
        shows="How much of the KV cache is held by requests; marks as above.",
        good="it falls with every abandon and ends where it began.",
    )
    usage = kv_usage(run)
    if usage is None:
        return section.without("No step log, and no scrape showed the KV cache.")
    marks = _marks(run)
    timeline = timelines.kv_blocks(
        usage.series, marks, run.clock, unit=usage.unit, total=usage.total
    )
    levels = levels_in_words({usage.unit: usage.series})
    alt = f"KV cache over the run, {levels} {_marks_in_words(marks)}"
    return section.drawn(over_time(timeline, "kv", alt))


def hardware(run: Run) -> Section:
    section = Section(
        name="hardware",
        title="Processor and GPU over time",
        shows="Who was busy: the server's processes, the load, and the GPU where there is one.",
        good="the load's processes leave the server room; a busy load measures itself.",
    )
    pictures = [*_gpu_pictures(run), *_cpu_pictures(run)]
    if not pictures:
        return section.without("Neither processor nor GPU were sampled in this run.")
    if run.frames.gpu.empty:
        section = section.without("No GPU was sampled, so only the processor is shown.")
    return section.drawn(*pictures)


def _gpu_pictures(run: Run) -> list[Picture]:
    if run.frames.gpu.empty:
        return []
    cards = list(run.frames.gpu.groupby("gpu"))
    kinds = (
        ("utilisation", "GPU busy, share of time", 1.0),
        ("memory_bytes", "GPU memory, GiB", 2.0**-30),
        ("power_w", "GPU power, watts", 1.0),
    )
    pictures = []
    for column, title, scale in kinds:
        if run.frames.gpu[column].isna().all():
            continue
        series = {
            f"GPU {number}": column_series(rows, column, run.clock, scale=scale)
            for number, rows in cards
        }
        timeline = timelines.lines(series, run.clock, y_title=title)
        alt = f"{title}, over the run. {levels_in_words(series)}"
        pictures.append(over_time(timeline, f"gpu-{column.partition('_')[0]}", alt))
    return pictures


def _cpu_pictures(run: Run) -> list[Picture]:
    if run.frames.cpu.empty:
        return []
    series = {
        str(process): column_series(rows, "cores", run.clock)
        for process, rows in run.frames.cpu.groupby("process")
    }
    timeline = timelines.lines(series, run.clock, y_title="processor cores in use")
    alt = f"Processor cores in use over the run, by process. {levels_in_words(series)}"
    return [over_time(timeline, "cpu", alt)]


def survivors(run: Run) -> Section:
    section = Section(
        name="survivors",
        title="What the others felt",
        shows="Times of users who were to stay to the end: median (dot), p90 (diamond), p99 (bar).",
        good="no worse than in a run where nobody leaves; only a comparison of two runs can tell.",
    )
    present = {
        name: run.metrics[name]
        for name, _ in CLIENT_TIMES
        if name in run.metrics and run.metrics[name].n
    }
    if not present:
        return section.without(
            run.summary.not_measurable.get("ttft_s", "Nobody stayed to the end.")
        )
    words = " ".join(
        f"{name[:-2].upper().replace('_', ' ')}: {median_and_p99(one)}"
        for name, one in present.items()
    )
    return section.drawn(
        Picture(
            name="survivors",
            figure=client_times(present),
            alt=f"Median, 90th and 99th percentile of the times of surviving users. {words}",
        ),
    )


def lag(run: Run) -> Section:
    section = Section(
        name="lag",
        title="The measurement floor",
        shows="How late the load process noticed each tick of its own timer while there was load: "
        "what the harness itself adds. Its 99th percentile is the floor.",
        good="far below every figure above; a figure smaller than this is not to be believed.",
    )
    is_load = run.frames.client["t_ns"].between(run.clock.started_ns, run.clock.ended_ns)
    ticks = run.frames.client[is_load]
    if ticks.empty:
        return section.without("The load did not watch itself in this run.")
    series = {
        f"load process {number}": column_series(rows, "lag_ns", run.clock, scale=1e-6)
        for number, (_, rows) in enumerate(ticks.groupby("pid"), start=1)
    }
    timeline = timelines.lines(series, run.clock, y_title="late by, milliseconds")
    return section.drawn(
        over_time(
            timeline,
            "lag",
            f"Lag of the load process over the run, in milliseconds. {levels_in_words(series)} "
            + median_and_p99(run.metrics.get("client_lag_s")),
        ),
    )
