"""A plain step as one module, so that it can be compiled or captured as a whole.

The transformer is the eager one, and its weights are shared. Only its batch and its caches are
others: their shapes depend on the numbers of rows and of blocks alone, and a row's attention stops
at its own position.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from reference_engine.model.batch import Batch
from reference_engine.model.llama import Llama

# Takes queries [B, heads, head_dim], blocks [blocks, block_size, 2 * kv_heads, head_dim], tables
# [B, N] and positions [B]: the outputs, in the shape of the queries.
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class DecodeStep(nn.Module):
    """Inputs of `DecodeRows` and the layers' blocks in; logits [B, vocabulary] out, in float32,
    with the sampling bias. The new tokens' keys and values are written to the blocks.
    """

    bias: Tensor

    def __init__(self, model: Llama, bias: Tensor, block_size: int, attend: Attend) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("bias", bias)
        self._block_size, self._attend = block_size, attend

    def forward(self, head: Tensor, tables: Tensor, pools: Sequence[Tensor]) -> Tensor:
        token_ids, positions, slots, bias_rows = head.unbind()
        batch = Batch(token_ids, positions, slots, [], None, [])
        attend, size = self._attend, self._block_size
        caches = [_StepCache(pool, size, tables, positions, attend) for pool in pools]
        logits: Tensor = self.model(batch, caches).float() + self.bias[bias_rows]
        return logits


class _StepCache:
    def __init__(
        self, pool: Tensor, block_size: int, tables: Tensor, positions: Tensor, attend: Attend
    ) -> None:
        self._pool, self._block_size = pool, block_size
        self._tables, self._positions, self._attend = tables, positions, attend

    def write(self, slots: Tensor, keys_values: Tensor) -> None:
        self._pool.view(-1, keys_values.shape[1]).index_copy_(0, slots, keys_values)

    def attend(self, queries: Tensor, batch: Batch) -> Tensor:  # noqa: ARG002 Cache's
        blocks = self._pool.view(self._pool.shape[0], self._block_size, -1, queries.shape[2])
        return self._attend(queries, blocks, self._tables, self._positions).flatten(1)


def attend_by_block(queries: Tensor, blocks: Tensor, tables: Tensor, positions: Tensor) -> Tensor:
    """Attention that inductor turns into loops over the blocks where they lie, without a copy.

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
