"""Copies of blocks to the host and back: the right ones, whole, and in no order in particular."""

from typing import Any

import pytest

from reference_engine.config import EngineConfig, EngineConfigError
from reference_engine.core.step import StepPlan

torch: Any = pytest.importorskip("torch", reason="needs the extra `engine` (torch)")
from reference_engine.model.host_cache import HostCache  # noqa: E402
from reference_engine.model.torch_runner import TorchRunner  # noqa: E402

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@DEVICES
def test_blocks_come_back_as_they_went(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    layers = [torch.rand(8, 3, device=device) for _ in range(2)]
    before = [layer.clone() for layer in layers]
    host = HostCache(layers, 6, free=10**9)
    host.copy(StepPlan(step=1, swap_out=[(7, 0), (2, 1), (3, 4), (5, 3)]))
    for layer in layers:
        layer[[2, 3, 5, 7]] = 0.0
    host.copy(StepPlan(step=2, swap_in=[(1, 0), (4, 6), (3, 5), (0, 2)]))
    for layer, old in zip(layers, before, strict=True):
        assert torch.equal(layer[[0, 6, 5, 2]], old[[2, 3, 5, 7]])
        assert torch.equal(layer[[1, 4]], old[[1, 4]]), "the others are as they were"


@DEVICES
def test_what_another_worker_has_computed_comes_in_by_the_host(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    ours, theirs = (
        [torch.rand(8, 3, device=device).bfloat16() for _ in range(2)] for _ in range(2)
    )
    data = HostCache(ours, 0, free=10**9).export_blocks([6, 1, 2])
    host = HostCache(theirs, 6, free=10**9)
    assert len(data) == 3 * host.block_bytes
    host.import_blocks([5, 0, 3], data)
    host.copy(StepPlan(step=1, swap_in=[(5, 4), (0, 7), (3, 0)]))
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(other[[4, 7, 0]], mine[[6, 1, 2]])


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_step_may_do_nothing_but_copy(batch_invariant: bool) -> None:
    config = EngineConfig(
        device="cpu",
        max_model_len=64,
        num_blocks=4,
        preemption="swap",
        batch_invariant=batch_invariant,
    )
    assert not TorchRunner(config).launch(StepPlan(step=1, swap_out=[(3, 0)]))().tokens


def test_more_blocks_than_the_host_has_memory_for_are_refused_in_one_sentence() -> None:
    why = "swap_space_blocks: 1,000,000,000,000 blocks .* are free: lower --swap-space-blocks, or "
    with pytest.raises(EngineConfigError, match=why):
        HostCache([torch.zeros(1, 64)], 10**12, free=10**9)


def test_blocks_that_the_host_cannot_pin_are_refused_with_what_would_help() -> None:
    def allocate(*_: object) -> Any:
        raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported ...")

    why = (
        r"^swap_space_blocks: 6 blocks .* memory \(CUDA error: out of memory\): lower --swap-space"
    )
    with pytest.raises(EngineConfigError, match=why):
        HostCache([torch.zeros(1, 64)], 6, free=10**9, allocate=allocate)
