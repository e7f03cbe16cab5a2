"""Attention of one token, by the textbook, and the shapes that kernels are tested with."""

from typing import NamedTuple

import torch
from torch import Generator, Tensor


class Shape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    def random_blocks(self, num_blocks: int, generator: Generator) -> Tensor:
        size = (num_blocks, self.block_size, 2 * self.num_kv_heads, self.head_dim)
        return torch.randn(size, generator=generator)


# Powers of two and not; heads that share a kv head, all of one, and none.
SHAPES = [
    Shape(4, 2, 64, 16),
    Shape(9, 3, 64, 16),
    Shape(8, 1, 128, 16),
    Shape(6, 2, 48, 12),
    Shape(2, 2, 64, 16),
]


def attention(query: Tensor, blocks: Tensor, position: int) -> Tensor:
    """Of a query [heads, head_dim] to the tokens up to its own, in float32.

    `blocks` [N, block_size, 2 * kv_heads, head_dim] are the request's, in order.
    """
    num_kv_heads = blocks.shape[2] // 2
    seen = blocks.flatten(0, 1)[: position + 1].float()
    heads = torch.arange(len(query)) // (len(query) // num_kv_heads)
    keys, values = seen[:, :num_kv_heads][:, heads], seen[:, num_kv_heads:][:, heads]
    scores = torch.einsum("hd,lhd->hl", query.float(), keys) * query.shape[1] ** -0.5
    return torch.einsum("hl,lhd->hd", scores.softmax(-1), values)
