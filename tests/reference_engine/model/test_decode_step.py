"""The step that is compiled or captured says what the eager model says, whatever its rows hold."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="needs the extra `engine` (torch)")

from reference_engine.config import EngineConfig  # noqa: E402
from reference_engine.core.scheduler import Scheduler  # noqa: E402
from reference_engine.model.batch import DecodeRows  # noqa: E402
from reference_engine.model.captured import (  # noqa: E402
    CapturedStep,
    bucket_for,
    bucket_sizes,
)
from reference_engine.model.decode_step import (  # noqa: E402
    Attend,
    DecodeStep,
    attend_by_block,
)
from reference_engine.model.torch_runner import TorchRunner  # noqa: E402
from tests.reference_engine.model.side_by_side import (  # noqa: E402
    SIZES,
    Side,
    step_side_by_side,
)

ON_GPU = pytest.param("paged_decode", "cuda", marks=pytest.mark.gpu)
ATTENTIONS = [("by_block", "cpu"), ("paged_decode", "cpu"), ON_GPU]


def attention(name: str, device: str = "cpu") -> Attend:
    if name == "by_block":
        return attend_by_block
    pytest.importorskip("triton", reason="needs triton")
    if torch.cuda.is_available() != (device == "cuda"):
        pytest.skip("kernels are compiled where there is a CUDA device, else interpreted")
    from reference_engine.model.paged_decode import paged_decode

    return paged_decode


def plain_attention(queries: Any, blocks: Any, tables: Any, positions: Any) -> Any:
    """Row by row, over the tokens up to its own, by the textbook."""
    outputs = []
    num_kv_heads = blocks.shape[2] // 2
    for query, table, position in zip(queries, tables, positions, strict=True):
        seen = blocks[table].flatten(0, 1)[: position + 1]
        heads = torch.arange(len(query)) // (len(query) // num_kv_heads)
        keys, values = seen[:, :num_kv_heads][:, heads], seen[:, num_kv_heads:][:, heads]
        scores = torch.einsum("hd,lhd->hl", query, keys) * query.shape[1] ** -0.5
        outputs.append(torch.einsum("hl,lhd->hd", scores.softmax(-1), values))
    return torch.stack(outputs)


LENGTHS = [1, 15, 16, 17, 3, 256, 257, 300]  # one token, full blocks, one more; two parts


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(4, 2, 64, 16), (9, 3, 64, 16), (8, 1, 128, 16), (6, 2, 48, 12)],
)
@pytest.mark.parametrize(("name", "device"), ATTENTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_reads_each_row_up_to_its_token(
    name: str,
    device: str,
    dtype: Any,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
) -> None:
    attend = attention(name, device)
    generator = torch.Generator().manual_seed(1)
    positions = torch.tensor(LENGTHS) - 1
    width = -(-max(LENGTHS) // block_size)
    # Blocks have been used before, by any row, and a table's rest is block 0.
    shuffled = torch.randperm(len(LENGTHS) * width, generator=generator).view(len(LENGTHS), width)
    is_used = torch.arange(width) * block_size <= positions[:, None]
    tables = torch.where(is_used, shuffled, 0)
    shape = (len(LENGTHS) * width, block_size, 2 * num_kv_heads, head_dim)
    blocks = torch.randn(shape, generator=generator).to(dtype)
    queries = torch.randn(len(LENGTHS), num_heads, head_dim, generator=generator).to(dtype)
    expected = plain_attention(queries.float(), blocks.float(), tables, positions).to(dtype)
    inputs = [one.to(device) for one in (queries, blocks, tables, positions)]
    attended = attend(*inputs)
    torch.testing.assert_close(attended.cpu(), expected)
    # Each row's sums are its own: alone, and with another table width, it has the same bits.
    if name == "paged_decode":
        queries, blocks, tables, positions = inputs
        alone = attend(queries[3:4], blocks, tables[3:4, :2], positions[3:4])
        assert torch.equal(alone, attended[3:4])


def test_the_kernels_compile_for_a_gpu_without_one() -> None:
    """In a process of its own: this one's kernels are interpreted."""
    pytest.importorskip("triton", reason="needs triton")
    command = [sys.executable, "-m", "tests.reference_engine.model.compile_kernels"]
    environment = {key: one for key, one in os.environ.items() if key != "TRITON_INTERPRET"}
    subprocess.run(command, env=environment, check=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graphs_answer_as_eager_steps_do_while_requests_come_and_go() -> None:
    sides = make_side(device="cuda"), make_side(device="cuda", compile=True)
    assert isinstance(sides[1].runner.whole_step, CapturedStep)
    step_side_by_side(sides, 120)


def test_sizes_of_graphs_reach_up_to_the_most_rows() -> None:
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(2) == [1, 2]
    assert bucket_sizes(8) == [1, 2, 4, 8]
    assert bucket_sizes(11) == [1, 2, 4, 8, 11]
    assert [bucket_for(n, [1, 2, 4, 8, 11]) for n in (1, 2, 3, 5, 8, 9, 11)] == [
        *(1, 2, 4, 8, 8, 11, 11)
    ]


class Replays:
    """Records by keeping the computation; a replay overwrites the first result, as a graph does."""

    def __init__(self) -> None:
        self.num_rows: list[int] = []

    def record(self, compute: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        result = compute()
        self.num_rows.append(len(result))

        def replay() -> None:
            result.copy_(compute())

        return replay, result


def captured(runner: TorchRunner, attend: Attend, recorder: Replays) -> CapturedStep:
    step = DecodeStep(runner.model, runner.bias, SIZES["block_size"], attend)
    pools = [cache.blocks for cache in runner.caches]
    rows = DecodeRows(SIZES["max_num_seqs"], 16, SIZES["block_size"], SIZES["num_blocks"])
    with torch.inference_mode():
        return CapturedStep(step, pools, rows, max_rows=5, max_blocks=16, recorder=recorder)


@pytest.mark.parametrize(
    ("name", "preemption"),
    [("by_block", "recompute"), ("by_block", "swap"), ("paged_decode", "recompute")],
)
def test_captured_steps_answer_as_eager_ones_do_while_requests_come_and_go(
    name: str, preemption: str
) -> None:
    """Rows that are padded, blocks that are freed and used again, preemptions, temperatures."""
    attend, recorder = attention(name), Replays()
    sides = make_side(preemption=preemption), make_side(preemption=preemption)
    sides[1].runner.whole_step = captured(sides[1].runner, attend, recorder)
    assert recorder.num_rows == [5, 4, 2, 1], "the largest first"
    step_side_by_side(sides, 60 if name == "by_block" else 12)
    if preemption == "swap":
        assert sides[1].scheduler.counters.preemptions > 0


def make_side(**settings: Any) -> Side:
    config = EngineConfig(**SIZES | settings)
    runner = TorchRunner(config)
    return Side(runner, Scheduler(config, runner.tokenizer.eos_token_ids))
