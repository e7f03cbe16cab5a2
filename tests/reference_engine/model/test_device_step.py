"""A step on a device: its kernels against plain operations, and whole steps against eager ones.

Without a device the kernels run in Triton's interpreter.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

torch: Any = pytest.importorskip("torch", reason="needs the extra `engine` (torch)")
pytest.importorskip("triton", reason="needs triton")

from reference_engine.config import EngineConfig  # noqa: E402
from reference_engine.core.request import Request, Sampling  # noqa: E402
from reference_engine.core.scheduler import Scheduler  # noqa: E402
from reference_engine.model.attention import rotate_  # noqa: E402
from reference_engine.model.batch import Span  # noqa: E402
from reference_engine.model.checkpoint import read_checkpoint  # noqa: E402
from reference_engine.model.device_step import (  # noqa: E402
    DeviceStep,
    GraphRecorder,
    build_device_step,
    captured_shapes,
)
from reference_engine.model.fused import FusedOperations, rotate_and_store  # noqa: E402
from reference_engine.model.llama import PlainOperations, RMSNorm, RotaryTable  # noqa: E402
from reference_engine.model.memory import MOST_PARTS, part_tokens  # noqa: E402
from reference_engine.model.paged_attention import attend  # noqa: E402
from reference_engine.model.shapes import MODEL_SHAPES, ModelShape  # noqa: E402
from reference_engine.model.step_inputs import (  # noqa: E402
    Limits,
    StepRows,
    StepShape,
    prompt_tile,
)
from reference_engine.model.torch_runner import TorchRunner  # noqa: E402
from tests.reference_engine.model.side_by_side import (  # noqa: E402
    SIZES,
    Side,
    step_side_by_side,
)
from tests.reference_engine.model.textbook import SHAPES, Shape, attention  # noqa: E402

HAS_GPU = torch.cuda.is_available()
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# First and last position of the tokens that a step computes of each request: a decode of the first
# token, in a full block, in a new one, of a long context; prompts that are whole, that continue in
# the middle of a block, after a prefix that was cached, with one token, over several tiles.
SPANS = [
    *((0, 1), (15, 16), (16, 17), (299, 300), (256, 257)),
    *((0, 40), (37, 60), (16, 35), (63, 128), (255, 257), (0, 2)),
]


def need(device: str) -> None:
    if (device == "cuda") != HAS_GPU:
        pytest.skip("kernels are compiled where there is a CUDA device, else interpreted")


def made_spans(shape: Shape, generator: Any) -> list[Span]:
    numbers = iter(torch.randperm(400, generator=generator).tolist())
    spans = []
    for number, (first, last) in enumerate(SPANS):
        request = Request(f"r{number}", [5] * last, Sampling(max_tokens=4))
        request.block_table = [next(numbers) for _ in range(-(-last // shape.block_size))]
        spans.append(Span(request, first, last, request.block_table))
    return spans


def in_rows(spans: list[Span]) -> Iterator[tuple[Span, int]]:
    for span in sorted(spans, key=lambda span: span.last - span.first > 1):
        for position in range(span.first, span.last):
            yield span, position


@DEVICES
@DTYPES
@pytest.mark.parametrize("shape", SHAPES)
def test_ragged_prompts_and_decodes_attend_as_by_the_textbook(
    shape: Shape, dtype: Any, device: str
) -> None:
    need(device)
    generator = torch.Generator().manual_seed(1)
    spans = made_spans(shape, generator)
    tile = prompt_tile(shape.num_heads // shape.num_kv_heads)
    limits = Limits(rows=12, tokens=256, blocks=64, block_size=shape.block_size, tile=tile)
    rows = StepRows(limits, 400, torch.device(device))
    inputs = rows.inputs(limits.mixed_shape(256))
    rows.fill(spans, limits.mixed_shape(256))
    blocks = shape.random_blocks(401, generator).to(dtype)
    # The heads of queries, keys and values lie in one tensor.
    heads = torch.randn(256, shape.num_heads + 3, shape.head_dim, generator=generator).to(dtype)
    queries = heads[:, : shape.num_heads]
    attended = heads.clone().to(device)[:, : shape.num_heads]
    attend(attended, blocks.to(device), inputs)
    rows_of_spans = list(in_rows(spans))
    expected = torch.stack(
        [
            attention(query, blocks[torch.tensor(span.request.block_table)], position)
            for query, (span, position) in zip(queries, rows_of_spans, strict=False)
        ]
    )
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {}
    torch.testing.assert_close(attended[: len(expected)].cpu(), expected.to(dtype), **tolerance)


@DEVICES
def test_a_row_has_the_same_bits_alone_and_among_others(device: str) -> None:
    need(device)
    shape, generator = SHAPES[0], torch.Generator().manual_seed(2)
    spans, tile = made_spans(shape, generator), prompt_tile(2)
    limits = Limits(rows=12, tokens=256, blocks=64, block_size=shape.block_size, tile=tile)
    rows = StepRows(limits, 400, torch.device(device))
    blocks = shape.random_blocks(401, generator).to(device)
    queries = torch.randn(256, shape.num_heads, shape.head_dim, generator=generator).to(device)
    rows.fill(spans, limits.mixed_shape(256))
    together = attend(queries.clone(), blocks, rows.inputs(limits.mixed_shape(256)))
    for number in (3, 8):  # a decode, a prompt
        span = spans[number]
        count = span.last - span.first
        own = limits.decode_shape(1) if count == 1 else limits.mixed_shape(count)
        at = [one for one, _ in in_rows(spans)].index(span)
        rows.fill([span], own)
        alone = attend(queries[at : at + count].clone(), blocks, rows.inputs(own))
        assert torch.equal(alone, together[at : at + count])


def test_a_context_has_few_parts_and_a_short_one_enough_for_a_whole_card() -> None:
    assert part_tokens(4096) == 64
    for context in (16, 4096, 10_000, 131_072):
        assert part_tokens(context) % 64 == 0
        assert -(-context // part_tokens(context)) <= MOST_PARTS


@DEVICES
@DTYPES
@pytest.mark.parametrize("size", [256, 96])
def test_sums_are_normed_as_by_plain_operations(size: int, dtype: Any, device: str) -> None:
    need(device)
    generator = torch.Generator().manual_seed(3)
    x, delta = (torch.randn(5, size, generator=generator).to(device, dtype) for _ in range(2))
    norm = RMSNorm(size, eps=1e-5).to(device, dtype)
    norm.eps = norm.eps.float()
    norm.weight.data.copy_(torch.rand(size, generator=generator))
    with torch.inference_mode():
        for more in (delta, None):
            expected = PlainOperations().add_norm(x, more, norm)
            fused = FusedOperations().add_norm(x.clone(), more, norm)
            torch.testing.assert_close(fused, expected)


@DEVICES
@DTYPES
@pytest.mark.parametrize("size", [512, 1500])
def test_gates_open_as_by_plain_operations(size: int, dtype: Any, device: str) -> None:
    need(device)
    generator = torch.Generator().manual_seed(4)
    gate_up = torch.randn(3, 2 * size, generator=generator).to(device, dtype)
    expected = PlainOperations().gated(gate_up.float()).to(dtype)
    torch.testing.assert_close(FusedOperations().gated(gate_up), expected)


@DEVICES
@DTYPES
@pytest.mark.parametrize("shape", SHAPES)
def test_keys_are_rotated_and_stored_with_their_values(
    shape: Shape, dtype: Any, device: str
) -> None:
    need(device)
    generator = torch.Generator().manual_seed(5)
    model = MODEL_SHAPES["tiny"]
    table = RotaryTable(replace(model, head_dim=shape.head_dim), 64).to(device, dtype)
    rotation = table(torch.tensor([0, 7, 63], device=device))
    num_keys = shape.num_kv_heads
    heads = torch.randn(3, shape.num_heads + 2 * num_keys, shape.head_dim, generator=generator)
    heads = heads.to(device, dtype)
    expected = heads.float()
    rotate_(expected[:, :-num_keys], (rotation[0].float(), rotation[1].float()))
    pool = torch.zeros(9, 2 * num_keys, shape.head_dim, device=device, dtype=dtype)
    slots = torch.tensor([8, 0, 3], device=device)
    rotate_and_store(heads, rotation, slots, pool)
    torch.testing.assert_close(heads, expected.to(dtype))
    assert torch.equal(pool[slots], heads[:, -2 * num_keys :]), "what is stored is what was made"
    assert not pool[[1, 2, 4, 5, 6, 7]].any()


def test_the_kernels_compile_for_a_gpu_without_one() -> None:
    """In a process of its own: this one's kernels are interpreted."""
    command = [sys.executable, "-m", "tests.reference_engine.model.compile_kernels"]
    environment = {key: one for key, one in os.environ.items() if key != "TRITON_INTERPRET"}
    subprocess.run(command, env=environment, check=True)


