"""What a layer does between its matrix products, as Triton kernels for CUDA.

A layer without them is thirty kernels, of which most move a few kilobytes: their launches, not
their work, would be a third of a decode step. Each of these makes one pass over its rows, and
rounds only what it stores, where the plain operations of `llama` round each result.
`TRITON_INTERPRET=1` runs the same on a CPU.
"""

import triton
import triton.language as tl
from torch import Tensor

from reference_engine.model.attention import Rotation
from reference_engine.model.llama import RMSNorm

_GATE_COLUMNS = 1024


class FusedOperations:
    """The operations of `llama.PlainOperations`, fused."""

    def add_norm(self, x: Tensor, delta: Tensor | None, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        normed = x.new_empty(x.shape)
        size = x.shape[1]
        _add_norm[(len(x),)](
            x,
            x if delta is None else delta,
            norm.weight,
            norm.eps,
            normed,
            size=size,
            size_2=triton.next_power_of_2(size),
            adds=delta is not None,
            num_warps=min(16, max(1, triton.next_power_of_2(size) // 512)),
        )
        return x, normed

    def gated(self, gate_up: Tensor) -> Tensor:
        num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(num_rows, size)
        columns = min(_GATE_COLUMNS, triton.next_power_of_2(size))
        _gated[num_rows, triton.cdiv(size, columns)](gate_up, out, size, columns=columns)
        return out


def rotate_and_store(heads: Tensor, rotation: Rotation, slots: Tensor, pool: Tensor) -> None:
    """Rotate queries and keys of `heads` [T, heads + 2 * kv_heads, D] in place, and write keys and
    values to their slots of `pool` [slots, 2 * kv_heads, D].
    """
    cos, sin = rotation
    num_rows, num_projected, head_dim = heads.shape
    _rotate_and_store[num_rows, num_projected](
        heads,
        cos,
        sin,
        slots,
        pool,
        num_projected,
        pool.shape[1] // 2,
        half=head_dim // 2,
        half_2=triton.next_power_of_2(head_dim // 2),
        num_warps=1,
    )


@triton.jit
def _add_norm(
    x, delta, weight, eps, normed, size: tl.constexpr, size_2: tl.constexpr, adds: tl.constexpr
):
    """`x` becomes the sum. Names with _2 are padded to a power of two, which `tl.arange` needs."""
    column = tl.arange(0, size_2)
    is_column = column < size
    at = tl.program_id(0).to(tl.int64) * size + column
    row = tl.load(x + at, mask=is_column, other=0.0)
    if adds:
        more = tl.load(delta + at, mask=is_column, other=0.0)
        row = (row.to(tl.float32) + more.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(x + at, row, mask=is_column)
    exact = row.to(tl.float32)
    mean_square = tl.sum(exact * exact, axis=0) / size
    scale = tl.rsqrt(mean_square + tl.load(eps))
    by = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(normed + at, (exact * scale * by).to(normed.dtype.element_ty), mask=is_column)


@triton.jit
def _gated(gate_up, out, size, columns: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    is_column = column < size
    gate = tl.load(gate_up + row * 2 * size + column, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * size + column, mask=is_column, other=0.0)
    product = gate * tl.sigmoid(gate) * up.to(tl.float32)
    tl.store(out + row * size + column, product.to(out.dtype.element_ty), mask=is_column)


@triton.jit
def _rotate_and_store(
    heads,
    cos,
    sin,
    slots,
    pool,
    num_projected,
    num_kv_heads,
    half: tl.constexpr,
    half_2: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first_key = num_projected - 2 * num_kv_heads
    in_half = tl.arange(0, half_2)
    is_there = in_half < half
    at = heads + (row * num_projected + head) * 2 * half + in_half
    low = tl.load(at, mask=is_there, other=0.0)
    high = tl.load(at + half, mask=is_there, other=0.0)
    if head < num_projected - num_kv_heads:
        turn = row * 2 * half + in_half
        cos_low = tl.load(cos + turn, mask=is_there, other=0.0).to(tl.float32)
        cos_high = tl.load(cos + turn + half, mask=is_there, other=0.0).to(tl.float32)
        sin_low = tl.load(sin + turn, mask=is_there, other=0.0).to(tl.float32)
        sin_high = tl.load(sin + turn + half, mask=is_there, other=0.0).to(tl.float32)
        first, second = low.to(tl.float32), high.to(tl.float32)
        low = (first * cos_low + second * sin_low).to(low.dtype)
        high = (second * cos_high + first * sin_high).to(high.dtype)
        tl.store(at, low, mask=is_there)
        tl.store(at + half, high, mask=is_there)
    if head >= first_key:
        slot = tl.load(slots + row)
        to = pool + (slot * 2 * num_kv_heads + head - first_key) * 2 * half + in_half
        tl.store(to, low, mask=is_there)
        tl.store(to + half, high, mask=is_there)
