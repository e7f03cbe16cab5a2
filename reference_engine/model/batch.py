"""From a step plan to tensors: the one fiddly place, kept in one function.

The tokens of all scheduled requests are laid end to end, T in total. Each has a position in its
request and a slot in the cache: `slot = block * block_size + offset`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from reference_engine.core.step import StepPlan
from reference_engine.request import Request


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows `start` to `start + length` of the batch: several tokens of one request.

    `context_slots` [context]: the slots of all its tokens up to the last of the chunk.
    """

    start: int
    length: int
    context_slots: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's input. T tokens, of which B are the only token of their request.

    `single_rows` [B] are their rows; `single_slots` [B, L] the slots of their contexts, padded on
    the right to whole blocks; `single_mask` [B, L] is true where there is context. `last_rows` [S]
    are the rows whose output is sampled, for `sampling_requests` in that order.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    single_rows: Tensor
    single_slots: Tensor
    single_mask: Tensor
    chunks: list[Chunk]
    last_rows: Tensor
    sampling_requests: list[Request]


def build_batch(plan: StepPlan, block_size: int, device: torch.device) -> Batch:
    """Lay out the plan's tokens. Block tables must already cover them."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    singles: list[tuple[int, Request]] = []
    chunks: list[Chunk] = []
    sampling: list[tuple[int, Request]] = []
    for scheduled in plan.scheduled:
        request, length = scheduled
        first, start = request.num_computed_tokens, len(token_ids)
        last = first + length
        token_ids += request.token_ids[first:last]
        positions += range(first, last)
        table = request.block_table
        slots += [table[p // block_size] * block_size + p % block_size for p in range(first, last)]
        if length == 1:
            singles.append((start, request))
        else:
            context = _context_slots([table], block_size, device)[0, :last]
            chunks.append(Chunk(start, length, context))
        if scheduled.samples:
            sampling.append((start + length - 1, request))
    single_slots = _context_slots([r.block_table for _, r in singles], block_size, device)
    lengths = [[request.num_computed_tokens + 1] for _, request in singles]
    context_positions = torch.arange(single_slots.shape[1], device=device)
    return Batch(
        token_ids=torch.tensor(token_ids, device=device),
        positions=torch.tensor(positions, device=device),
        slots=torch.tensor(slots, device=device),
        single_rows=torch.tensor([row for row, _ in singles], device=device),
        single_slots=single_slots,
        single_mask=context_positions < torch.tensor(lengths, device=device),
        chunks=chunks,
        last_rows=torch.tensor([row for row, _ in sampling], dtype=torch.long, device=device),
        sampling_requests=[request for _, request in sampling],
    )


def _context_slots(tables: list[list[int]], block_size: int, device: torch.device) -> Tensor:
    """All slots of each block table, in order, padded with slot 0: [tables, longest]."""
    longest = max((len(table) for table in tables), default=0)
    padded = [table + [0] * (longest - len(table)) for table in tables]
    blocks = torch.tensor(padded, dtype=torch.long, device=device).view(len(tables), longest)
    offsets = torch.arange(block_size, device=device)
    return (blocks[:, :, None] * block_size + offsets).flatten(start_dim=1)