LIMITS = Limits(rows=8, tokens=512, blocks=16, block_size=16, tile=16)


def test_shapes_that_are_captured_reach_up_to_the_most_rows_and_tokens() -> None:
    shapes = captured_shapes(LIMITS)
    assert [shape.rows for shape in shapes if not shape.tiles] == [8, 4, 2, 1]
    mixed = [shape.tokens for shape in shapes if shape.tiles]
    assert mixed == [512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16]
    assert shapes[0].tokens == 512, "the largest first: the others fit into its memory"
    small = captured_shapes(LIMITS._replace(rows=3, tokens=5))
    assert small == [StepShape(3, 5, 3), StepShape(3, 3, 0), StepShape(2, 2, 0), StepShape(1, 1, 0)]


class Replays:
    """Records by keeping the computation, as a graph does."""

    def __init__(self) -> None:
        self.num_recorded = 0

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        self.num_recorded += 1
        return compute


def on_a_device(
    runner: TorchRunner, shape: ModelShape, recorder: GraphRecorder | None, said: list[str]
) -> DeviceStep:
    config = EngineConfig(**SIZES)
    step = build_device_step(runner.model, runner.bias, runner.pools, shape, config)
    with torch.inference_mode():
        step.prepare(recorder, said.append)
    return step


@pytest.mark.parametrize(("is_captured", "num_steps"), [(True, 12), (False, 6)])
def test_steps_on_a_device_answer_as_a_cpus_do_while_requests_come_and_go(
    is_captured: bool, num_steps: int
) -> None:
    """Rows that are padded, prompts among decodes, requests that are aborted, temperatures."""
    need("cpu")
    recorder, said = Replays() if is_captured else None, list[str]()
    sides = make_side(), make_side()
    sides[1].runner.step = on_a_device(sides[1].runner, MODEL_SHAPES["tiny"], recorder, said)
    assert sides[1].runner.step.is_compiled == is_captured
    assert recorder is None or recorder.num_recorded == 5, "16 tokens; 1, 2, 4 and 5 rows"
    assert not said
    step_side_by_side(sides, num_steps)


