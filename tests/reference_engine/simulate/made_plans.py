"""Plans of simulations, made up: an open loop of short requests, of which some leave."""

from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from reference_engine.simulate.plan import (
    PLANNED,
    PLANNED_SCHEMA,
    SIMULATION,
    CellPlan,
    Lags,
    PlannedRequest,
    Simulation,
)

FLAGS = [
    *("--runner", "simulated", "--max-num-seqs", "4", "--num-blocks", "64"),
    *("--max-model-len", "512", "--max-num-batched-tokens", "64", "--sim-fixed-ms", "10"),
]
LAGS = Lags(
    name="made up",
    send_s=[0.001, 0.002],
    deliver_s=[0.001, 0.003],
    detect_s={"fin": [0.001, 0.002]},
    signal_s=[0.0005, 0.001],
    step_s=[0.0, 0.0],
    between_s=[0.0001, 0.0002],
)


def asked(number: int, **settings: Any) -> PlannedRequest:
    fields: dict[str, Any] = {
        "cell": 0,
        "number": number,
        "user": number,
        "offset_s": number * 0.05,
        "prompt_tokens": 20,
        "shared_prefix_tokens": 0,
        "pages": None,
        "page_tokens": None,
        "max_tokens": 30,
        "stay_tokens": None,
        "stream": True,
        "n": 1,
        "role": "user",
        "plan": "never",
        "way": "",
        "leave_after_tokens": None,
        "pause": "think",
        "pause_ns": None,
        "think_fraction": 0.5,
        "ttft_share": None,
        "arm": "",
        "text": None,
    }
    return PlannedRequest(**{**fields, **settings})


def open_loop(cell: int, *, num_requests: int = 60, gap_s: float = 0.05) -> list[PlannedRequest]:
    random = Random(cell)
    rows = []
    for number in range(num_requests):
        leaves = {"way": "fin", "leave_after_tokens": 5, "plan": "tokens:5"}
        rows.append(
            asked(
                number,
                cell=cell,
                offset_s=number * gap_s,
                prompt_tokens=random.randint(5, 40),
                max_tokens=random.randint(10, 40),
                think_fraction=random.random(),
                **(leaves if random.random() < 0.3 else {}),
            )
        )
    return rows


def write_plan(
    folder: Path,
    *,
    num_cells: int = 2,
    rows: Iterable[PlannedRequest] | None = None,
    **settings: Any,
) -> Simulation:
    cell = CellPlan(replicas=2, simulated=2)
    fields = {
        "seed": 7,
        "engine_flags": FLAGS,
        "lags": LAGS,
        "cells": [cell] * num_cells,
        "load_s": 4.0,
        "settle_s": 1.0,
    }
    plan = Simulation(**{**fields, **settings})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SIMULATION).write_bytes(msgspec.json.encode(plan))
    if rows is None:
        rows = [one for number in range(num_cells) for one in open_loop(number)]
    table = pa.Table.from_pylist([one._asdict() for one in rows], schema=PLANNED_SCHEMA)
    pq.write_table(table, folder / PLANNED)
    return plan
