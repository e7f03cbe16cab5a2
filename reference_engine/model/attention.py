"""Attention over a paged KV cache, in plain torch: the path that says what is right.

Keys and values of all requests live in one pool, [slots, kv_heads, head_dim] a layer. A token
writes its own slot, then attends to the slots of its request's context, wherever their blocks lie.
"""

import torch
from torch import Tensor

from reference_engine.model.batch import Batch


class PagedCache:
    """Keys and values of one layer: two tensors [slots, kv_heads, head_dim]."""

    def __init__(
        self, num_slots: int, num_kv_heads: int, head_dim: int, device: torch.device
    ) -> None:
        self.keys = torch.zeros(num_slots, num_kv_heads, head_dim, device=device)
        self.values = torch.zeros(num_slots, num_kv_heads, head_dim, device=device)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store [T, kv_heads, head_dim] at the given slots [T]."""
        self.keys[slots] = keys
        self.values[slots] = values


def paged_attention(queries: Tensor, cache: PagedCache, batch: Batch) -> Tensor:
    """Causal attention of queries [T, heads, head_dim] to their contexts; the same shape."""
    out = torch.empty_like(queries)
    if len(batch.single_rows):
        singles = queries[batch.single_rows].unsqueeze(1)
        keys, values = cache.keys[batch.single_slots], cache.values[batch.single_slots]
        mask = batch.single_mask[:, None, :]
        out[batch.single_rows] = attend(singles, keys, values, mask).squeeze(1)
    for chunk in batch.chunks:
        rows = slice(chunk.start, chunk.start + chunk.length)
        keys, values = cache.keys[chunk.context_slots], cache.values[chunk.context_slots]
        context = len(chunk.context_slots)
        mask = torch.ones(chunk.length, context, dtype=torch.bool, device=queries.device)
        mask = mask.tril(diagonal=context - chunk.length)
        out[rows] = attend(queries[None, rows], keys[None], values[None], mask[None])[0]
    return out


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Grouped-query softmax attention, scaled by head_dim ** -0.5.

    queries [B, Q, heads, D], keys and values [B, K, kv_heads, D], mask [B, Q, K] (true: may see);
    returns [B, Q, heads, D]. Query heads h * group .. (h + 1) * group - 1 share kv head h.
    """
    batch, num_queries, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[2]
    grouped = queries.view(batch, num_queries, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("bqhgd,bkhd->bhgqk", grouped, keys) * head_dim**-0.5
    scores = scores.masked_fill(~mask[:, None, None], float("-inf"))
    weighted = torch.einsum("bhgqk,bkhd->bqhgd", scores.softmax(dim=-1), values)
    return weighted.reshape(batch, num_queries, num_heads, head_dim)
