"""Attention of one new token a row to blocks of the cache, as Triton kernels for CUDA.

A program takes one row, one kv head with all query heads that share it, and a part of the row's
blocks; parts beyond the row's own length end at once. A second kernel merges the parts. Where a
part ends depends on the position in the context alone, so that a row's sums do not depend on the
other rows. `TRITON_INTERPRET=1` runs the same on a CPU.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

_PART_BLOCKS: Final = 16
_PARTS_AT_ONCE: Final = 16  # that are merged; a power of two


def paged_decode(queries: Tensor, blocks: Tensor, tables: Tensor, positions: Tensor) -> Tensor:
    """As `decode_step.attend_by_block`: queries [B, heads, D], blocks [blocks, block_size,
    2 * kv_heads, D], tables [B, N], positions [B]; returns [B, heads, D].
    """
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads = blocks.shape[2] // 2
    group = num_heads // num_kv_heads
    block_size = blocks.shape[1]
    num_parts = triton.cdiv(tables.shape[1], _PART_BLOCKS)
    queries = queries.contiguous()
    new = queries.new_empty
    sums = new(num_rows, num_heads, num_parts, head_dim, dtype=torch.float32)
    maxima = new(num_rows, num_heads, num_parts, dtype=torch.float32)
    weights = torch.empty_like(maxima)
    _attend_to_part[num_rows, num_kv_heads, num_parts](
        queries,
        blocks,
        tables,
        positions,
        sums,
        maxima,
        weights,
        head_dim**-0.5,
        tables.stride(0),
        num_kv_heads,
        num_parts,
        group_size=group,
        group_2=triton.next_power_of_2(group),
        dim=head_dim,
        dim_2=triton.next_power_of_2(head_dim),
        size=block_size,
        size_2=triton.next_power_of_2(block_size),
        part_blocks=_PART_BLOCKS,
    )
    mixed = torch.empty_like(queries)
    _merge_parts[num_rows, num_heads](
        positions,
        sums,
        maxima,
        weights,
        mixed,
        num_heads,
        num_parts,
        part_tokens=_PART_BLOCKS * block_size,
        at_once=_PARTS_AT_ONCE,
        dim=head_dim,
        dim_2=triton.next_power_of_2(head_dim),
    )
    return mixed


@triton.jit
def _attend_to_part(
    queries,
    blocks,
    tables,
    positions,
    sums,
    maxima,
    weights,
    scale,
    table_stride,
    num_kv_heads,
    num_parts,
    group_size: tl.constexpr,
    group_2: tl.constexpr,
    dim: tl.constexpr,
    dim_2: tl.constexpr,
    size: tl.constexpr,
    size_2: tl.constexpr,
    part_blocks: tl.constexpr,
):
    """Names with _2 are padded to a power of two, which `tl.arange` needs."""
    row, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length, first = tl.load(positions + row) + 1, part * part_blocks
    if first * size >= length:
        return
    in_group, in_head, in_block = tl.arange(0, group_2), tl.arange(0, dim_2), tl.arange(0, size_2)
    head = row * num_kv_heads * group_size + kv_head * group_size + in_group
    is_head, is_dim = in_group < group_size, in_head < dim
    is_query = is_head[:, None] & is_dim[None]
    wanted = tl.load(queries + head[:, None] * dim + in_head[None], mask=is_query, other=0.0)
    wanted = wanted.to(tl.float32) * scale
    maximum = tl.full([group_2], float("-inf"), tl.float32)
    weight = tl.zeros([group_2], tl.float32)
    mixed = tl.zeros([group_2, dim_2], tl.float32)
    for at in range(first, tl.minimum(first + part_blocks, tl.cdiv(length, size))):
        block = tl.load(tables + row * table_stride + at)
        is_seen = (in_block < size) & (at * size + in_block < length)
        slot = (block * size + in_block) * 2 * num_kv_heads + kv_head
        key_at = blocks + slot[:, None] * dim + in_head[None]
        is_there = is_seen[:, None] & is_dim[None]
        keys = tl.load(key_at, mask=is_there, other=0.0).to(tl.float32)
        values = tl.load(key_at + num_kv_heads * dim, mask=is_there, other=0.0).to(tl.float32)
        scores = tl.sum(wanted[:, None, :] * keys[None], axis=2)
        scores = tl.where(is_seen[None], scores, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, axis=1))
        share, kept = tl.exp(scores - higher[:, None]), tl.exp(maximum - higher)
        mixed = mixed * kept[:, None] + tl.sum(share[:, :, None] * values[None], axis=1)
        weight = weight * kept + tl.sum(share, axis=1)
        maximum = higher
    to = head * num_parts + part
    tl.store(maxima + to, maximum, mask=is_head)
    tl.store(weights + to, weight, mask=is_head)
    tl.store(sums + to[:, None] * dim + in_head[None], mixed, mask=is_query)


@triton.jit
def _merge_parts(
    positions,
    sums,
    maxima,
    weights,
    mixed,
    num_heads,
    num_parts,
    part_tokens: tl.constexpr,
    at_once: tl.constexpr,
    dim: tl.constexpr,
    dim_2: tl.constexpr,
):
    """Parts beyond the row's length hold nothing: they are not read."""
    row = tl.program_id(0)
    head = row * num_heads + tl.program_id(1)
    num_filled = tl.cdiv(tl.load(positions + row) + 1, part_tokens)
    in_head = tl.arange(0, dim_2)
    is_dim = in_head < dim
    maximum = tl.full([], float("-inf"), tl.float32)
    weight = tl.full([], 0.0, tl.float32)
    whole = tl.zeros([dim_2], tl.float32)
    for first in range(0, num_filled, at_once):
        part = first + tl.arange(0, at_once)
        is_part, at = part < num_filled, head * num_parts + part
        highest = tl.load(maxima + at, mask=is_part, other=float("-inf"))
        higher = tl.maximum(maximum, tl.max(highest, axis=0))
        share, kept = tl.exp(highest - higher), tl.exp(maximum - higher)
        is_there = is_part[:, None] & is_dim[None]
        parts = tl.load(sums + at[:, None] * dim + in_head[None], mask=is_there, other=0.0)
        whole = whole * kept + tl.sum(share[:, None] * parts, axis=0)
        weight = weight * kept + tl.sum(
            share * tl.load(weights + at, mask=is_part, other=0.0), axis=0
        )
        maximum = higher
    out = (whole / weight).to(mixed.dtype.element_ty)
    tl.store(mixed + head * dim + in_head, out, mask=is_dim)
