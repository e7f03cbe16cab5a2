"""The simulated runner takes the time that its cost model says, and no other."""

import subprocess
import sys

import pytest

from reference_engine.config import StepCost
from reference_engine.core.request import Request, Sampling
from reference_engine.core.step import StepPlan
from reference_engine.model.runners import SimulatedRunner


def request(num_prompt: int, num_computed: int) -> Request:
    made = Request(f"r{num_prompt}", [5] * num_prompt, Sampling(max_tokens=4))
    made.num_computed_tokens = num_computed
    return made


def test_a_step_costs_its_parts() -> None:
    slept: list[float] = []
    cost = StepCost(fixed_s=1.0, prefill_token_s=0.1, decode_token_s=0.01, swap_block_s=0.5)
    runner = SimulatedRunner(cost, sleep=slept.append)
    decoding, prefilling = request(9, 8), request(20, 0)
    scheduled = {decoding: 1, prefilling: 12}
    plan = StepPlan(
        step=1,
        scheduled=scheduled,
        partial=[prefilling],
        closely={prefilling},
        swap_in=[(0, 1), (1, 2)],
    )
    sampled = runner.launch(plan)()
    assert slept == [pytest.approx(1.0 + 12 * 0.1 + 0.01 + 2 * 0.5)]
    assert list(sampled.tokens) == ["r9"], "a chunk that does not end its prompt samples nothing"


def test_tokens_follow_from_seed_and_position() -> None:
    runner = SimulatedRunner(StepCost(), sleep=lambda _: None)
    tokens: list[int] = []
    for num_prompt in (5, 6, 5):
        plan = StepPlan(step=1, scheduled={request(num_prompt, 0): num_prompt})
        tokens += runner.launch(plan)().tokens.values()
    assert tokens[0] == tokens[2] != tokens[1]


def test_the_engine_starts_without_torch_and_without_what_checkpoints_need() -> None:
    modules = "reference_engine.__main__, reference_engine.worker.service"
    heavy = {"torch", "tokenizers", "safetensors", "jinja2", "gguf"}
    code = f"import sys, {modules}; sys.exit(len({heavy} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_model_is_made_without_torchs_compiler_which_takes_seconds_to_import() -> None:
    pytest.importorskip("torch", reason="needs the extra `engine` (torch)")
    code = """if True:
        import sys
        from reference_engine.config import EngineConfig
        from reference_engine.model.torch_runner import TorchRunner
        TorchRunner(EngineConfig(device="cpu"))
        sys.exit("torch._dynamo" in sys.modules)
    """
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
