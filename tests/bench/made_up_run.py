"""A large run that never was, and what its analysis takes: a child process of `analysis`.

`python -m tests.bench.made_up_run write FOLDER REQUESTS` writes the run's folder, and
`... analyse FOLDER` reads it, computes the summary and tells how long it took and how much memory.
"""

import json
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from harness.analysis.summary import summarise
from harness.manifest import Idle, Manifest, TargetFacts, Window
from harness.records import ClientSample, MetricSample, RequestRow
from harness.store import RunFolder, RunRows, schema_of

TOKENS: Final = 100
USERS: Final = 1_000
STEP_NS: Final = 20_000_000
TTFT_STEPS: Final = 3
REQUEST_NS: Final = (TTFT_STEPS + TOKENS) * STEP_NS
TICK_NS: Final = 10_000_000
SCRAPE_NS: Final = 250_000_000
BATCH: Final = 50_000
ORIGIN_NS: Final = 1_000_000_000_000


def write(folder: RunFolder, requests: int) -> None:
    """The folder as a run leaves it, one batch of rows after the other."""
    rng = np.random.default_rng(1)
    ends_ns = ORIGIN_NS + -(-requests // USERS) * REQUEST_NS + STEP_NS
    folder.write_rows(RunRows(server_metrics=list(_page(ends_ns))))
    _write(folder, "requests", RequestRow, _requests(rng, requests))
    _write(folder, "client", ClientSample, iter([_ticks(rng, ends_ns)]))
    folder.write_manifest(_manifest(ends_ns))


def _write(folder: RunFolder, name: str, record: Any, tables: Iterator[dict[str, Any]]) -> None:
    schema = schema_of(record)
    with pq.ParquetWriter(folder.path / f"{name}.parquet", schema) as writer:
        for columns in tables:
            arrays = [_array(columns[field.name], field) for field in schema]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


def _array(values: Any, field: pa.Field) -> pa.Array:
    return values if isinstance(values, pa.Array) else pa.array(values, type=field.type)


def _requests(rng: np.random.Generator, requests: int) -> Iterator[dict[str, Any]]:
    """User after user, all of them all the time; every other one leaves after its last token."""
    for first in range(0, requests, BATCH):
        number = np.arange(first, min(first + BATCH, requests))
        n, is_left = len(number), number % 2 == 0
        jitter_ns = rng.integers(0, STEP_NS // 4, size=n)
        sent_ns = ORIGIN_NS + number // USERS * REQUEST_NS + jitter_ns
        steps = np.cumsum(rng.integers(STEP_NS - 10**6, STEP_NS + 10**6, size=(n, TOKENS)), axis=1)
        times = sent_ns[:, None] + TTFT_STEPS * STEP_NS + steps
        offsets = np.arange(0, (n + 1) * TOKENS, TOKENS, dtype=np.int32)
        left_ns = times[:, -1] + rng.integers(0, STEP_NS, size=n)
        ended_ns = np.where(is_left, left_ns, times[:, -1])
        yield _as_by_default(n) | {
            "request_id": [f"walkaway-0-{k}" for k in number.tolist()],
            "arm": ["main"] * n,
            "role": ["user"] * n,
            "user": number % USERS,
            "stream": np.ones(n, dtype=bool),
            "planned_abandon": pa.array(np.full(n, TOKENS), mask=~is_left),
            "think_ns": pa.array(left_ns - times[:, -1], mask=~is_left),
            "max_tokens": np.where(is_left, 1000, TOKENS),
            "intended_start_ns": sent_ns,
            "sent_ns": sent_ns,
            "first_token_ns": times[:, 0],
            "last_token_ns": times[:, -1],
            "abandoned_ns": pa.array(left_ns, mask=~is_left),
            "ended_ns": ended_ns,
            "wire_close": pa.array(["fin"] * n, mask=~is_left),
            "tokens_read": np.full(n, TOKENS),
            "token_times_ns": pa.ListArray.from_arrays(offsets, times.ravel()),
            "event_tokens": pa.ListArray.from_arrays(offsets, np.ones(n * TOKENS, dtype=np.int64)),
            "token_counting": ["usage"] * n,
            "outcome": np.where(is_left, "abandoned", "completed").tolist(),
            "status_code": np.full(n, 200),
            "finish_reason": pa.array(["length"] * n, mask=is_left),
            "prompt_tokens": np.full(n, 64),
            "completion_tokens": pa.array(np.full(n, TOKENS), mask=is_left),
            "plan": np.where(is_left, f"tokens:{TOKENS}", "never").tolist(),
            "way": np.where(is_left, "fin", "").tolist(),
            "delivery": ["stream"] * n,
            "n": np.ones(n, dtype=np.int64),
        }


def _as_by_default(n: int) -> dict[str, Any]:
    """So many times what a row holds where nothing is said of it."""
    defaults = {field.name: field.default for field in msgspec.structs.fields(RequestRow)}
    columns: dict[str, Any] = {}
    for field in schema_of(RequestRow):
        default = defaults[field.name]
        value = None if default is msgspec.NODEFAULT else default
        columns[field.name] = pa.repeat(pa.scalar(value, type=field.type), n)
    return columns


def _ticks(rng: np.random.Generator, ends_ns: int) -> dict[str, Any]:
    t_ns = np.arange(ORIGIN_NS, ends_ns, TICK_NS)
    return {
        "t_ns": t_ns,
        "pid": np.full(len(t_ns), 17),
        "lag_ns": rng.integers(20_000, 200_000, size=len(t_ns)),
        "cpu_s": (t_ns - ORIGIN_NS) / 2e9,
        "streams": np.full(len(t_ns), USERS),
        "host": ["here"] * len(t_ns),
    }


def _page(ends_ns: int) -> Iterator[MetricSample]:
    for name, source in _SPEC["metrics"].items():
        for t_ns in range(ORIGIN_NS, ends_ns, SCRAPE_NS):
            value = float(USERS) if name == "running" else (t_ns - ORIGIN_NS) / 1e6
            yield MetricSample(
                t_ns=t_ns, duration_ns=2_000_000, name=source["name"], labels="{}", value=value
            )


_SPEC: Final[dict[str, Any]] = {
    "metrics": {
        "running": {"name": "running", "trust": "exact", "lag_steps": 1.0},
        "generated_tokens": {"name": "generated", "trust": "exact", "lag_steps": 1.0},
        "prompt_tokens": {"name": "prompts", "trust": "exact", "lag_steps": 1.0},
    }
}


def _manifest(ends_ns: int) -> Manifest:
    return Manifest(
        run_id="made-up",
        status="complete",
        created_at="2026-01-01T00:00:00+00:00",
        command=["walkaway"],
        seed=1,
        versions={},
        hardware={},
        workload={"name": "made-up"},
        target=TargetFacts(
            engine="openai", url="", metrics_urls=[], model="m", started_by_us=False, spec=_SPEC
        ),
        window=Window(load_started_ns=ORIGIN_NS, load_ended_ns=ends_ns, settled_ns=ends_ns),
        settle_s=2.0,
        scrape_interval_s=SCRAPE_NS / 1e9,
        idle=Idle(before={"running": 0.0}, after={"running": 0.0}),
    )


def analyse(folder: RunFolder) -> dict[str, float]:
    """Seconds from the folder to the summary, and the most memory that this process ever held."""
    started_s = perf_counter()
    frames = folder.frames()
    read_s = perf_counter() - started_s
    summary = summarise(frames)
    seconds = perf_counter() - started_s
    assert sum(summary["outcomes"].values()) == len(frames.requests)
    peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"seconds": seconds, "read_s": read_s, "peak_gib": peak_gib}


def main() -> None:
    what, folder = sys.argv[1], RunFolder(Path(sys.argv[2]))
    told: dict[str, float] = {}
    if what == "write":
        write(folder, int(sys.argv[3]))
    else:
        told = analyse(folder)
    print(json.dumps(told))  # noqa: T201


if __name__ == "__main__":
    main()
