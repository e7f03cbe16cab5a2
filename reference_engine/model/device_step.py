"""A step on a CUDA device: the same kernels for any mixture of prompts and decodes.

Steps of up to 512 tokens are captured as CUDA graphs, one for each shape in a short list: a replay
costs the host microseconds, where launching some three hundred kernels costs it milliseconds. So a
step that admits a short prompt takes hardly longer than one that only decodes, and a cancel, which
waits for the end of the step, has one latency and not two. Longer steps are bound by their
arithmetic, and run eagerly.
"""

from collections.abc import Callable, Sequence
from typing import Final, Protocol

import torch
from torch import Tensor

from reference_engine.config import EngineConfig
from reference_engine.core.request import Request
from reference_engine.model.attention import Rotation
from reference_engine.model.batch import Batch, Span
from reference_engine.model.fused import FusedOperations, rotate_and_store
from reference_engine.model.llama import Llama
from reference_engine.model.paged_attention import attend
from reference_engine.model.shapes import ModelShape
from reference_engine.model.step_inputs import (
    Limits,
    StepInputs,
    StepRows,
    StepShape,
    prompt_tile,
)

MOST_CAPTURED_TOKENS: Final = 512
_FEWEST_CAPTURED_TOKENS: Final = 16


class GraphRecorder(Protocol):
    """Records a computation, which has run once before, as something that can be replayed."""

    def record(self, compute: Callable[[], None]) -> Callable[[], None]: ...


class CudaGraphs:
    """All graphs share a pool of memory: only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Raises what `compute` raises; the current stream stays the current one."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        cause: Exception | None = None
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                try:
                    compute()
                except Exception as error:
                    cause = error  # the end of a broken capture raises another
                    raise
        except Exception as error:  # noqa: BLE001 it is raised
            torch.cuda.set_stream(stream)
            raise cause or error from None
        return graph.replay


def captured_shapes(limits: Limits) -> list[StepShape]:
    """Shapes of decodes have powers of two of rows, and the most that there can be; other shapes
    have numbers of tokens, each at most 1.5 times the next smaller one. The largest come first.
    """
    rows = {1 << i for i in range((limits.rows - 1).bit_length())} | {limits.rows}
    most = min(limits.tokens, MOST_CAPTURED_TOKENS)
    steps = (size for i in range(4, most.bit_length()) for size in (1 << i, 3 << (i - 1)))
    tokens = {size for size in steps if _FEWEST_CAPTURED_TOKENS <= size < most} | {most}
    shapes = [limits.mixed_shape(size) for size in tokens]
    shapes += [limits.decode_shape(size) for size in rows]
    return sorted(shapes, key=lambda shape: (shape.tokens, shape.tiles), reverse=True)


def reason(error: BaseException) -> str:
    """A line of its message: the first, or the last where the first one only says in which line."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [repr(error)]
    return (lines[-1] if lines[0].startswith("at ") else lines[0]).strip()


class DeviceStep:
    """Computes the logits of a step. Owns its inputs and its output, which each step overwrites."""

    def __init__(
        self, model: Llama, bias: Tensor, blocks: Sequence[Tensor], rows: StepRows
    ) -> None:
        """`bias`: `sampler.sampling_bias`; `blocks` of each layer: [blocks, block_size, 2 *
        kv_heads, head_dim].
        """
        model.operations = FusedOperations()
        self._model, self._bias, self._rows = model, bias, rows
        self._blocks = blocks
        size = (rows.limits.rows, bias.shape[1])
        self._logits = torch.empty(size, dtype=torch.float32, device=bias.device)
        self._replays: dict[StepShape, Callable[[], None]] = {}

    def capture(self, recorder: GraphRecorder) -> None:
        """Raises what CUDA and Triton raise, and then has no graph."""
        replays = {}
        for shape in captured_shapes(self._rows.limits):
            self._rows.fill([], shape)

            def compute(shape: StepShape = shape) -> None:
                self._compute(shape)

            compute()  # Triton compiles, and libraries make their workspaces, outside of a graph
            replays[shape] = recorder.record(compute)
        self._replays = replays

    def prepare(self, recorder: GraphRecorder | None, say: Callable[[str], None]) -> None:
        """Capture with the recorder, if there is one; if that fails, say why, and run eagerly. Then
        compile the kernels that an eager step needs.
        """
        if recorder is not None:
            try:
                self.capture(recorder)
            except Exception as error:  # noqa: BLE001 Triton and CUDA raise many kinds
                say(f"--compile: {reason(error)}; the steps run eagerly")
        limits = self._rows.limits
        for shape in (limits.decode_shape(1), limits.mixed_shape(limits.tokens)):
            self._rows.fill([], shape)
            self._compute(shape)

    @property
    def is_compiled(self) -> bool:
        return bool(self._replays)

    def logits(self, spans: Sequence[Span]) -> tuple[Tensor, list[Request]]:
        """See `torch_runner.Step`."""
        shape = self._shape_of(spans)
        requests = self._rows.fill(spans, shape)
        self.run(shape)
        return self._logits[: len(requests)], requests

    def run(self, shape: StepShape) -> None:
        if (replay := self._replays.get(shape)) is not None:
            replay()
        else:
            self._compute(shape)

    def _compute(self, shape: StepShape) -> None:
        inputs = self._rows.inputs(shape)
        batch = Batch(inputs.token_ids, inputs.positions, inputs.slots, [], inputs.last_rows, [])
        caches = [_DeviceCache(blocks, inputs) for blocks in self._blocks]
        logits = self._model(batch, caches)
        bias = self._bias.index_select(0, inputs.bias_rows)
        torch.add(logits, bias, out=self._logits[: shape.rows])

    def _shape_of(self, spans: Sequence[Span]) -> StepShape:
        """The smallest captured one that fits, else the step's own."""
        num_tokens, limits = sum(span.last - span.first for span in spans), self._rows.limits
        is_decode = num_tokens == len(spans)
        fits = (s for s in self._replays if s.tokens >= num_tokens and is_decode == (not s.tiles))
        own = limits.decode_shape if is_decode else limits.mixed_shape
        return min(fits, key=lambda shape: shape.tokens, default=own(num_tokens))


def build_device_step(
    model: Llama, bias: Tensor, pools: Sequence[Tensor], shape: ModelShape, config: EngineConfig
) -> DeviceStep:
    """The device step for an engine's settings. `pools`: blocks of each layer [blocks, block_size *
    2 * kv_heads * head_dim], of which the last is spare."""
    limits = Limits(
        rows=config.max_num_seqs,
        tokens=config.max_num_batched_tokens,
        blocks=-(-config.max_model_len // config.block_size),
        block_size=config.block_size,
        tile=prompt_tile(shape.num_heads // shape.num_kv_heads),
    )
    size = (config.block_size, 2 * shape.num_kv_heads, shape.head_dim)
    blocks = [pool.view(-1, *size) for pool in pools]
    return DeviceStep(model, bias, blocks, StepRows(limits, config.num_blocks, bias.device))


class _DeviceCache:
    """A layer's `attention.Cache` during one step."""

    def __init__(self, blocks: Tensor, inputs: StepInputs) -> None:
        self._blocks, self._inputs = blocks, inputs

    def write(self, heads: Tensor, rotation: Rotation, batch: Batch) -> None:
        rotate_and_store(heads, rotation, batch.slots, self._blocks.flatten(0, 1))

    def attend(self, queries: Tensor, batch: Batch) -> Tensor:  # noqa: ARG002 Cache's
        return attend(queries, self._blocks, self._inputs).flatten(1)
