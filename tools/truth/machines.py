"""Make the machine files of H100 and H200: `python -m tools.truth.machines [--data FOLDER]`.

`floor` comes from the models' shapes and the GPUs' peak figures alone. `published` is fitted to
operators that NVIDIA measured under vLLM: FOLDER is `systems/data` of AIConfigurator at `COMMIT`
(docs/machines.md). Both are written into harness/machines.
"""

import argparse
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import nnls

FOLDER: Final = Path(__file__).parents[2] / "harness" / "machines"
COMMIT: Final = "095f58a51c4ca8e61b66ec108d86f223f8d559ce"
SYSTEMS: Final = "aic-core/src/aiconfigurator_core/systems"
VERSION: Final = "vllm/0.24.0"
BYTES: Final = 2  # bfloat16, weights and cache
BLOCK: Final = 16
CACHE_SHARE: Final = 0.9  # vLLM's default for --gpu-memory-utilization
DECODING: Final = (0, 1, 4, 8, 16, 32, 64, 128, 256)
PREFILLING: Final = (0, 256, 512, 1024, 2048)
CONTEXTS: Final = (128, 256, 512, 1024, 2048)  # tokens a decoding request has

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    name: str
    system: str  # AIConfigurator's name
    bytes_a_second: float
    flops: float
    memory_bytes: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Llama: sizes from the `config.json` of its checkpoint."""

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    source: str
    head_dim: int = 128
    vocabulary: int = 128_256

    @property
    def parameters(self) -> int:
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        layer = attention + 3 * self.hidden * self.inner + 2 * self.hidden
        return 2 * self.vocabulary * self.hidden + self.layers * layer + self.hidden

    @property
    def computing(self) -> int:
        """Parameters that every token is multiplied with: all but the input embedding."""
        return self.parameters - self.vocabulary * self.hidden

    @property
    def cache_bytes(self) -> int:
        """Bytes a token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES


H100: Final = Gpu(
    name="H100 SXM",
    system="h100_sxm",
    bytes_a_second=3.35e12,
    flops=989e12,
    memory_bytes=80e9,
    source="https://www.nvidia.com/en-us/data-center/h100/: 80 GB, 3.35 TB/s, 989 TFLOPS",
)
H200: Final = Gpu(
    name="H200 SXM",
    system="h200_sxm",
    bytes_a_second=4.8e12,
    flops=989e12,
    memory_bytes=141e9,
    source="https://www.nvidia.com/en-us/data-center/h200/: 141 GB, 4.8 TB/s, 989 TFLOPS",
)
LLAMA_8B: Final = Shape(
    name="Llama-3.1-8B",
    layers=32,
    hidden=4096,
    inner=14_336,
    heads=32,
    kv_heads=8,
    source="https://huggingface.co/meta-llama/Llama-3.1-8B: config.json",
)
LLAMA_70B: Final = Shape(
    name="Llama-3.1-70B",
    layers=80,
    hidden=8192,
    inner=28_672,
    heads=64,
    kv_heads=8,
    source="https://huggingface.co/meta-llama/Llama-3.1-70B: config.json",
)
# The fewest GPUs, of a power of two, that hold the weights and a cache worth having.
MACHINES: Final = (
    (H100, LLAMA_8B, 1),
    (H100, LLAMA_70B, 4),
    (H200, LLAMA_8B, 1),
    (H200, LLAMA_70B, 2),
)


def num_blocks(gpu: Gpu, shape: Shape, gpus: int) -> int:
    left = CACHE_SHARE * gpu.memory_bytes * gpus - shape.parameters * BYTES
    return int(left / (shape.cache_bytes * BLOCK))


def floor(gpu: Gpu, shape: Shape, gpus: int) -> dict[str, float]:
    """A decoding token's arithmetic hides behind the reading of the weights, as long as a step has
    fewer tokens than the GPU has operations a byte (295 and 206)."""
    return {
        "fixed_s": shape.computing * BYTES / (gpus * gpu.bytes_a_second),
        "prefill_token_s": 2 * shape.computing / (gpus * gpu.flops),
        "decode_token_s": 0.0,
        "context_token_s": shape.cache_bytes / (gpus * gpu.bytes_a_second),
        "swap_block_s": 0.0,
    }


