"""Attention over a paged KV cache on a CPU, in plain torch.

Keys and values of all requests live in one pool a layer, block after block, a row of heads a slot.
A token writes its own slot, then attends to the blocks of its request, wherever they lie.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from reference_engine.model.batch import Batch

Rotation = tuple[Tensor, Tensor]


def rotate_(x: Tensor, rotation: Rotation) -> None:
    """Turn the heads of x [T, heads, head_dim] by `llama.RotaryTable`'s cosines and sines."""
    cos, sin = rotation
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    x.mul_(cos).addcmul_(swapped, sin)


class Cache(Protocol):
    """A layer's keys and values, as the model uses them."""

    def write(self, heads: Tensor, rotation: Rotation, batch: Batch) -> None:
        """Rotate each token's queries and keys in place, and store its keys, then its values.

        `heads` [T, heads + 2 * kv_heads, head_dim]: queries, keys and values.
        """

    def attend(self, queries: Tensor, batch: Batch) -> Tensor:
        """Causal attention of queries [T, heads, head_dim]: [T, heads * head_dim]."""


class PagedCache:
    """Keys and values of one layer, in `blocks` [blocks, block_size * 2 * kv_heads * head_dim].

    All layers read through the same buffer; they have its device and dtype.
    """

    def __init__(self, blocks: Tensor, block_size: int, buffer: "ReadBuffer") -> None:
        self.blocks = blocks
        self._slots = blocks.view(len(blocks) * block_size, -1)
        self._buffer = buffer

    def write(self, heads: Tensor, rotation: Rotation, batch: Batch) -> None:
        num_kv_heads = self._buffer.num_heads // 2
        rotate_(heads[:, :-num_kv_heads], rotation)
        self._slots.index_copy_(0, batch.slots, heads[:, -2 * num_kv_heads :].flatten(1))

    def read(self, blocks: Tensor, num_requests: int) -> tuple[Tensor, Tensor]:
        """Keys and values in the blocks [R * N]: [R, kv_heads, N * block_size, head_dim] each.

        The next read, of any layer, overwrites them.
        """
        copied, keys, values = self._buffer.views(len(blocks), num_requests, self.blocks.shape[1])
        # index_select is several times as fast on a CPU as indexing by a tensor.
        torch.index_select(self.blocks, 0, blocks, out=copied)
        return keys, values

    def attend(self, queries: Tensor, batch: Batch) -> Tensor:
        outputs = []
        for group in batch.groups:
            rows = queries if len(batch.groups) == 1 else queries[group.rows]
            grouped = rows.view(group.num_requests, -1, *queries.shape[1:])
            keys, values = self.read(group.blocks, group.num_requests)
            attended = attend(grouped, keys, values, group.mask)
            outputs.append(attended.reshape(len(rows), -1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class ReadBuffer:
    """The layers copy into it the blocks that they read, one after another; it grows as needed."""

    def __init__(self, num_kv_heads: int, head_dim: int, memory: Tensor) -> None:
        self.num_heads, self.head_dim = 2 * num_kv_heads, head_dim
        self.memory = memory
        self._size = 0, 0
        self._views = memory, memory, memory

    def views(
        self, num_blocks: int, num_requests: int, block_numel: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The blocks as they lie, and their keys and values by request and head."""
        if self._size != (num_blocks, num_requests):
            if num_blocks * block_numel > self.memory.numel():  # memory that is new is slow
                self.memory = self.memory.new_empty(2 * num_blocks * block_numel)
            copied = self.memory[: num_blocks * block_numel].view(num_blocks, block_numel)
            heads = copied.view(num_requests, -1, self.num_heads, self.head_dim)
            keys, values = heads.transpose(1, 2).chunk(2, dim=1)
            self._views, self._size = (copied, keys, values), (num_blocks, num_requests)
        return self._views


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Grouped-query softmax attention, scaled by head_dim ** -0.5.

    queries [R, Q, heads, D], keys and values [R, kv_heads, L, D], mask [R, 1, Q, L] (added: 0
    or -inf); returns [R, Q, heads, D], for one query [R, kv_heads, heads of each, D]. Consecutive
    query heads share a kv head.
    """
    if mask.dtype is not queries.dtype:
        mask = mask.to(queries.dtype)
    if queries.shape[1] == 1:
        # The heads that share a kv head pass as queries of one head, so it is read only once.
        shared = queries.view(len(queries), keys.shape[1], -1, queries.shape[3])
        return scaled_dot_product_attention(shared, keys, values, attn_mask=mask)
    by_head = scaled_dot_product_attention(
        queries.transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=True
    )
    return by_head.transpose(1, 2)
