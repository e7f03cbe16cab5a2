"""The inputs of a step on a device: one copy from the host, into memory that is made once.

The tokens of all requests are laid end to end: first the decodes, a token each, then the prompts. A
CUDA graph replays the same kernels on the same memory, so a step has one of a few shapes, and the
surplus of a shape is filled with rows that do nothing.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from reference_engine.core.request import Request
from reference_engine.model.batch import Span

Table: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.int64]]
Numbers = TypeVar("Numbers", Tensor, np.ndarray[Any, np.dtype[Any]])

_HEADS_IN_TILE: Final = 64
_LINE: Final = 16  # numbers


def prompt_tile(group: int) -> int:
    """Neighbouring tokens of a prompt that attend together, for `group` query heads a kv head."""
    return max(1, _HEADS_IN_TILE // (1 << (group - 1).bit_length()))


class StepShape(NamedTuple):
    """The rows of a step's tensors: `rows` for requests, `tokens`, and `tiles` of prompts."""

    rows: int
    tokens: int
    tiles: int


class Limits(NamedTuple):
    """The most of everything in a step. `tile`: tokens in a tile of a prompt."""

    rows: int
    tokens: int
    blocks: int
    block_size: int
    tile: int

    @property
    def context(self) -> int:
        return self.blocks * self.block_size

    def decode_shape(self, num_requests: int) -> StepShape:
        return StepShape(num_requests, num_requests, 0)

    def mixed_shape(self, num_tokens: int) -> StepShape:
        """Room for any requests with that many tokens: the last tile of each may be short."""
        rows = min(self.rows, num_tokens)
        return StepShape(rows, num_tokens, num_tokens // self.tile + rows)


class StepInputs(NamedTuple):
    """Tensors on the device, all of 64-bit integers.

    `token_ids`, `positions`, `slots`: [tokens]. `decodes` [rows]: the position of the request's
    only token, which is the row of the same number; -1 if it has more, or if there is none.
    `last_rows`, `bias_rows` [rows]: the token whose output is sampled, and its row of the sampling
    bias, in the order of the requests that are sampled. `tables`: blocks of each request,
    `width` [1] numbers a row. `tiles` [tiles, 4]: first token, number of tokens,
    position of the first, request.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    decodes: Tensor
    last_rows: Tensor
    bias_rows: Tensor
    width: Tensor
    tiles: Tensor
    tables: Tensor
    max_context: int


class StepRows:
    """Writes a step's requests into memory of the host, and copies it to the device.

    On CUDA the host's memory is pinned; it is written again only when it has been copied.
    """

    def __init__(self, limits: Limits, spare_block: int, device: torch.device) -> None:
        """Rows that do nothing write to the spare block, and read nothing."""
        self.limits = limits
        self._idle = {"slots": spare_block * limits.block_size, "decodes": -1}
        size = _tables_at(limits.mixed_shape(limits.tokens)) + limits.rows * limits.blocks
        is_pinned = device.type == "cuda"
        self._copied = torch.cuda.Event() if is_pinned else None  # type: ignore[no-untyped-call]
        self._on_host = torch.zeros(size, dtype=torch.long, pin_memory=is_pinned)
        self._on_device = torch.zeros(size, dtype=torch.long, device=device)

    def inputs(self, shape: StepShape) -> StepInputs:
        """The tensors that the steps of this shape read, until the next `fill`."""
        parts = _parts(self._on_device, shape)
        tiles = parts.pop("tiles").view(-1, 4)
        return StepInputs(**parts, tiles=tiles, max_context=self.limits.context)

    def fill(self, spans: Sequence[Span], shape: StepShape) -> list[Request]:
        """Lay out the spans' tokens, decodes first; returns the requests that are sampled, in the
        order of the rows of logits.
        """
        if self._copied is not None:
            self._copied.synchronize()
        ordered = sorted(spans, key=_is_prompt)
        size, parts = self.limits.block_size, _parts(self._on_host.numpy(), shape)
        width = max((-(-span.last // size) for span in ordered), default=1)
        tables = parts["tables"][: len(ordered) * width].reshape(-1, width)
        for row, span in enumerate(ordered):
            table = span.table[: -(-span.last // size)]
            tables[row, : len(table)] = table
        columns = {**_columns(ordered, size), "width": [width]}
        for name, column in columns.items():
            parts[name][: len(column)] = column
            parts[name][len(column) :] = self._idle.get(name, 0)
        self._lay_tiles(ordered, parts["tiles"].reshape(-1, 4))
        used = _tables_at(shape) + tables.size
        self._on_device[:used].copy_(self._on_host[:used], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return [span.request for span in ordered if _is_sampled(span)]

    def _lay_tiles(self, ordered: Sequence[Span], tiles: Table) -> None:
        at = number = 0
        tiles[:] = 0
        for row, span in enumerate(ordered):
            if _is_prompt(span):
                for first in range(span.first, span.last, self.limits.tile):
                    count = min(self.limits.tile, span.last - first)
                    tiles[number] = at + first - span.first, count, first, row
                    number += 1
            at += span.last - span.first


def _columns(ordered: Sequence[Span], size: int) -> dict[str, list[int]]:
    """The parts of `StepInputs` with a number for each token, decode or sampled request."""
    token_ids, positions, slots = list[int](), list[int](), list[int]()
    decodes, last_rows, bias_rows = list[int](), list[int](), list[int]()
    for span in ordered:
        request, first, last, table = span
        if _is_prompt(span):
            token_ids += request.token_ids[first:last]
            positions += range(first, last)
            slots += [table[p // size] * size + p % size for p in range(first, last)]
        else:
            token_ids.append(request.token_ids[first])
            positions.append(first)
            slots.append(table[first // size] * size + first % size)
            decodes.append(first)
        if _is_sampled(span):
            last_rows.append(len(slots) - 1)
            bias_rows.append(int(request.sampling.ignore_eos))
    return {
        "token_ids": token_ids,
        "positions": positions,
        "slots": slots,
        "decodes": decodes,
        "last_rows": last_rows,
        "bias_rows": bias_rows,
    }


def _is_prompt(span: Span) -> bool:
    return span.last - span.first > 1


def _is_sampled(span: Span) -> bool:
    return span.last == span.request.num_tokens


def _sizes(shape: StepShape) -> dict[str, int]:
    """Numbers in each part of `StepInputs` but the tables, which come last."""
    of_tokens = dict.fromkeys(("token_ids", "positions", "slots"), shape.tokens)
    of_rows = dict.fromkeys(("decodes", "last_rows", "bias_rows"), shape.rows)
    return {**of_tokens, **of_rows, "width": 1, "tiles": 4 * shape.tiles}


def _aligned(size: int) -> int:
    """Each part begins on a line of 128 bytes, so that kernels which are compiled for the alignment
    of one shape fit all.
    """
    return -(-size // _LINE) * _LINE


def _tables_at(shape: StepShape) -> int:
    return sum(map(_aligned, _sizes(shape).values()))


def _parts(whole: Numbers, shape: StepShape) -> dict[str, Numbers]:
    """The parts of `StepInputs` by name."""
    parts, at = {}, 0
    for name, size in _sizes(shape).items():
        parts[name] = whole[at : at + size]
        at += _aligned(size)
    return {**parts, "tables": whole[at:]}
