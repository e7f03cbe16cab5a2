"""What an engine takes of a device's memory, reckoned in bytes before anything is loaded.

What the allocator rounds up, and what libraries and kernels take, is not known before: two parts
are stated allowances, and the share that `--gpu-memory-utilization` leaves free is for the rest.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

from reference_engine.config import EngineConfig, EngineConfigError, ModelDtype
from reference_engine.model.shapes import MODEL_SHAPES, ModelShape, num_weights

BYTES: Final[dict[ModelDtype, int]] = {"float32": 4, "bfloat16": 2}
# Estimates, not measured: of the context with CUDA's libraries and their workspaces, and of all
# graphs with the memory that they share.
CUDA_CONTEXT: Final = 600_000_000
CUDA_GRAPHS: Final = 500_000_000
MOST_PARTS: Final = 128  # into which a decode splits a context
_FEWEST_PART_TOKENS: Final = 64
_SHOWN: Final = 50_000_000  # smaller parts are shown as one
_GB: Final = 1e9
_NAMES: Final = {
    "kv_cache": "KV cache",
    "partial_sums": "partial sums of attention",
    "read_buffer": "blocks that are read",
    "cuda_graphs": "CUDA graphs",
    "cuda_context": "CUDA context",
}


class DoesNotFitError(EngineConfigError):
    """More memory is needed than there is. `what`: which parts, and how large they are; `advice`:
    what would help, one thing or another.
    """

    def __init__(self, what: str, advice: Sequence[str]) -> None:
        super().__init__(f"{what}: {', or '.join(advice)}")
        self.what, self.advice = what, advice


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes. `activations`: of the largest step's tokens in one layer. `logits`: with what sampling
    makes of them. `partial_sums`: of the attention of decodes, with the maximum and the weight of
    each. `read_buffer`: of the blocks that a step reads, on a CPU.
    """

    weights: int
    kv_cache: int
    activations: int
    logits: int
    partial_sums: int = 0
    read_buffer: int = 0
    cuda_graphs: int = 0
    cuda_context: int = 0

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    @property
    def without_cache(self) -> int:
        return self.total - self.kv_cache

    def __str__(self) -> str:
        """The parts by name, the largest first."""
        parts = sorted(asdict(self).items(), key=lambda part: -part[1])
        large = [(name, size) for name, size in parts if size >= _SHOWN] or parts[:1]
        shown = [f"{gb(size)} of {_NAMES.get(name, name)}" for name, size in large]
        if (rest := self.total - sum(size for _, size in large)) >= _SHOWN:
            shown.append(f"{gb(rest)} of smaller parts")
        return ", ".join(shown)


def gb(size: float) -> str:
    return f"{size / _GB:.1f} GB"


def block_bytes(shape: ModelShape, block_size: int) -> int:
    """Keys and values of a block's tokens, over all layers."""
    row = 2 * shape.num_kv_heads * shape.head_dim * shape.num_layers
    return BYTES[shape.dtype] * row * block_size


def part_tokens(max_context: int) -> int:
    """Tokens of a context that one program attends to: few enough to keep a whole device busy with
    one request, and enough for a long context to have at most `MOST_PARTS` parts.
    """
    shortest = -(-max_context // MOST_PARTS)
    return -(-shortest // _FEWEST_PART_TOKENS) * _FEWEST_PART_TOKENS


def reckon(shape: ModelShape, config: EngineConfig, *, on_gpu: bool) -> Memory:
    """The shape's dtype is the one that is computed in. A spare block takes what padding writes."""
    size, rows = BYTES[shape.dtype], config.max_num_seqs
    rotary = 2 * config.max_model_len * shape.head_dim
    of_token = 3 * shape.hidden_size + shape.num_projected * shape.head_dim + 4 * shape.ffn_size
    memory = Memory(
        weights=size * (num_weights(shape) + rotary),
        kv_cache=block_bytes(shape, config.block_size) * (config.num_blocks + 1),
        activations=size * config.max_num_batched_tokens * of_token,
        logits=rows * shape.vocab_size * (size + 4 * BYTES["float32"]),
    )
    if not on_gpu:
        read = block_bytes(shape, config.max_model_len) // shape.num_layers
        return replace(memory, read_buffer=2 * rows * read)  # it doubles as it grows
    max_context = -(-config.max_model_len // config.block_size) * config.block_size
    num_parts = -(-max_context // part_tokens(max_context))
    sums = rows * shape.num_heads * num_parts * (shape.head_dim + 2) * BYTES["float32"]
    graphs = CUDA_GRAPHS if config.compile else 0
    return replace(memory, partial_sums=sums, cuda_graphs=graphs, cuda_context=CUDA_CONTEXT)


def blocks_that_fit(memory: Memory, budget: int, one: int) -> int:
    """Blocks of `one` byte each in what of the budget is left; below 1: none."""
    return (budget - memory.without_cache) // one - 1


def check_fit(needed: Memory, available: int, whose: str, config: EngineConfig) -> None:
    """Raises DoesNotFitError, with what to lower, if more is needed than is available.

    `whose` says what the available bytes are: "that are free on the CPU".
    """
    if needed.total <= available:
        return
    one = needed.kv_cache // (config.num_blocks + 1)
    least = one * (1 - -config.max_model_len // config.block_size)
    advice = []
    if needed.without_cache + least <= available:
        advice.append("lower --num-blocks")
    elif needed.without_cache + one < available:
        advice.append("lower --max-model-len and --num-blocks")
    elif smaller := _smaller_models(needed.weights, config.dtype):
        advice.append(f"take --model {' or '.join(smaller)}")
    if config.dtype == "float32":
        advice.append("take --dtype bfloat16")
    raise DoesNotFitError(
        f"--model {config.model} in {config.dtype} with {config.num_blocks:,} blocks: {needed}, "
        f"in all {gb(needed.total)}, do not fit into the {gb(available)} {whose}",
        advice or ["free memory for it"],
    )


def _smaller_models(num_bytes: int, dtype: ModelDtype) -> list[str]:
    """Models whose weights take less than half of `num_bytes`, the largest first."""
    sizes = {name: BYTES[dtype] * num_weights(shape) for name, shape in MODEL_SHAPES.items()}
    smaller = [name for name, size in sizes.items() if 2 * size < num_bytes]
    return sorted(smaller, key=sizes.__getitem__, reverse=True)
