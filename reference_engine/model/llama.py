"""A Llama-architecture transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

It works on the T tokens of a step at once (`Batch`), whichever requests they belong to.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from reference_engine.model.attention import PagedCache, paged_attention
from reference_engine.model.batch import Batch
from reference_engine.model.shapes import ModelShape


class RMSNorm(nn.Module):
    """x / rms(x) * weight (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class RotaryTable(nn.Module):
    """Cosines and sines of every position: [max_positions, head_dim / 2] each (Su et al., 2021)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_positions: int, theta: float) -> None:
        super().__init__()
        frequencies = theta ** (-torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.outer(torch.arange(max_positions), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate the two halves of each head's vector; x is [T, heads, head_dim]."""
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.heads = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        self.head_dim = shape.head_dim
        self.qkv_proj = nn.Linear(shape.hidden_size, sum(self.heads) * self.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: RotaryTable, cache: PagedCache, batch: Batch) -> Tensor:
        projections = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        queries, keys, values = projections.split(self.heads, dim=1)
        cache.write(batch.slots, rotary(keys, batch.positions), values)
        attended = paged_attention(rotary(queries, batch.positions), cache, batch)
        projected: Tensor = self.o_proj(attended.flatten(start_dim=1))
        return projected


class FeedForward(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(shape.hidden_size, 2 * shape.ffn_size, bias=False)
        self.down_proj = nn.Linear(shape.ffn_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        down: Tensor = self.down_proj(functional.silu(gate) * up)
        return down


class Block(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.attention = Attention(shape)
        self.ffn_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.ffn = FeedForward(shape)

    def forward(self, x: Tensor, rotary: RotaryTable, cache: PagedCache, batch: Batch) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary, cache, batch)
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class Llama(nn.Module):
    """Tokens of a step in, logits of the rows to be sampled out: [S, vocabulary]."""

    def __init__(self, shape: ModelShape, max_positions: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        self.rotary = RotaryTable(shape.head_dim, max_positions, shape.rope_theta)

    def forward(self, batch: Batch, caches: list[PagedCache]) -> Tensor:
        x = self.embedding(batch.token_ids)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, self.rotary, cache, batch)
        logits: Tensor = self.lm_head(self.norm(x[batch.last_rows]))
        return logits
