"""A step on a CPU: eager, and plain steps compiled where that was asked for.

A step is plain if each of its requests is owed one token, as most are.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from reference_engine.config import EngineConfig
from reference_engine.core.request import Request
from reference_engine.model.attention import PagedCache, ReadBuffer
from reference_engine.model.batch import DecodeRows, Span, build_batch, is_plain
from reference_engine.model.compiled import MIN_BLOCKS, CompiledStep
from reference_engine.model.decode_step import DecodeStep
from reference_engine.model.llama import Llama
from reference_engine.model.sampler import add_bias
from reference_engine.model.shapes import ModelShape

_CPU = torch.device("cpu")


class CpuStep:
    """Computes the logits of a step."""

    def __init__(
        self,
        model: Llama,
        bias: Tensor,
        pools: Sequence[Tensor],
        shape: ModelShape,
        config: EngineConfig,
    ) -> None:
        """`bias`: `sampler.sampling_bias`; `pools`: blocks of each layer [blocks, block_size * 2 *
        kv_heads * head_dim].
        """
        self._model, self._bias, self._pools = model, bias, pools
        self._shape, self._config = shape, config
        buffer = ReadBuffer(shape.num_kv_heads, shape.head_dim, pools[0].new_empty(0))
        self._caches = [PagedCache(pool, config.block_size, buffer) for pool in pools]
        max_blocks = max(MIN_BLOCKS, -(-config.max_model_len // config.block_size))
        self._rows = DecodeRows(
            config.max_num_seqs, max_blocks, config.block_size, config.num_blocks
        )
        self.compiled: CompiledStep | None = None

    @property
    def is_compiled(self) -> bool:
        return self.compiled is not None

    def compile(self, folder: Path, say: Callable[[str], None]) -> None:
        """Raises what torch's compiler raises, which is of many kinds."""
        step = DecodeStep(self._model, self._bias, self._config.block_size)
        compiled = CompiledStep(step, self._pools, self._rows)
        compiled.prepare(self._shape, self._config, folder, say)
        self.compiled = compiled

    def logits(self, spans: Sequence[Span]) -> tuple[Tensor, list[Request]]:
        """See `torch_runner.Step`."""
        # Other paths have the same numbers, but not the same bits.
        plain = not self._config.batch_invariant and is_plain(spans)
        if plain and self.compiled is not None:
            return self.compiled.logits(spans), [span.request for span in spans]
        if plain:
            batch = self._rows.batch(spans)
        else:
            batch = build_batch(spans, self._config.block_size, _CPU)
        logits = self._model(batch, self._caches).float()
        requests = batch.sampling_requests
        return add_bias(logits, requests, self._bias) if requests else logits, requests