class Operators:
    """Measured times of a GPU's operators, linear between the points of their grids. Seconds."""

    def __init__(self, data: Path, gpu: Gpu) -> None:
        self._folder = data / gpu.system
        gemm = self._read("gemm", "gemm_perf")
        self._gemm = gemm[gemm["gemm_dtype"] == "bfloat16"]
        self._generation = self._plain(self._read("attention", "generation_attention_perf"))
        self._context = self._plain(self._read("attention", "context_attention_perf"))
        reduce = self._read("comm", "custom_allreduce_perf")
        self._reduce = reduce[reduce["backend"] == "vllm_graph"]
        self._curves: dict[tuple[int, int], tuple[Floats, Floats]] = {}

    def _read(self, room: str, name: str) -> pd.DataFrame:
        return pd.read_parquet(self._folder / room / VERSION / f"{name}.parquet")

    @staticmethod
    def _plain(frame: pd.DataFrame) -> pd.DataFrame:
        return frame[
            (frame["kv_cache_dtype"] == "bfloat16")
            & (frame["window_size"] == 0)
            & (frame["head_dim"] == LLAMA_8B.head_dim)
        ]

    def gemm_s(self, m: int, n: int, k: int) -> float:
        """The time is linear in n and k between sizes of the grid, and in proportion beyond it."""
        if m == 0:
            return 0.0
        at_n = _around(n, np.sort(self._gemm["n"].unique()))
        at_k = _around(k, np.sort(self._gemm["k"].unique()))
        return sum(
            wn * wk * self._gemm_at(m, one_n, one_k) for one_n, wn in at_n for one_k, wk in at_k
        )

    def _gemm_at(self, m: int, n: int, k: int) -> float:
        if (n, k) not in self._curves:
            rows = self._gemm[(self._gemm["n"] == n) & (self._gemm["k"] == k)]
            self._curves[n, k] = _curve(rows, "m")
        return float(np.interp(m, *self._curves[n, k])) / 1e3

    def generation_s(self, requests: int, context: int, heads: int, kv_heads: int) -> float:
        if requests == 0:
            return 0.0
        rows = self._generation
        rows = rows[(rows["num_heads"] == heads) & (rows["num_key_value_heads"] == kv_heads)]
        rows = rows[rows["batch_size"] == requests]
        return float(np.interp(context, *_curve(rows, "step"))) / 1e3

    def context_s(self, tokens: int, heads: int, kv_heads: int) -> float:
        if tokens == 0:
            return 0.0
        rows = self._context
        rows = rows[(rows["num_heads"] == heads) & (rows["num_key_value_heads"] == kv_heads)]
        return float(np.interp(tokens, *_curve(rows[rows["batch_size"] == 1], "isl"))) / 1e3

    def reduce_s(self, elements: int, gpus: int) -> float:
        if gpus == 1:
            return 0.0
        rows = self._reduce[self._reduce["num_gpus"] == gpus]
        return float(np.interp(elements, *_curve(rows, "message_size"))) / 1e3

    def step_s(
        self, shape: Shape, gpus: int, decoding: int, context: int, prefilling: int
    ) -> float:
        """The operators of one step, one after the other, with a prefilling prompt of its own."""
        m = decoding + prefilling
        heads, kv_heads, inner = shape.heads // gpus, shape.kv_heads // gpus, shape.inner // gpus
        query, width = heads * shape.head_dim, (heads + 2 * kv_heads) * shape.head_dim
        layer_s = (
            self.gemm_s(m, width, shape.hidden)
            + self.gemm_s(m, shape.hidden, query)
            + self.gemm_s(m, 2 * inner, shape.hidden)
            + self.gemm_s(m, shape.hidden, inner)
            + self.generation_s(decoding, context, heads, kv_heads)
            + self.context_s(prefilling, heads, kv_heads)
            + 2 * self.reduce_s(m * shape.hidden, gpus)
        )
        sampled = decoding + (prefilling > 0)
        return shape.layers * layer_s + self.gemm_s(sampled, shape.vocabulary // gpus, shape.hidden)


def _curve(rows: pd.DataFrame, by: str) -> tuple[Floats, Floats]:
    fastest = rows.groupby(by)["latency"].min()
    return fastest.index.to_numpy(float), fastest.to_numpy(float)


def _around(value: int, grid: npt.NDArray[Any]) -> list[tuple[int, float]]:
    above = int(np.searchsorted(grid, value))
    if above == len(grid):
        return [(int(grid[-1]), value / int(grid[-1]))]
    high = int(grid[above])
    if high == value or above == 0:
        return [(high, value / high)]
    low = int(grid[above - 1])
    share = (value - low) / (high - low)
    return [(low, 1 - share), (high, share)]


def published(gpu: Gpu, shape: Shape, gpus: int, data: Path) -> tuple[dict[str, float], list[str]]:
    """The terms that fit the operators' sums best, by relative error."""
    operators, rows, times = Operators(data, gpu), [], []
    most = num_blocks(gpu, shape, gpus) * BLOCK
    for decoding, prefilling, context in product(DECODING, PREFILLING, CONTEXTS):
        if not decoding + prefilling > 0 or decoding * context > most:
            continue
        rows.append((1.0, prefilling, decoding, decoding * context))
        times.append(operators.step_s(shape, gpus, decoding, context, prefilling))
    known, wanted = np.array(rows), np.array(times)
    terms, _ = nnls(known / wanted[:, None], np.ones(len(wanted)))
    error = known @ terms / wanted - 1
    size = np.abs(error)
    off = f"mean {size.mean():.1%}, at most {size.max():.1%}, bias {error.mean():+.1%}"
    names = ("fixed_s", "prefill_token_s", "decode_token_s", "context_token_s")
    cost = dict(zip(names, map(float, terms), strict=True)) | {"swap_block_s": 0.0}
    return cost, [f"relative error of the linear form against {len(wanted)} sums: {off}"]


def as_toml(
    kind: str, gpu: Gpu, shape: Shape, gpus: int, cost: dict[str, float], remarks: list[str]
) -> str:
    blocks = num_blocks(gpu, shape, gpus)
    title = f"{shape.name} on {gpus} {gpu.name}, bfloat16"
    how = {
        "floor": "bytes and operations at the peak figures: no engine is faster",
        "published": "the sum of operators that NVIDIA measured under vLLM 0.24.0",
    }[kind]
    there = f"https://github.com/ai-dynamo/aiconfigurator at {COMMIT[:8]}: {SYSTEMS}"
    peaks = f"{there}/{gpu.system}.yaml: these peak figures again (dense bfloat16)"
    measured = f"{there}/data/{gpu.system}/{{gemm,attention,comm}}/{VERSION}"
    sources = [*([measured] if kind == "published" else []), gpu.source, peaks, shape.source]
    assumptions = [
        f"tensor parallel over {gpus}: the fewest that hold the weights and a cache"
        if gpus > 1
        else "",
        f"cache of what weights leave of {CACHE_SHARE:.0%} of the memory (vLLM's default share)",
        "max_num_seqs and max_num_batched_tokens are choices, not measurements",
        "lags between processes are those of the bundled engine on its own machine, and grow up to "
        "the 32 requests measured there",
        "swapping is free: no figure was found",
        *remarks,
    ]
    lines = [
        f'title = "{title}: {how}"',
        f'kind = "{kind}"',
        f"gpus = {gpus}",
        f'gpu = "{gpu.name}"',
        f'model = "{shape.name}"',
        'lags_from = "live-simulated"',
        _array("sources", sources),
        _array("assumptions", [one for one in assumptions if one]),
        "",
        "[cost]",
        *(f"{name} = {value:.4g}" for name, value in cost.items()),
        "",
        "[range]",
        f"running = [1, {max(DECODING)}]",
        f"batched_tokens = [1, {max(DECODING) + max(PREFILLING)}]",
        f"context_tokens = [0, {min(max(DECODING) * max(CONTEXTS), blocks * BLOCK)}]",
        "",
        "[engine]",
        f"max_num_seqs = {max(DECODING)}",
        f"num_blocks = {blocks}",
        f"block_size = {BLOCK}",
        f"max_num_batched_tokens = {max(PREFILLING)}",
        "max_model_len = 8192",
        "",
    ]
    return "\n".join(lines)


def _array(name: str, values: list[str]) -> str:
    return "\n".join([f"{name} = [", *(f'  "{value}",' for value in values), "]"])


def file_name(kind: str, gpu: Gpu, shape: Shape) -> str:
    return f"{gpu.name.split()[0]}-{shape.name.removeprefix('Llama-3.1-')}-{kind}.toml".lower()


FLOOR_REMARKS: Final = [
    "no time between tensor-parallel GPUs, none for attention's arithmetic, none on the host",
    "a step that also prefills may hide up to fixed_s of it: there the sum is no floor",
]
PUBLISHED_REMARKS: Final = [
    "operators follow each other; norms, rotary embedding, sampling and the host take no time",
    "a prompt's chunk attends to itself only; its cached context costs context_token_s a token",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, help="AIConfigurator's systems/data")
    data: Path | None = parser.parse_args().data
    for gpu, shape, gpus in MACHINES:
        text = as_toml("floor", gpu, shape, gpus, floor(gpu, shape, gpus), FLOOR_REMARKS)
        (FOLDER / file_name("floor", gpu, shape)).write_text(text)
        if data is not None:
            cost, remarks = published(gpu, shape, gpus, data)
            text = as_toml("published", gpu, shape, gpus, cost, [*PUBLISHED_REMARKS, *remarks])
            (FOLDER / file_name("published", gpu, shape)).write_text(text)


if __name__ == "__main__":
    main()
