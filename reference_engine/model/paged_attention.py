"""Attention to blocks of the cache, as Triton kernels for CUDA.

New tokens are of two kinds. A *decode* is one new token of a request: a program takes one row, one
kv head with all query heads that share it, and some parts of the row's context; a second kernel
merges the parts. A *prompt* is many new tokens of a request: a program takes a tile of
neighbouring tokens and one kv head, and goes through the whole context. A step with both kinds
launches these three kernels once a layer, however many requests it has.

Where a part or a tile ends depends on the position in the context alone, so that a row's sums do
not depend on the other rows. All numbers that change from step to step are read from the device's
memory, so that a CUDA graph can hold the launches. `TRITON_INTERPRET=1` runs the same on a CPU.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from reference_engine.model.memory import part_tokens
from reference_engine.model.step_inputs import StepInputs, prompt_tile

_CONTEXT_TILE: Final = 32  # tokens of the context that a program reads at once
_FEWEST_ROWS: Final = 16  # of a matrix product on tensor cores
_PARTS_AT_ONCE: Final = 16  # that are merged; a power of two
_PROGRAMS: Final = 2048  # of decodes: a dozen a multiprocessor of a large card
# The interpreter takes the bits of bfloat16 for whole numbers where it multiplies matrices.
_MULTIPLIES_FLOAT32: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


def attend(queries: Tensor, blocks: Tensor, inputs: StepInputs) -> Tensor:
    """Causal attention of queries [T, heads, D] to blocks [blocks, block_size, 2 * kv_heads, D].

    The outputs take the place of the queries; rows that belong to no request stay as they are. The
    queries of different tokens may lie apart.
    """
    _attend_decodes(queries, blocks, inputs)
    if len(inputs.tiles):
        _attend_prompts(queries, blocks, inputs)
    return queries


def warps(dtype: torch.dtype) -> int:
    """Warps of a program, enough to spill no register: float32 needs more of these, since tensor
    cores do not multiply it.
    """
    return 8 if dtype is torch.float32 else 4


def _attend_decodes(queries: Tensor, blocks: Tensor, inputs: StepInputs) -> None:
    _, num_heads, head_dim = queries.shape
    num_rows, block_size, num_kv_heads = len(inputs.decodes), blocks.shape[1], blocks.shape[2] // 2
    part = part_tokens(inputs.max_context)
    num_parts = triton.cdiv(inputs.max_context, part)
    size = (num_rows, num_heads, num_parts)
    sums = torch.empty((*size, head_dim), dtype=torch.float32, device=queries.device)
    maxima, weights = torch.empty((2, *size), dtype=torch.float32, device=queries.device)
    dims = {"dim": head_dim, "dim_2": triton.next_power_of_2(head_dim)}
    group = num_heads // num_kv_heads
    at_once = max(1, min(num_parts, _PROGRAMS // (num_rows * num_kv_heads)))
    _attend_to_parts[num_rows, num_kv_heads, at_once](
        queries,
        blocks,
        inputs.tables,
        inputs.width,
        inputs.decodes,
        sums,
        maxima,
        weights,
        head_dim**-0.5,
        queries.stride(0),
        num_kv_heads,
        num_parts,
        at_once=at_once,
        group_size=group,
        group_2=max(_FEWEST_ROWS, triton.next_power_of_2(group)),
        block_size=block_size,
        part=part,
        tile=_CONTEXT_TILE,
        num_warps=warps(queries.dtype),
        **dims,
    )
    _merge_parts[num_rows, num_heads](
        inputs.decodes,
        sums,
        maxima,
        weights,
        queries,
        queries.stride(0),
        num_heads,
        num_parts,
        part=part,
        at_once=_PARTS_AT_ONCE,
        **dims,
    )


def _attend_prompts(queries: Tensor, blocks: Tensor, inputs: StepInputs) -> None:
    _, num_heads, head_dim = queries.shape
    num_kv_heads = blocks.shape[2] // 2
    group = num_heads // num_kv_heads
    group_2 = triton.next_power_of_2(group)
    _attend_to_context[len(inputs.tiles), num_kv_heads](
        queries,
        blocks,
        inputs.tables,
        inputs.width,
        inputs.tiles,
        head_dim**-0.5,
        queries.stride(0),
        num_kv_heads,
        group_size=group,
        group_2=group_2,
        rows=max(_FEWEST_ROWS, prompt_tile(group) * group_2),
        dim=head_dim,
        dim_2=triton.next_power_of_2(head_dim),
        block_size=blocks.shape[1],
        tile=_CONTEXT_TILE,
        num_warps=warps(queries.dtype),
    )


@triton.jit
def _product(left, right):
    """Matrices of one dtype, to float32; tensor cores would round float32 if they were let."""
    if _MULTIPLIES_FLOAT32:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def _mix(shares, values):
    """Shares [rows, tile], in float32, of values [tile, dim]. Tensor cores multiply bfloat16: a
    share is the sum of two.
    """
    if values.dtype == tl.float32:
        return _product(shares, values)
    high = shares.to(values.dtype)
    low = (shares - high.to(tl.float32)).to(values.dtype)
    return _product(high, values) + _product(low, values)


@triton.jit(do_not_specialize=["at_once"])
def _attend_to_parts(
    queries,
    blocks,
    tables,
    width,
    decodes,
    sums,
    maxima,
    weights,
    scale,
    query_stride,
    num_kv_heads,
    num_parts,
    at_once,
    group_size: tl.constexpr,
    group_2: tl.constexpr,
    dim: tl.constexpr,
    dim_2: tl.constexpr,
    block_size: tl.constexpr,
    part: tl.constexpr,
    tile: tl.constexpr,
):
    """Each program takes every `at_once`th part. Names with _2 are padded to a power of two, which
    `tl.arange` needs.
    """
    row, kv_head, first_part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(decodes + row) + 1
    if first_part * part >= length:
        return
    table = tables + row * tl.load(width)
    in_group, in_head = tl.arange(0, group_2), tl.arange(0, dim_2)
    head = kv_head * group_size + in_group
    is_head, is_dim = in_group < group_size, in_head < dim
    is_query = is_head[:, None] & is_dim[None]
    query_at = queries + row.to(tl.int64) * query_stride + head[:, None] * dim + in_head[None]
    wanted = tl.load(query_at, mask=is_query, other=0.0)
    for number in range(first_part, tl.cdiv(length, part), at_once):
        end = tl.minimum((number + 1) * part, length)
        maximum = tl.full([group_2], float("-inf"), tl.float32)
        weight = tl.zeros([group_2], tl.float32)
        mixed = tl.zeros([group_2, dim_2], tl.float32)
        for start in range(number * part, end, tile):
            at = start + tl.arange(0, tile)
            is_seen = at < end
            block = tl.load(table + at // block_size, mask=is_seen, other=0)
            slot = (block * block_size + at % block_size) * 2 * num_kv_heads + kv_head
            key_at = blocks + slot[:, None] * dim + in_head[None]
            is_there = is_seen[:, None] & is_dim[None]
            keys = tl.load(key_at, mask=is_there, other=0.0)
            values = tl.load(key_at + num_kv_heads * dim, mask=is_there, other=0.0)
            scores = _product(wanted, tl.trans(keys)) * scale
            scores = tl.where(is_seen[None], scores, float("-inf"))
            higher = tl.maximum(maximum, tl.max(scores, axis=1))
            shares, kept = tl.exp(scores - higher[:, None]), tl.exp(maximum - higher)
            mixed = mixed * kept[:, None] + _mix(shares, values)
            weight = weight * kept + tl.sum(shares, axis=1)
            maximum = higher
        to = (row * num_kv_heads * group_size + head) * num_parts + number
        tl.store(maxima + to, maximum, mask=is_head)
        tl.store(weights + to, weight, mask=is_head)
        tl.store(sums + to[:, None].to(tl.int64) * dim + in_head[None], mixed, mask=is_query)


@triton.jit
def _merge_parts(
    decodes,
    sums,
    maxima,
    weights,
    queries,
    query_stride,
    num_heads,
    num_parts,
    part: tl.constexpr,
    at_once: tl.constexpr,
    dim: tl.constexpr,
    dim_2: tl.constexpr,
):
    """Parts beyond the row's length hold nothing: they are not read."""
    row, in_row = tl.program_id(0), tl.program_id(1)
    length = tl.load(decodes + row) + 1
    if length == 0:
        return
    head = row * num_heads + in_row
    num_filled = tl.cdiv(length, part)
    in_head = tl.arange(0, dim_2)
    is_dim = in_head < dim
    maximum = tl.full([], float("-inf"), tl.float32)
    weight = tl.full([], 0.0, tl.float32)
    whole = tl.zeros([dim_2], tl.float32)
    for first in range(0, num_filled, at_once):
        number = first + tl.arange(0, at_once)
        is_part, at = number < num_filled, head * num_parts + number
        highest = tl.load(maxima + at, mask=is_part, other=float("-inf"))
        higher = tl.maximum(maximum, tl.max(highest, axis=0))
        share, kept = tl.exp(highest - higher), tl.exp(maximum - higher)
        is_there = is_part[:, None] & is_dim[None]
        parts = tl.load(
            sums + at[:, None].to(tl.int64) * dim + in_head[None], mask=is_there, other=0.0
        )
        whole = whole * kept + tl.sum(share[:, None] * parts, axis=0)
        weight = weight * kept + tl.sum(
            share * tl.load(weights + at, mask=is_part, other=0.0), axis=0
        )
        maximum = higher
    out = (whole / weight).to(queries.dtype.element_ty)
    to = queries + row.to(tl.int64) * query_stride + in_row * dim
    tl.store(to + in_head, out, mask=is_dim)


