from collections import Counter
from typing import Any

import pytest

from reference_engine.config import EngineConfig
from reference_engine.faults import parse_faults
from tests.harness.simulate.lockstep import COST, Lockstep

SMALL = {"max_num_seqs": 4, "num_blocks": 24, "block_size": 4, "max_model_len": 96}
CONFIGS: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 24},
    {"max_num_batched_tokens": 16, "max_num_partial_prefills": 1},
    {"scheduling_policy": "priority"},
    {"scheduling_policy": "priority", "victim": "rebuild-cost", "reserve_full_isl": False},
    {"preemption": "swap", "swap_space_blocks": 16, "reserve_full_isl": False},
    {"reclaim": "immediate", "reserve_full_isl": False},
    {"enable_prefix_caching": False, "watermark": 0.1},
    {"force_reclaim_above": 0.5, "reserve_full_isl": False},
    {"async_scheduling": True, "reserve_full_isl": False},
    {"async_scheduling": True, "preemption": "swap", "swap_space_blocks": 16, "num_blocks": 26},
]


def config_of(settings: dict[str, Any]) -> EngineConfig:
    return EngineConfig(runner="simulated", step_cost=COST, **{**SMALL, **settings})


@pytest.mark.parametrize("settings", CONFIGS, ids=lambda one: ", ".join(map(str, one)) or "usual")
def test_replica_decides_as_the_live_engine_does(settings: dict[str, Any]) -> None:
    both = Lockstep(7, config_of(settings))
    both.run(300)
    assert both.live.scheduler.counters.steps > 250


def test_requests_were_cancelled_in_every_state() -> None:
    met, preemptions = Counter[str](), 0
    tight = {"max_num_batched_tokens": 24, "reserve_full_isl": False, "num_blocks": 26}
    for seed in range(3):
        both = Lockstep(seed, config_of(tight))
        both.run(300)
        met += both.met
        preemptions += both.live.scheduler.counters.preemptions
    usual = {"waiting", "prefill", "decode", "last token", "preempted", "finished", "just sent"}
    assert usual <= met.keys()
    assert preemptions > 10


@pytest.mark.parametrize(
    "fault",
    [
        *("lose-abort=0.3", "leak-blocks=1", "hold-blocks=0.02", "leak-slot", "wedge-after=40"),
        *("stall-survivors-on-abort=0.01", "prefill-runs-on", "clean-up-on-traffic"),
        "running-abort-ends-running",
    ],
)
def test_faults_do_the_same_in_both(fault: str) -> None:
    both = Lockstep(3, config_of({"num_blocks": 60, "max_num_seqs": 12}), parse_faults([fault]))
    both.run(150)


@pytest.mark.slow
def test_ten_thousand_steps_with_aborts_are_equal() -> None:
    for seed in range(40):
        both = Lockstep(seed, config_of(CONFIGS[seed % len(CONFIGS)]))
        both.run(1000)
