"""A seed always draws the same requests: recorded once for every shipped workload and plan.

`drawn_plans.json` holds, for each workload (and arm), the first three requests in full and the hash
of the first 200.
"""

import hashlib
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from harness.records import Outcome
from harness.run.run_config import RunConfig, make_load_plan, resolve_run
from harness.workload.abandon import RequestSpec
from harness.workload.load import AbandonLoad
from harness.workload.observed_latency import ObservedLatency
from harness.workload.plan import LoadPlan, read_plan, write_plan
from tests.harness.plans import ENGINE, server
from tests.made_up.rows import request_row

HERE = Path(__file__).parent
RECORDED: dict[str, Any] = json.loads((HERE / "drawn_plans.json").read_bytes())


def plan_as_read(workload: str, arm: str, folder: Path) -> LoadPlan:
    name = str(HERE / "all_plans.toml") if workload == "all_plans" else workload
    resolved = resolve_run(RunConfig(workload=name))
    for run in resolved.arm_runs:
        if run.arm == arm:
            resolved = resolved.for_arm(run, out=folder)
            break
    config = ENGINE | resolved.workload.engine.model_dump(exclude_none=True, exclude={"workers"})
    write_plan(make_load_plan(resolved, server(config), rows_dir=folder), folder / "plan.json")
    return read_plan(folder / "plan.json")


def told(spec: RequestSpec) -> list[Any]:
    way = None if spec.way is None else spec.way.value
    counts = spec.counts_from_start
    leaving = [spec.plan, spec.planned_abandon, way, counts, spec.delivery.value, spec.n]
    return [*leaving, spec.pause, spec.think_fraction, spec.max_tokens, spec.prompt_tokens]


def drawn(plan: LoadPlan) -> list[list[Any]]:
    seen, seed, load = ObservedLatency(), plan.run.seed, plan.load
    for more in ({"first_token_ns": 100_000_007}, {"finish_reason": "stop", "tokens_read": 35}):
        row = request_row("r", sent_ns=0, ended_ns=9, outcome=Outcome.COMPLETED, **more)
        seen.observe(row)
    assert isinstance(load, AbandonLoad)
    if plan.schedule is None:
        users = [(user, n) for user in range(10) for n in range(20)]
        return [told(load.draw_request(seed=seed, user=u, n=n, seen=seen)) for u, n in users]
    return [
        [
            arrival.offset_s,
            [] if (of := arrival.replayed) is None else [len(of.pages), of.page_tokens],
            *told(arrival.draw_request(load, seed=seed, seen=seen)),
        ]
        for arrival in islice(plan.planned_arrivals(), 200)
    ]


@pytest.mark.parametrize("name", RECORDED)
def test_the_same_seed_draws_the_same_requests(name: str, tmp_path: Path) -> None:
    workload, _, arm = name.partition("/")
    plan, recorded = plan_as_read(workload, arm, tmp_path), RECORDED[name]
    found = drawn(plan)
    assert (plan.run.seed, len(found)) == (recorded["seed"], recorded["number"])
    assert found[:3] == recorded["first"]
    assert hashlib.sha256(json.dumps(found).encode()).hexdigest() == recorded["sha256"]