class Fails:
    """The second capture fails, as a kernel that does not compile does."""

    def __init__(self) -> None:
        self.num_recorded = 0

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        self.num_recorded += 1
        if self.num_recorded == 2:
            raise RuntimeError("at 5:12:\n  x = y\n      ^\nNameError('y is not defined')")
        return compute


def test_a_capture_that_fails_says_why_and_the_steps_run_eagerly() -> None:
    need("cpu")
    sides, said = (make_side(), make_side()), list[str]()
    sides[1].runner.step = on_a_device(sides[1].runner, MODEL_SHAPES["tiny"], Fails(), said)
    assert said == ["--compile: NameError('y is not defined'); the steps run eagerly"]
    assert not sides[1].runner.step.is_compiled
    step_side_by_side(sides, 4)


@pytest.mark.slow
def test_blocks_that_were_on_the_host_and_norms_of_heads(tmp_path: Path) -> None:
    """A Qwen3: a norm of each head, and the embedding as output matrix."""
    need("cpu")
    checkpoints: Any = pytest.importorskip("tests.reference_engine.model.checkpoints")
    checkpoints.write_checkpoint(tmp_path / "model", "qwen3-tied")
    settings = {"model": str(tmp_path / "model"), "preemption": "swap"}
    sides, said = (make_side(**settings), make_side(**settings)), list[str]()
    shape = read_checkpoint(tmp_path / "model", "float32").shape
    sides[1].runner.step = on_a_device(sides[1].runner, shape, Replays(), said)
    step_side_by_side(sides, 40)
    assert sides[1].scheduler.counters.preemptions > 0


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
def test_cuda_graphs_answer_as_eager_steps_do_while_requests_come_and_go() -> None:
    sides = make_side(device="cuda"), make_side(device="cuda", compile=True)
    assert [side.runner.step.is_compiled for side in sides] == [False, True]
    step_side_by_side(sides, 120)


def make_side(**settings: Any) -> Side:
    config = EngineConfig(**SIZES | settings)
    runner = TorchRunner(config)
    return Side(runner, Scheduler(config, runner.tokenizer.eos_token_ids))