@triton.jit
def _attend_to_context(
    queries,
    blocks,
    tables,
    width,
    tiles,
    scale,
    query_stride,
    num_kv_heads,
    group_size: tl.constexpr,
    group_2: tl.constexpr,
    rows: tl.constexpr,
    dim: tl.constexpr,
    dim_2: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
):
    """A row of the program is one query head of one token: the heads of a token lie together."""
    described, kv_head = tiles + 4 * tl.program_id(0), tl.program_id(1)
    first_row, count = tl.load(described), tl.load(described + 1)
    if count == 0:
        return
    first_position, request = tl.load(described + 2), tl.load(described + 3)
    table = tables + request * tl.load(width)
    token, in_group = tl.arange(0, rows) // group_2, tl.arange(0, rows) % group_2
    in_head = tl.arange(0, dim_2)
    is_row, is_dim = (token < count) & (in_group < group_size), in_head < dim
    is_query = is_row[:, None] & is_dim[None]
    head, position = kv_head * group_size + in_group, first_position + token
    query_at = (first_row + token) * query_stride + head * dim
    wanted = tl.load(queries + query_at[:, None] + in_head[None], mask=is_query, other=0.0)
    maximum = tl.full([rows], float("-inf"), tl.float32)
    weight = tl.zeros([rows], tl.float32)
    mixed = tl.zeros([rows, dim_2], tl.float32)
    for start in range(0, first_position + count, tile):
        at = start + tl.arange(0, tile)
        is_seen = at < first_position + count
        block = tl.load(table + at // block_size, mask=is_seen, other=0)
        slot = (block * block_size + at % block_size) * 2 * num_kv_heads + kv_head
        key_at = blocks + slot[:, None] * dim + in_head[None]
        is_there = is_seen[:, None] & is_dim[None]
        keys = tl.load(key_at, mask=is_there, other=0.0)
        values = tl.load(key_at + num_kv_heads * dim, mask=is_there, other=0.0)
        may_see = is_seen[None] & (at[None] <= position[:, None])
        scores = tl.where(may_see, _product(wanted, tl.trans(keys)) * scale, float("-inf"))
        higher = tl.maximum(maximum, tl.max(scores, axis=1))
        shares, kept = tl.exp(scores - higher[:, None]), tl.exp(maximum - higher)
        mixed = mixed * kept[:, None] + _mix(shares, values)
        weight = weight * kept + tl.sum(shares, axis=1)
        maximum = higher
    out = (mixed / weight[:, None]).to(queries.dtype.element_ty)
    tl.store(queries + query_at[:, None] + in_head[None], out, mask=is_query)
