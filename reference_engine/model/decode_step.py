"""A plain step as one module, so that it can be compiled as a whole.

The transformer is the eager one, and its weights are shared. Only its batch and its caches differ:
their shapes depend on the numbers of rows and of blocks alone, and a row's attention stops at its
own position.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from reference_engine.model.attention import Rotation, rotate_
from reference_engine.model.batch import Batch
from reference_engine.model.llama import Llama


class DecodeStep(nn.Module):
    """Inputs of `DecodeRows` and the layers' blocks in; logits [B, vocabulary] out, in float32,
    with the sampling bias. The new tokens' keys and values are written to the blocks.
    """

    bias: Tensor

    def __init__(self, model: Llama, bias: Tensor, block_size: int) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("bias", bias)
        self._block_size = block_size

    def forward(self, head: Tensor, tables: Tensor, pools: Sequence[Tensor]) -> Tensor:
        token_ids, positions, slots, bias_rows = head.unbind()
        batch = Batch(token_ids, positions, slots, [], None, [])
        size = self._block_size
        caches = [_StepCache(pool, size, tables, positions) for pool in pools]
        logits: Tensor = self.model(batch, caches).float() + self.bias[bias_rows]
        return logits


class _StepCache:
    def __init__(self, pool: Tensor, block_size: int, tables: Tensor, positions: Tensor) -> None:
        self._pool, self._block_size = pool, block_size
        self._tables, self._positions = tables, positions

    def write(self, heads: Tensor, rotation: Rotation, batch: Batch) -> None:
        row_size = self._pool.shape[1] // self._block_size
        num_kv_heads = row_size // (2 * heads.shape[2])
        rotate_(heads[:, :-num_kv_heads], rotation)
        keys_values = heads[:, -2 * num_kv_heads :].flatten(1)
        self._pool.view(-1, row_size).index_copy_(0, batch.slots, keys_values)

    def attend(self, queries: Tensor, batch: Batch) -> Tensor:  # noqa: ARG002 Cache's
        blocks = self._pool.view(self._pool.shape[0], self._block_size, -1, queries.shape[2])
        return attend_by_block(queries, blocks, self._tables, self._positions).flatten(1)


def attend_by_block(queries: Tensor, blocks: Tensor, tables: Tensor, positions: Tensor) -> Tensor:
    """Attention that inductor turns into loops over the blocks where they lie, without a copy.

    queries [B, heads, head_dim], blocks [blocks, block_size, 2 * kv_heads, head_dim], tables
    [B, N] and positions [B]; returns [B, heads, head_dim].

    Values are summed block by block first: a block's values stay in the core's own cache.
    """
    num_rows, num_blocks, size = *tables.shape, blocks.shape[1]
    num_kv_heads, head_dim = blocks.shape[2] // 2, blocks.shape[3]
    # [rows, kv heads, blocks, heads of a kv head, tokens of a block, head_dim]
    keys, values = blocks[tables].permute(0, 3, 1, 2, 4).unsqueeze(3).float().chunk(2, dim=1)
    wanted = queries.float().view(num_rows, num_kv_heads, 1, -1, 1, head_dim) * head_dim**-0.5
    at = torch.arange(num_blocks * size, device=queries.device).view(num_blocks, 1, size)
    is_hidden = at > positions.view(num_rows, 1, 1, 1, 1)
    scores = (wanted * keys).sum(-1).masked_fill(is_hidden, float("-inf"))
    weights = (scores - scores.amax((2, 4), keepdim=True)).exp()
    by_block = (weights.unsqueeze(-1) * values).sum(4)
    mixed: Tensor = by_block.sum(2) / weights.sum((2, 4)).unsqueeze(-1)
    return mixed.view(queries.shape).to(queries.dtype)
