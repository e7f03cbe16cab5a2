"""The inputs of a step on a device: one copy from the host, into memory that is made once.

The tokens of all requests are laid end to end: first the decodes, a token each, then the prompts.
A CUDA graph replays the same kernels on the same memory, so a step has one of a few shapes, and
what a shape has too much is filled with rows that do nothing.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from reference_engine.core.request import Request
from reference_engine.model.batch import Span
from reference_engine.model.memory import MOST_PARTS

Table: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.int64]]

_HEADS_IN_TILE: Final = 64
_LINE: Final = 16  # numbers
_FEWEST_PART_TOKENS: Final = 64


def prompt_tile(group: int) -> int:
    """Neighbouring tokens of a prompt that attend together, for `group` query heads a kv head."""
    return max(1, _HEADS_IN_TILE // (1 << (group - 1).bit_length()))


def part_tokens(max_context: int) -> int:
    """Tokens of a context that one program attends to: few enough to keep a whole device busy with
    one request, and so many that a long context has at most `MOST_PARTS` parts.
    """
    shortest = -(-max_context // MOST_PARTS)
    return -(-shortest // _FEWEST_PART_TOKENS) * _FEWEST_PART_TOKENS


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
    bias, in the order of the requests that are sampled. `tables` [rows * width]: blocks of each
    request. `width` [1]: blocks in a row of it. `tiles` [tiles, 4]: first token, number of tokens,
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
        self._spare_slot = spare_block * limits.block_size
        *_, tables_at = _edges(limits.mixed_shape(limits.tokens))
        size = tables_at + limits.rows * limits.blocks
        is_pinned = device.type == "cuda"
        self._copied = torch.cuda.Event() if is_pinned else None  # type: ignore[no-untyped-call]
        self._on_host = torch.zeros(size, dtype=torch.long, pin_memory=is_pinned)
        self._on_device = torch.zeros(size, dtype=torch.long, device=device)
        self._numbers = self._on_host.numpy()

    def inputs(self, shape: StepShape) -> StepInputs:
        """Where the steps of this shape read, until the next `fill`."""
        whole, edges = self._on_device, _edges(shape)
        parts = [whole[at : at + size] for at, size in zip(edges, _sizes(shape), strict=False)]
        ids, positions, slots, decodes, last_rows, bias_rows, width, tiles = parts
        return StepInputs(
            token_ids=ids,
            positions=positions,
            slots=slots,
            decodes=decodes,
            last_rows=last_rows,
            bias_rows=bias_rows,
            width=width,
            tiles=tiles.view(-1, 4),
            tables=whole[edges[-1] :],
            max_context=self.limits.context,
        )

    def fill(self, spans: Sequence[Span], shape: StepShape) -> list[Request]:
        """Lay out the spans' tokens, decodes first; returns the requests that are sampled, in the
        order of the rows of logits.
        """
        if self._copied is not None:
            self._copied.synchronize()
        edges, numbers, size = _edges(shape), self._numbers, self.limits.block_size
        width = max((-(-span.last // size) for span in spans), default=1)
        tables = numbers[edges[-1] : edges[-1] + len(spans) * width].reshape(-1, width)
        columns = _Columns([], [], [], [], [], [])
        sampling: list[Request] = []
        ordered = sorted(spans, key=_is_prompt)
        for row, (request, first, last) in enumerate(ordered):
            table = request.block_table[: -(-last // size)]
            tables[row, : len(table)] = table
            columns.add(Span(request, first, last), table, size)
            if last == request.num_tokens:
                columns.last_rows.append(len(columns.slots) - 1)
                columns.bias_rows.append(int(request.sampling.ignore_eos))
                sampling.append(request)
        rests = (0, 0, self._spare_slot, -1, 0, 0)
        parts = zip(edges, _sizes(shape), columns, rests, strict=False)
        for at, length, column, rest in parts:
            numbers[at : at + len(column)] = column
            numbers[at + len(column) : at + length] = rest
        numbers[edges[6]] = width
        self._lay_tiles(ordered, numbers[edges[7] : edges[8]].reshape(-1, 4))
        used = edges[-1] + tables.size
        self._on_device[:used].copy_(self._on_host[:used], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return sampling

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


class _Columns(NamedTuple):
    """The first parts of `StepInputs`, without what fills them up."""

    token_ids: list[int]
    positions: list[int]
    slots: list[int]
    decodes: list[int]
    last_rows: list[int]
    bias_rows: list[int]

    def add(self, span: Span, table: list[int], size: int) -> None:
        token_ids, first = span.request.token_ids, span.first
        if not _is_prompt(span):
            self.token_ids.append(token_ids[first])
            self.positions.append(first)
            self.slots.append(table[first // size] * size + first % size)
            self.decodes.append(first)
            return
        self.token_ids.extend(token_ids[first : span.last])
        self.positions.extend(range(first, span.last))
        self.slots.extend(table[p // size] * size + p % size for p in range(first, span.last))


def _is_prompt(span: Span) -> bool:
    return span.last - span.first > 1


def _sizes(shape: StepShape) -> list[int]:
    """Numbers in each part of `StepInputs` before the tables."""
    return [*[shape.tokens] * 3, *[shape.rows] * 3, 1, 4 * shape.tiles]


def _edges(shape: StepShape) -> list[int]:
    """Where each part begins, and the tables: on a line of 128 bytes, so that kernels which are
    compiled for the alignment of one shape fit all.
    """
    return [0, *accumulate(-(-size // _LINE) * _LINE for size in _sizes(shape))]
