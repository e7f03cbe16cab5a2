"""The runner with a model: torch, a paged cache, and one forward pass for each step."""

import os
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import msgspec
import psutil
import torch
from torch import Tensor

from reference_engine.config import EngineConfig, EngineConfigError, cache_folder
from reference_engine.core.request import Request
from reference_engine.core.step import Sampled, StepPlan
from reference_engine.model.attention import PagedCache, ReadBuffer
from reference_engine.model.batch import (
    Batch,
    DecodeRows,
    build_batch,
    is_plain,
    spans_of,
    token_by_token,
)
from reference_engine.model.captured import CapturedStep, CudaGraphs
from reference_engine.model.checkpoint import find_checkpoint, read_checkpoint
from reference_engine.model.compiled import MIN_BLOCKS, CompiledStep
from reference_engine.model.decode_step import DecodeStep, attend_by_block
from reference_engine.model.host_cache import HostCache
from reference_engine.model.llama import Llama, build_model, fill_with_random, num_weights
from reference_engine.model.sampler import add_bias, probabilities, sample, sampling_bias
from reference_engine.model.shapes import MODEL_SHAPES, ModelShape
from reference_engine.model.smollm2 import SMOLLM2, ensure_converted
from reference_engine.model.tokenizer import Tokenizer, WordTokenizer
from reference_engine.protocol import (
    Ready,
)

_GB: Final = 1e9
_LARGE: Final = 1e9  # weights


class WholeStep(Protocol):
    """A plain step, compiled or captured."""

    def logits(self, requests: list[Request]) -> Tensor:
        """[requests, vocabulary], with the sampling bias."""


