"""The runner with a model: torch, a paged cache, and one forward pass for each step."""

import os

import msgspec
import torch

from reference_engine.config import EngineConfig, EngineConfigError
from reference_engine.core.step import Sampled, StepPlan
from reference_engine.model.attention import PagedCache
from reference_engine.model.batch import Span, build_batch, spans_of, token_by_token
from reference_engine.model.host_cache import HostCache
from reference_engine.model.llama import build_model, fill_with_random
from reference_engine.model.sampler import probabilities, sample, sampling_bias
from reference_engine.model.shapes import MODEL_SHAPES
from reference_engine.model.tokenizer import Tokenizer, WordTokenizer
from reference_engine.protocol import Ready


class TorchRunner:
    """Owns the weights and the cache: [num_blocks * block_size] slots a layer."""

    def __init__(self, config: EngineConfig) -> None:
        # One core is left to the frontend, so that it notices at once that a client is gone.
        torch.set_num_threads(max(1, _usable_cores() - 1))
        shape = msgspec.structs.replace(MODEL_SHAPES[config.model], dtype=config.dtype)
        self._device = _choose_device(config.device)
        self._block_size = config.block_size
        self._batch_invariant = config.batch_invariant
        self.model = build_model(shape, config.max_model_len, torch.device("cpu"))
        fill_with_random(self.model, config.seed)
        self.model.to(self._device)
        kv_shape = (shape.num_kv_heads, shape.head_dim)
        buffer = self.model.norm.weight.new_empty(0)
        self._caches = [
            PagedCache(config.num_blocks, config.block_size, kv_shape, buffer)
            for _ in range(shape.num_layers)
        ]
        blocks = [cache.blocks for cache in self._caches]
        self._host_cache = HostCache(blocks, config.host_blocks)
        on_gpu = self._device.type == "cuda"
        self.tokenizer: Tokenizer = WordTokenizer(shape.vocab_size)
        self._bias = sampling_bias(self.tokenizer, self._device)
        self.info = Ready(
            pid=os.getpid(),
            device=self._device.type,
            vocab_size=shape.vocab_size,
            gpu_name=torch.cuda.get_device_name(self._device) if on_gpu else None,
        )

    def execute(self, plan: StepPlan) -> Sampled:
        spans = spans_of(plan)
        sampled = Sampled({}, {})
        batches = token_by_token(spans) if self._batch_invariant else [spans] if spans else []
        with torch.inference_mode():
            self._host_cache.copy(plan)
            for together in batches:
                self._forward(together, sampled)
        if self._device.type == "cuda":
            torch.cuda.synchronize()  # a step that samples nothing would seem to end at once
        return sampled

    def _forward(self, spans: list[Span], sampled: Sampled) -> None:
        batch = build_batch(spans, self._block_size, self._device)
        logits = self.model(batch, self._caches).float()
        requests = batch.sampling_requests
        if not requests:
            return
        tokens = sample(logits, requests, self._bias)
        names = [request.request_id for request in requests]
        sampled.tokens.update(zip(names, tokens, strict=True))
        sampled.probabilities.update(probabilities(logits, tokens, requests))


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
