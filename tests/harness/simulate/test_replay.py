import asyncio
from collections import Counter

import pytest

from reference_engine.flags import read_settings
from tests.harness.simulate.replay import Crowd, Replay, decided, decisions_of, log_of
from tests.reference_engine.running_engine import running

SIMULATED = ["--runner", "simulated", "--sim-fixed-ms", "1"]
TORCH = ["--runner", "torch", "--device", "cpu"]
SIZES = ["--max-num-seqs", "8", "--num-blocks", "48", "--max-model-len", "512"]
SIZES += ["--max-num-batched-tokens", "96", "--no-reserve-full-isl"]


def replay_live_run(runner: list[str], steps: int) -> Counter[str]:
    """The live run's events by name, once each of its steps has been decided again."""
    with running(*runner, *SIZES) as engine:
        crowd = Crowd(engine, seed=11, users=14)
        asyncio.run(crowd.run(steps))
        while engine.metric("vllm:num_requests_running"):
            pass
        log = log_of(engine)
    replay = Replay(log, crowd.asked, read_settings([*SIMULATED, *SIZES], {}).config)
    assert len(log.steps) >= steps
    for step, stepped in replay.run():
        assert decided(stepped) == decisions_of(step), f"step {step['step']}"
    return Counter(one["event"] for one in log.events)


@pytest.mark.e2e
def test_steps_of_a_live_server_are_decided_again() -> None:
    happened = replay_live_run(SIMULATED, 300)
    assert happened["abort_received"] > 10


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand_steps_of_a_live_server_are_decided_again() -> None:
    happened = replay_live_run(SIMULATED, 10_000)
    assert happened["abort_received"] > 500
    assert happened["preempted"] > 50


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_steps_of_a_model_are_decided_again() -> None:
    """Torch computes; the replica only decides."""
    pytest.importorskip("torch")
    happened = replay_live_run(TORCH, 1_000)
    assert happened["abort_received"] > 25
    assert happened["preempted"] > 5