class TorchRunner:
    """Owns the weights and the cache: [num_blocks * block_size] slots a layer."""

    def __init__(self, config: EngineConfig, say: Callable[[str], None] = print) -> None:
        """Raises EngineConfigError. `say` is told how the loading goes."""
        # One core is left to the frontend, so that it notices at once that a client is gone.
        torch.set_num_threads(max(1, _usable_cores() - 1))
        self._device = _choose_device(config.device)
        shape, self.tokenizer, load = _find_model(config, say)
        check_memory(shape, config, free_memory(self._device), self._device.type)
        self._block_size = config.block_size
        self._batch_invariant = config.batch_invariant
        self.model = load(self._device)
        memory = self.model.norm.weight.new_empty(0)
        buffer = ReadBuffer(shape.num_kv_heads, shape.head_dim, memory)
        self.caches = [
            PagedCache(config.num_blocks + 1, config.block_size, buffer)  # one is spare
            for _ in range(shape.num_layers)
        ]
        blocks = [cache.blocks for cache in self.caches]
        self._host_cache = HostCache(blocks, config.host_blocks, free_memory(torch.device("cpu")))
        on_gpu = self._device.type == "cuda"
        self.bias = sampling_bias(self.tokenizer, self._device)
        max_blocks = max(MIN_BLOCKS, -(-config.max_model_len // config.block_size))
        self._rows = DecodeRows(
            config.max_num_seqs,
            max_blocks,
            config.block_size,
            config.num_blocks,
            is_pinned=on_gpu,
        )
        self.whole_step: WholeStep | None = None
        if config.compile:
            try:
                self.whole_step = (
                    self._capture(config, max_blocks)
                    if on_gpu
                    else self._compile(shape, config, say)
                )
            except Exception as error:  # noqa: BLE001 Triton, CUDA and inductor raise many kinds
                why = (str(error) or repr(error)).strip().splitlines()[0]
                say(f"--compile: {why}; the steps run eagerly")
        self.info = Ready(
            pid=os.getpid(),
            device=self._device.type,
            vocab_size=shape.vocab_size,
            gpu_name=torch.cuda.get_device_name(self._device) if on_gpu else None,
            gpu_uuid=gpu_uuid(self._device) if on_gpu else None,
            is_compiled=self.whole_step is not None,
        )

    def execute(self, plan: StepPlan) -> Sampled:
        sampled = Sampled({}, {})
        with torch.inference_mode():
            self._host_cache.copy(plan)
            if self.whole_step is not None and is_plain(plan):
                requests = list(plan.scheduled)
                self._sample(self.whole_step.logits(requests), requests, sampled)
            else:
                for batch in self._batches(plan):
                    self._forward(batch, sampled)
        if self._device.type == "cuda" and not sampled.tokens:
            torch.cuda.synchronize()  # a step that samples nothing would seem to end at once
        return sampled

    def export_blocks(self, blocks: Sequence[int]) -> bytearray:
        with torch.inference_mode():
            return self._host_cache.export_blocks(blocks)

    def import_blocks(self, host_blocks: Sequence[int], data: bytes | bytearray) -> None:
        with torch.inference_mode():
            self._host_cache.import_blocks(host_blocks, data)

    @property
    def block_bytes(self) -> int:
        return self._host_cache.block_bytes

    def _batches(self, plan: StepPlan) -> Iterator[Batch]:
        if self._batch_invariant:
            for spans in token_by_token(spans_of(plan)):
                yield build_batch(spans, self._block_size, self._device)
        elif is_plain(plan) and self._device.type == "cpu":
            yield self._rows.batch(list(plan.scheduled))
        elif plan.scheduled:
            yield build_batch(spans_of(plan), self._block_size, self._device)

    def _forward(self, batch: Batch, sampled: Sampled) -> None:
        logits = self.model(batch, self.caches).float()
        if requests := batch.sampling_requests:
            self._sample(add_bias(logits, requests, self.bias), requests, sampled)

    def _sample(self, logits: Tensor, requests: list[Request], sampled: Sampled) -> None:
        tokens = sample(logits, requests)
        names = [request.request_id for request in requests]
        sampled.tokens.update(zip(names, tokens, strict=True))
        sampled.probabilities.update(probabilities(logits, tokens, requests))

    def _compile(
        self, shape: ModelShape, config: EngineConfig, say: Callable[[str], None]
    ) -> CompiledStep:
        step = DecodeStep(self.model, self.bias, config.block_size, attend_by_block)
        compiled = CompiledStep(step, [cache.blocks for cache in self.caches], self._rows)
        compiled.prepare(shape, config, cache_folder(os.environ) / "compiled", say)
        return compiled

    def _capture(self, config: EngineConfig, max_blocks: int) -> CapturedStep:
        from reference_engine.model.paged_decode import paged_decode

        step = DecodeStep(self.model, self.bias, config.block_size, paged_decode)
        with torch.inference_mode():
            return CapturedStep(
                step,
                [cache.blocks for cache in self.caches],
                self._rows,
                max_rows=config.max_num_seqs,
                max_blocks=max_blocks,
                recorder=CudaGraphs(),
            )


def gpu_uuid(device: torch.device) -> str:
    """As NVML writes it: CUDA_VISIBLE_DEVICES may number the devices in another way."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


class FoundModel(NamedTuple):
    shape: ModelShape
    tokenizer: Tokenizer
    load: Callable[[torch.device], Llama]


def _find_model(config: EngineConfig, say: Callable[[str], None]) -> FoundModel:
    folder = find_checkpoint(config.model)
    if folder is None:
        shape = msgspec.structs.replace(MODEL_SHAPES[config.model], dtype=config.dtype)
        draw = partial(_draw, shape, config)
        return FoundModel(shape, WordTokenizer(shape.vocab_size), draw)
    if config.model == SMOLLM2:
        ensure_converted(folder, say)
    checkpoint = read_checkpoint(folder, config.dtype)
    try:  # random weights need none of their packages
        from reference_engine.model.pretrained import PretrainedTokenizer
        from reference_engine.model.weights import load_checkpoint
    except ImportError as error:
        raise EngineConfigError(
            f"--model {config.model}: {error}; pip install 'walkaway[engine]'"
        ) from error
    tokenizer = PretrainedTokenizer(checkpoint, datetime.now)
    load = partial(load_checkpoint, checkpoint, config.max_model_len, say)
    return FoundModel(checkpoint.shape, tokenizer, load)


def _draw(shape: ModelShape, config: EngineConfig, device: torch.device) -> Llama:
    """Small models have the same weights on any device; a CPU would take minutes for large ones."""
    is_large = num_weights(shape) > _LARGE
    model = build_model(shape, config.max_model_len, device if is_large else torch.device("cpu"))
    fill_with_random(model, config.seed)
    return model.to(device)


def free_memory(device: torch.device, cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes; on the CPU of a container, what its limit leaves."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = psutil.virtual_memory().available
    try:
        lines = (cgroup / "memory.stat").read_text().splitlines()
        reclaimable = next(int(line.split()[1]) for line in lines if "inactive_file" in line)
        used = int((cgroup / "memory.current").read_text()) - reclaimable
        return min(available, int((cgroup / "memory.max").read_text()) - used)
    except (OSError, ValueError, StopIteration):  # "max" is no number: there is no limit
        return available


def check_memory(shape: ModelShape, config: EngineConfig, free: int, where: str) -> None:
    """Raises EngineConfigError if weights and KV cache need more than the `free` bytes."""
    size = torch.finfo(getattr(torch, shape.dtype)).bits // 8
    weights = size * num_weights(shape)
    row = 2 * shape.num_kv_heads * shape.head_dim * shape.num_layers
    cache = size * row * config.num_blocks * config.block_size
    if weights + cache > free:
        advice = ["lower --num-blocks"] if weights < free else []
        advice += ["take --dtype bfloat16"] if shape.dtype == "float32" else []
        raise EngineConfigError(
            f"the weights ({weights / _GB:.1f} GB in {shape.dtype}) and a KV cache of "
            f"{config.num_blocks} blocks ({cache / _GB:.1f} GB) do not fit into the "
            f"{free / _GB:.1f} GB of memory that are free ({where}): "
            + (", or ".join(advice) or "take a smaller model")
        )


def _usable_cores() -> int:
    """All cores on macOS, which does not say which of them this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise EngineConfigError("--device cuda: torch sees no CUDA device here; use cpu or auto")
    return torch.device(name)
