"""From a step plan to tensors.

The tokens of all spans are laid end to end, T in total. Each has a position in its request and a
slot in the cache: `slot = block * block_size + offset`. Spans of a single token come first: they
attend together; every longer span attends by itself.

Most steps are plain: each request is owed one token. Their inputs are written into memory that is
made once (`DecodeRows`). A step on a device has its inputs in `step_inputs`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from reference_engine.core.request import Request
from reference_engine.core.step import StepPlan

_HIDDEN = float("-inf")


class Span(NamedTuple):
    """Tokens `first` to `last - 1` of a request; all earlier ones have been computed. `table`: its
    blocks, which it keeps as long as the step takes, also if the next one's plan takes them away.
    """

    request: Request
    first: int
    last: int
    table: list[int]


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Rows of the batch that attend together: Q tokens of each of R requests.

    `blocks` [R * N] are the requests' blocks, each one's padded on the right with block 0; `mask`
    [R, 1, Q, N * block_size] is 0 where a token may look and -inf elsewhere, for all heads.
    """

    rows: slice
    num_requests: int
    blocks: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Input of one forward pass: three tensors [T], and the rows grouped for attention, in order.

    `last_rows` [S] are the rows whose output is sampled, for `sampling_requests` in that order;
    None: all of them.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    groups: list[AttentionGroup]
    last_rows: Tensor | None
    sampling_requests: list[Request]


def spans_of(plan: StepPlan) -> list[Span]:
    spans = []
    for request, num_tokens in plan.scheduled.items():
        first = request.num_computed_tokens
        spans.append(Span(request, first, first + num_tokens, request.block_table))
    return spans


def build_batch(spans: Sequence[Span], block_size: int, device: torch.device) -> Batch:
    """Block tables must already cover the spans' tokens."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    last_rows: list[int] = []
    sampling_requests: list[Request] = []
    ordered = sorted(spans, key=lambda span: span.last - span.first > 1)
    for request, first, last, table in ordered:
        token_ids += request.token_ids[first:last]
        positions += range(first, last)
        slots += [table[p // block_size] * block_size + p % block_size for p in range(first, last)]
        if last == request.num_tokens:
            last_rows.append(len(token_ids) - 1)
            sampling_requests.append(request)
    # One tensor for all three, so that there is one copy to the device.
    rows = torch.tensor([token_ids, positions, slots], device=device)
    return Batch(
        token_ids=rows[0],
        positions=rows[1],
        slots=rows[2],
        groups=_group(ordered, rows[1], block_size),
        last_rows=torch.tensor(last_rows, dtype=torch.long, device=device),
        sampling_requests=sampling_requests,
    )


def _group(ordered: list[Span], positions: Tensor, block_size: int) -> list[AttentionGroup]:
    singles = [span for span in ordered if span.last - span.first == 1]
    parts = [singles] if singles else []
    parts += [[span] for span in ordered[len(singles) :]]
    groups, start = [], 0
    for part in parts:
        rows = slice(start, start + sum(span.last - span.first for span in part))
        blocks = _context_blocks(part, block_size, positions.device)
        context = torch.arange(blocks.shape[1] * block_size, device=positions.device)
        seen = context <= positions[rows].view(len(part), 1, -1, 1)
        groups.append(
            AttentionGroup(rows, len(part), blocks.flatten(), torch.where(seen, 0.0, _HIDDEN))
        )
        start = rows.stop
    return groups


def _context_blocks(spans: list[Span], block_size: int, device: torch.device) -> Tensor:
    needed = [-(-span.last // block_size) for span in spans]
    longest = max(needed)
    padded = [
        span.table[:count] + [0] * (longest - count)
        for span, count in zip(spans, needed, strict=True)
    ]
    return torch.tensor(padded, device=device)


def is_plain(spans: Sequence[Span]) -> bool:
    """Whether each request gets the one token that it is owed."""
    return all(last - first == 1 and last == r.num_tokens for r, first, last, _ in spans)


_HEAD: Final = 4


class DecodeRows:
    """The inputs of a plain step, row by row: each step overwrites the previous step's.

    `head` [4, B] has each row's token, position, slot and row of the sampling bias; `tables` [B, N]
    its blocks, padded on the right with block 0. A row beyond the requests reads and writes the
    spare block alone.
    """

    head: Tensor
    tables: Tensor

    def __init__(
        self,
        max_rows: int,
        max_blocks: int,
        block_size: int,
        spare_block: int,
    ) -> None:
        self._block_size, self._spare_block = block_size, spare_block
        size = max_rows * (_HEAD + max_blocks)
        self._numbers = torch.zeros(size, dtype=torch.long)
        self._masks = torch.empty(max_rows * max_blocks * block_size)
        self._lay_out(max_rows, max_blocks)

    def fill(self, spans: Sequence[Span], num_rows: int, *, min_blocks: int = 1) -> None:
        size = self._block_size
        last = max([span.first for span in spans], default=0)
        width = max(last // size + 1, min_blocks)
        if self.tables.shape != (num_rows, width):
            self._lay_out(num_rows, width)
        columns = []
        for blocks, (request, position, _, table) in zip(self._tables, spans, strict=False):
            at = position // size
            slot = table[at] * size + position % size
            bias_row = request.sampling.ignore_eos
            columns.append((request.token_ids[position], position, slot, bias_row))
            blocks[: at + 1] = table[: at + 1]
            blocks[at + 1 :] = 0
        self._tables[len(columns) :] = self._spare_block
        self._head[:] = columns + [(0, 0, self._spare_block * size, 0)] * (num_rows - len(columns))

    def batch(self, spans: Sequence[Span]) -> Batch:
        """A plain step for the eager model, on a CPU."""
        self.fill(spans, len(spans))
        for mask, span in zip(self._mask, spans, strict=True):
            mask[: span.last] = 0.0
            mask[span.last :] = _HIDDEN
        token_ids, positions, slots, _ = self._columns
        requests = [span.request for span in spans]
        return Batch(token_ids, positions, slots, self._groups, None, requests)

    def _lay_out(self, num_rows: int, width: int) -> None:
        used = self._numbers[: num_rows * (_HEAD + width)]
        head, tables = used.tensor_split([num_rows * _HEAD])
        mask = self._masks[: num_rows * width * self._block_size].view(num_rows, 1, 1, -1)
        self.head, self.tables = head.view(_HEAD, num_rows), tables.view(num_rows, width)
        self._head, self._tables = self.head.numpy().T, self.tables.numpy()
        self._mask = mask.numpy()[:, 0, 0]
        self._columns = self.head.unbind()
        self._groups = [AttentionGroup(slice(0, num_rows), num_rows, tables, mask)]


def token_by_token(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """One forward pass for each token, in order, so that answers do not depend on the batch.

    Floating-point sums depend on their order, and a matrix product picks its order by its shape.
    With one row and a context padded to whole blocks, all shapes are a function of the token's
    position: batch-mates, chunk sizes, preemptions and cached blocks change nothing, bit by bit.
    The price is batching itself: `make bench BENCH=batch_invariance` measures it.
    """
    for span in spans:
        for position in range(span.first, span.last):
            yield [span._replace(first=position, last=position + 1)]
