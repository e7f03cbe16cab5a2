"""Attention over a paged KV cache, in plain torch: the path that says what is right.

Keys and values of all requests live in one pool a layer, a row of kv_heads * head_dim a slot. A
token writes its own slot, then attends to the slots of its request's context, wherever their blocks
lie.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from reference_engine.model.batch import Batch


class PagedCache:
    """Keys and values of one layer: two pools [slots, kv_heads * head_dim]."""

    def __init__(
        self, num_slots: int, num_kv_heads: int, head_dim: int, device: torch.device
    ) -> None:
        self._row = (num_kv_heads, head_dim)
        self._keys = torch.zeros(num_slots, num_kv_heads * head_dim, device=device)
        self._values = torch.zeros_like(self._keys)

    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store [T, kv_heads, head_dim] at the given slots [T]."""
        self._keys.index_copy_(0, slots, keys.flatten(start_dim=1))
        self._values.index_copy_(0, slots, values.flatten(start_dim=1))

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at slots [B, L]: [B, L, kv_heads, head_dim] each."""
        flat, shape = slots.flatten(), (*slots.shape, *self._row)
        # index_select is several times as fast on a CPU as indexing by a tensor.
        keys, values = self._keys.index_select(0, flat), self._values.index_select(0, flat)
        return keys.view(shape), values.view(shape)


def paged_attention(queries: Tensor, cache: PagedCache, batch: Batch) -> Tensor:
    """Causal attention of queries [T, heads, head_dim] to their contexts; the same shape."""
    out = torch.empty_like(queries)
    if len(batch.single_rows):
        singles = queries[batch.single_rows].unsqueeze(1)
        attended = attend(singles, *cache.read(batch.single_slots), batch.single_mask[:, None, :])
        out[batch.single_rows] = attended.squeeze(1)
    for chunk in batch.chunks:
        rows = slice(chunk.start, chunk.start + chunk.length)
        context = len(chunk.context_slots)
        mask = torch.ones(1, chunk.length, context, dtype=torch.bool, device=queries.device)
        mask = mask.tril(diagonal=context - chunk.length)
        out[rows] = attend(queries[None, rows], *cache.read(chunk.context_slots[None]), mask)[0]
    return out


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Grouped-query softmax attention, scaled by head_dim ** -0.5.

    queries [B, Q, heads, D], keys and values [B, K, kv_heads, D], mask [B, Q, K] (true: may see);
    returns [B, Q, heads, D]. Consecutive query heads share a kv head.
    """
    q, k, v = (tensor.transpose(1, 2) for tensor in (queries, keys, values))
    attended = scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], enable_gqa=True)
    return attended.transpose(1, 2)
