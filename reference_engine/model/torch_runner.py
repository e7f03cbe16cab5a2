"""The runner with a model: torch, a paged cache, and one forward pass for each step."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from subprocess import CalledProcessError
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec
import psutil
import torch
from torch import Tensor

from reference_engine.config import EngineConfig, EngineConfigError, cache_folder
from reference_engine.core.request import Request
from reference_engine.core.step import Sampled, StepPlan
from reference_engine.model.batch import Span, spans_of, token_by_token
from reference_engine.model.checkpoint import find_checkpoint, read_checkpoint
from reference_engine.model.cpu_step import CpuStep
from reference_engine.model.device_errors import device_errors
from reference_engine.model.host_cache import HostCache
from reference_engine.model.llama import Llama, build_model, fill_with_random
from reference_engine.model.memory import check_fit, reckon
from reference_engine.model.sampler import probabilities, sample, sampling_bias
from reference_engine.model.shapes import MODEL_SHAPES, ModelShape, num_weights
from reference_engine.model.smollm2 import SMOLLM2, ensure_converted
from reference_engine.model.tokenizer import Tokenizer, WordTokenizer
from reference_engine.protocol import Ready

if TYPE_CHECKING:
    from reference_engine.model.device_step import DeviceStep

_LARGE: Final = 1e9  # weights


class Step(Protocol):
    """What goes through the model together, on a CPU or on a device."""

    @property
    def is_compiled(self) -> bool: ...

    def logits(self, spans: Sequence[Span]) -> tuple[Tensor, list[Request]]:
        """[sampled requests, vocabulary], in float32 with the sampling bias, and the requests; the
        next call may overwrite them.
        """


class TorchRunner:
    """Owns the weights and the cache: [num_blocks * block_size] slots a layer."""

    def __init__(self, config: EngineConfig, say: Callable[[str], None] = print) -> None:
        """Raises EngineConfigError. `say` gets the progress of loading."""
        # One core is left to the frontend, so that it notices at once that a client is gone.
        torch.set_num_threads(max(1, _usable_cores() - 1))
        self._device = _choose_device(config.device)
        shape, self.tokenizer, load = _find_model(config, say)
        check_memory(shape, config, self._device)
        self._batch_invariant = config.batch_invariant
        self.model = load(self._device)
        block_numel = config.block_size * 2 * shape.num_kv_heads * shape.head_dim
        new_zeros = self.model.norm.weight.new_zeros  # of its dtype, where it is
        self.pools = [  # with a spare block
            new_zeros(config.num_blocks + 1, block_numel) for _ in range(shape.num_layers)
        ]
        free = free_memory(torch.device("cpu"))
        self._host_cache = HostCache(self.pools, config.host_blocks, free)
        self.bias = sampling_bias(self.tokenizer, self._device)
        on_gpu = self._device.type == "cuda"
        self.step: Step = (
            self._device_step(shape, config, say) if on_gpu else self._cpu_step(shape, config, say)
        )
        self.info = Ready(
            pid=os.getpid(),
            device=self._device.type,
            vocab_size=shape.vocab_size,
            gpu_name=torch.cuda.get_device_name(self._device) if on_gpu else None,
            gpu_uuid=gpu_uuid(self._device) if on_gpu else None,
            is_compiled=self.step.is_compiled,
        )

    def launch(self, plan: StepPlan) -> Callable[[], Sampled]:
        return partial(self._compute, plan, spans_of(plan))

    def _compute(self, plan: StepPlan, all_spans: list[Span]) -> Sampled:
        sampled = Sampled({}, {})
        with device_errors(self._device), torch.inference_mode():
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # of this thread
            self._host_cache.copy(plan)
            for spans in self._passes(all_spans):
                logits, requests = self.step.logits(spans)
                if requests:
                    self._sample(logits, requests, sampled)
            if self._device.type == "cuda" and not sampled.tokens:
                torch.cuda.synchronize()  # a step that samples nothing would seem to end at once
        return sampled

    def export_blocks(self, blocks: Sequence[int]) -> bytearray:
        with device_errors(self._device), torch.inference_mode():
            return self._host_cache.export_blocks(blocks)

    def import_blocks(self, host_blocks: Sequence[int], data: bytes | bytearray) -> None:
        with torch.inference_mode():
            self._host_cache.import_blocks(host_blocks, data)

    @property
    def block_bytes(self) -> int:
        return self._host_cache.block_bytes

    def _passes(self, spans: list[Span]) -> Iterable[list[Span]]:
        """What goes through the model together."""
        if self._batch_invariant:
            return token_by_token(spans)
        return [spans] if spans else []

    def _sample(self, logits: Tensor, requests: list[Request], sampled: Sampled) -> None:
        tokens = sample(logits, requests)
        names = [request.request_id for request in requests]
        sampled.tokens.update(zip(names, tokens, strict=True))
        sampled.probabilities.update(probabilities(logits, tokens, requests))

    def _cpu_step(
        self, shape: ModelShape, config: EngineConfig, say: Callable[[str], None]
    ) -> CpuStep:
        step = CpuStep(self.model, self.bias, self.pools, shape, config)
        if config.compile:
            try:
                step.compile(cache_folder(os.environ) / "compiled", say)
            except Exception as error:  # noqa: BLE001 inductor raises many kinds
                say(f"--compile: {_first_line(error)}; the steps run eagerly")
        return step

    def _device_step(
        self, shape: ModelShape, config: EngineConfig, say: Callable[[str], None]
    ) -> "DeviceStep":
        from triton.errors import TritonError

        from reference_engine.model.device_step import CudaGraphs, build_device_step, reason

        step = build_device_step(self.model, self.bias, self.pools, shape, config)
        try:
            with device_errors(self._device), torch.inference_mode():
                step.prepare(CudaGraphs() if config.compile else None, say)
                torch.cuda.synchronize()
        except (TritonError, CalledProcessError) as error:
            raise EngineConfigError(
                f"--device {config.device}: Triton cannot compile the kernels: {reason(error)}; "
                "with --device cpu none are needed"
            ) from error
        return step


def _first_line(error: Exception) -> str:
    return (str(error) or repr(error)).strip().splitlines()[0]


def gpu_uuid(device: torch.device) -> str:
    """The GPU as NVML names it: CUDA_VISIBLE_DEVICES may number the devices in another way."""
    properties = torch.cuda.get_device_properties(device)
    return f"{'MIG' if ' MIG ' in properties.name else 'GPU'}-{properties.uuid}"


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


def check_memory(shape: ModelShape, config: EngineConfig, device: torch.device) -> None:
    """Raises EngineConfigError if the memory that is free now does not hold it all."""
    free, whose = free_memory(device), f"that are free on {device}"
    needed = reckon(shape, config, on_gpu=device.type == "cuda")
    if device.type == "cuda":
        whose += " (nvidia-smi shows what others there take)"
        needed = replace(needed, cuda_context=0)  # asking has made it
    check_fit(needed, free, whose, config)


def _usable_cores() -> int:
    """All cores on macOS, which does not say which of them this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _choose_device(name: str) -> torch.device:
    """A CUDA device becomes the current one: Triton launches there."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    index = int(name.partition(":")[2] or 0)
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise EngineConfigError(
            f"--device {name}: torch sees no CUDA device of this name here; use cpu"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
