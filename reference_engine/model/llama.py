"""A Llama-architecture transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Qwen2 adds a bias to queries, keys and values, Qwen3 a norm of each head of queries and keys.

It works on the T tokens of a step at once (`Batch`), whichever requests they belong to.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from reference_engine.model.attention import Cache, Rotation
from reference_engine.model.batch import Batch
from reference_engine.model.shapes import ModelShape


class Projection(nn.Module):
    """x W + b, for x [T, in]. The weight lies input by input, so that a few rows stream through it.

    The weight is left unset, as the embedding's is.
    """

    def __init__(self, num_in: int, num_out: int, *, has_bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_in, num_out))
        self.bias = nn.Parameter(torch.zeros(num_out)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        return x.mm(self.weight) if self.bias is None else self.bias.addmm(x, self.weight)

    __call__ = forward  # this and the parts below: without torch's hooks, which take 1 us a call


class Embedding(nn.Module):
    def __init__(self, num_tokens: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_tokens, size))

    def forward(self, token_ids: Tensor) -> Tensor:
        return functional.embedding(token_ids, self.weight)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x ** 2) + eps) * weight (Zhang and Sennrich, 2019), computed in float32.

    The mean is over the last dimension of `size`.
    """

    eps: Tensor

    def __init__(self, *size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.register_buffer("eps", torch.tensor(eps, dtype=torch.float32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        # functional.rms_norm takes seven small operations on a CPU; these are five.
        exact = x if x.dtype is torch.float32 else x.float()
        norm = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
        mean_square = torch.addcmul(self.eps, norm, norm, value=1 / x.shape[-1])
        normed = exact * mean_square.rsqrt_() * self.weight
        return normed if exact is x else normed.to(x.dtype)

    __call__ = forward


class RotaryTable(nn.Module):
    """Rotary positions (Su et al., 2021): cosines and sines [max_positions, 1, head_dim] each.

    The two halves x, y of a head's vector become x cos - y sin and y cos + x sin: the vector times
    the cosines, plus the vector with its halves swapped times the sines, the first half negative.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: ModelShape, max_positions: int) -> None:
        super().__init__()
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = torch.outer(positions, rotary_frequencies(shape)).unsqueeze(1)
        dtype = torch.get_default_dtype()
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        self.register_buffer("cos", torch.cat((cos, cos), dim=-1), persistent=False)
        self.register_buffer("sin", torch.cat((-sin, sin), dim=-1), persistent=False)

    def forward(self, positions: Tensor) -> Rotation:
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)


def rotary_frequencies(shape: ModelShape) -> Tensor:
    """The angle by which a position turns each pair, in float32."""
    pairs = torch.arange(0, shape.head_dim, 2, dtype=torch.float32)
    frequencies = 1.0 / shape.rope_theta ** (pairs / shape.head_dim)
    if (scaling := shape.rope_scaling) is None:
        return frequencies
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share_kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (share_kept + (1 - share_kept) / scaling.factor)


class Attention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.num_heads, self.head_dim = shape.num_heads, shape.head_dim
        self.num_rotated = shape.num_heads + shape.num_kv_heads
        num_projected = shape.num_projected * shape.head_dim
        self.qkv_proj = Projection(shape.hidden_size, num_projected, has_bias=shape.qkv_bias)
        self.qk_norm: RMSNorm | None = None
        if shape.qk_norm:
            self.qk_norm = RMSNorm(self.num_rotated, shape.head_dim, eps=shape.norm_eps)
        self.o_proj = Projection(shape.num_heads * shape.head_dim, shape.hidden_size)

    def forward(self, x: Tensor, rotation: Rotation, cache: Cache, batch: Batch) -> Tensor:
        heads = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        if self.qk_norm is not None:
            queries_keys = heads[:, : self.num_rotated]
            queries_keys.copy_(self.qk_norm(queries_keys))
        cache.write(heads, rotation, batch)
        attended = cache.attend(heads[:, : self.num_heads], batch)
        return self.o_proj(attended)

    __call__ = forward


class FeedForward(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_up_proj = Projection(shape.hidden_size, 2 * shape.ffn_size)
        self.down_proj = Projection(shape.ffn_size, shape.hidden_size)

    def forward(self, x: Tensor, operations: "Operations") -> Tensor:
        return self.down_proj(operations.gated(self.gate_up_proj(x)))

    __call__ = forward


class Block(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.attention = Attention(shape)
        self.ffn_norm = RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.ffn = FeedForward(shape)

    def forward(
        self,
        x: Tensor,
        delta: Tensor | None,
        rotation: Rotation,
        cache: Cache,
        batch: Batch,
        operations: "Operations",
    ) -> tuple[Tensor, Tensor]:
        """x + delta is the input; the output is a sum that is not yet made, either."""
        x, normed = operations.add_norm(x, delta, self.attention_norm)
        attended = self.attention(normed, rotation, cache, batch)
        x, normed = operations.add_norm(x, attended, self.ffn_norm)
        return x, self.ffn(normed, operations)

    __call__ = forward


class Operations(Protocol):
    """What a layer does between its matrix products. Both may write over their inputs."""

    def add_norm(self, x: Tensor, delta: Tensor | None, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """The sum, and its norm."""

    def gated(self, gate_up: Tensor) -> Tensor:
        """SwiGLU (Shazeer, 2020): silu(gate) * up, for [T, 2 * size] with the gate first."""


class PlainOperations:
    def add_norm(self, x: Tensor, delta: Tensor | None, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        if delta is not None:
            x = x + delta
        return x, norm(x)

    def gated(self, gate_up: Tensor) -> Tensor:
        size = gate_up.shape[1] // 2
        gate, up = gate_up[:, :size], gate_up[:, size:]  # a third of chunk's time
        return functional.silu(gate) * up


class Llama(nn.Module):
    """Tokens of a step in, logits of the rows to be sampled out: [S, vocabulary].

    Without `lm_head` the embedding is the output matrix, too. Build it by `build_model`. A device
    has `operations` of its own.
    """

    operations: Operations = PlainOperations()

    def __init__(self, shape: ModelShape, max_positions: int) -> None:
        super().__init__()
        self.embedding = Embedding(shape.vocab_size, shape.hidden_size)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.lm_head: Projection | None = None
        if not shape.tied_embeddings:
            self.lm_head = Projection(shape.hidden_size, shape.vocab_size)
        self.rotary = RotaryTable(shape, max_positions)

    def forward(self, batch: Batch, caches: Sequence[Cache]) -> Tensor:
        x = self.embedding(batch.token_ids)
        rotation = self.rotary(batch.positions)
        delta: Tensor | None = None
        for block, cache in zip(self.blocks, caches, strict=True):
            x, delta = block(x, delta, rotation, cache, batch, self.operations)
        if batch.last_rows is not None:
            assert delta is not None
            x, delta = (part.index_select(0, batch.last_rows) for part in (x, delta))
        _, last = self.operations.add_norm(x, delta, self.norm)
        if self.lm_head is None:
            return functional.linear(last, self.embedding.weight)
        logits: Tensor = self.lm_head(last)
        return logits


def build_model(shape: ModelShape, max_positions: int, device: torch.device) -> Llama:
    """The model on the device, in the shape's dtype, with weights that are not set yet."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, shape.dtype))
    try:
        with device:
            return Llama(shape, max_positions).eval()
    finally:
        torch.set_default_dtype(before)


_STD = 0.02
_OUTPUT_STD = 0.12  # logits must differ clearly, yet leave more than a handful of likely words


def fill_with_random(model: Llama, seed: int) -> None:
    """Draw all matrices from N(0, 0.02) (the output matrix from N(0, 0.12)); norms stay at one.

    The weights are the same on every machine with the same torch, and kind of device.
    """
    generator = torch.Generator(model.norm.weight.device).manual_seed(seed)
    for module in model.modules():
        if isinstance(module, Projection | Embedding):
            std = _OUTPUT_STD if module is model.lm_head else _STD
            nn.init.normal_(module.weight, std=std, generator=generator)
