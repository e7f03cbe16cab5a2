"""Memory is reckoned before anything is loaded: each part, and the advice where it is short."""

from dataclasses import replace

import pytest
from msgspec import structs

from reference_engine.config import EngineConfig, ModelDtype
from reference_engine.model.memory import (
    CUDA_CONTEXT,
    CUDA_GRAPHS,
    DoesNotFitError,
    block_bytes,
    blocks_that_fit,
    check_fit,
    reckon,
)
from reference_engine.model.shapes import MODEL_SHAPES, SMOLLM2_SHAPE, ModelShape, num_weights

GPU = EngineConfig(model="8b", dtype="bfloat16", device="cuda", compile=True)


def shape(model: str, dtype: ModelDtype = "bfloat16") -> ModelShape:
    return structs.replace(MODEL_SHAPES[model], dtype=dtype)


def test_shapes_have_the_weights_of_their_models() -> None:
    """As their model cards count them."""
    assert num_weights(MODEL_SHAPES["8b"]) == 8_030_261_248
    assert num_weights(MODEL_SHAPES["1b"]) == 1_235_814_400
    assert num_weights(SMOLLM2_SHAPE) == 134_515_008


def test_every_part_is_reckoned_by_hand() -> None:
    assert (block_bytes(shape("8b"), 16), block_bytes(shape("1b"), 16)) == (2 * 2**20, 2**19)
    memory = reckon(shape("8b"), GPU, on_gpu=True)
    assert memory.weights == 2 * (8_030_261_248 + 2 * 4096 * 128)  # with cosines and sines
    assert memory.kv_cache == 4097 * 2 * 2**20
    assert memory.activations == 512 * 2 * (3 * 4096 + 48 * 128 + 4 * 14336)
    assert memory.logits == 8 * 128_256 * (2 + 4 * 4)
    # 64 parts of 64 tokens: for each its sums, their maximum and their weight
    assert memory.partial_sums == 8 * 32 * 64 * (128 + 2) * 4
    assert (memory.cuda_graphs, memory.cuda_context) == (CUDA_GRAPHS, CUDA_CONTEXT)
    assert memory.read_buffer == 0
    eager = reckon(shape("8b"), structs.replace(GPU, compile=False), on_gpu=True)
    assert memory.total - eager.total == CUDA_GRAPHS


def test_a_cpu_has_a_read_buffer_and_nothing_of_cuda() -> None:
    memory = reckon(shape("tiny", "float32"), EngineConfig(), on_gpu=False)
    assert memory.read_buffer == 2 * 8 * 4096 * 2 * 2 * 64 * 4
    assert memory.cuda_context == memory.cuda_graphs == memory.partial_sums == 0


def test_one_block_more_than_fits_does_not_fit() -> None:
    budget, one = 70_000_000_000, block_bytes(shape("8b"), 16)
    most = blocks_that_fit(reckon(shape("8b"), GPU, on_gpu=True), budget, one)
    full, more = (structs.replace(GPU, num_blocks=most + extra) for extra in (0, 1))
    assert budget - one < reckon(shape("8b"), full, on_gpu=True).total <= budget
    check_fit(reckon(shape("8b"), full, on_gpu=True), budget, "that are free", full)
    with pytest.raises(DoesNotFitError, match=r"do not fit into the 70\.0 GB that are free: lower"):
        check_fit(reckon(shape("8b"), more, on_gpu=True), budget, "that are free", more)


@pytest.mark.parametrize(
    ("available", "advice"),
    [
        (20_000_000_000, "lower --num-blocks$"),
        (17_500_000_000, "lower --max-model-len and --num-blocks$"),
        (8_000_000_000, "take --model 1b or tiny$"),
    ],
)
def test_the_advice_is_what_would_help(available: int, advice: str) -> None:
    with pytest.raises(DoesNotFitError, match=advice):
        check_fit(reckon(shape("8b"), GPU, on_gpu=True), available, "that are free", GPU)


def test_small_parts_are_named_together() -> None:
    memory = reckon(shape("8b"), GPU, on_gpu=True)
    assert str(memory) == (
        "16.1 GB of weights, 8.6 GB of KV cache, 0.6 GB of CUDA context, 0.5 GB of CUDA graphs, "
        "0.1 GB of activations"
    )
    many = replace(memory, logits=40_000_000, partial_sums=40_000_000)
    assert str(many).endswith("0.1 GB of activations, 0.1 GB of smaller parts")
