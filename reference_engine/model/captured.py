"""The decode step as CUDA graphs: one for each number of rows in a short list.

A graph replays the same kernels on the same memory. So a step with fewer requests than its graph
has rows fills the rest with rows that do nothing, and inputs are copied to where the graph reads
them. On a device the attention stops at each row's own length, so the tables have their full width.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from reference_engine.core.request import Request
from reference_engine.model.batch import DecodeRows
from reference_engine.model.decode_step import DecodeStep


def bucket_sizes(max_rows: int) -> list[int]:
    """Powers of two, and the most rows that there can be."""
    return [*(1 << i for i in range((max_rows - 1).bit_length())), max_rows]


def bucket_for(num_requests: int, sizes: Sequence[int]) -> int:
    return next(size for size in sizes if size >= num_requests)


class Recorder(Protocol):
    """Records a computation, which has run once before, as something that can be replayed."""

    def record(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """A function that replays it, and the tensor that then has its result."""


class CudaGraphs:
    """All graphs share a pool of memory: only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = compute()
        return graph.replay, result


class CapturedStep:
    """Answers plain steps of up to `max_rows` requests."""

    def __init__(
        self,
        step: DecodeStep,
        pools: Sequence[Tensor],
        rows: DecodeRows,
        *,
        max_rows: int,
        max_blocks: int,
        recorder: Recorder,
    ) -> None:
        self._rows, self._sizes = rows, bucket_sizes(max_rows)
        device = pools[0].device
        self._head = {
            size: torch.zeros(4, size, dtype=torch.long, device=device) for size in self._sizes
        }
        self._tables = torch.zeros(max_rows, max_blocks, dtype=torch.long, device=device)
        self._graphs: dict[int, tuple[Callable[[], None], Tensor]] = {}
        for size in reversed(self._sizes):  # the largest first: the others fit into its memory
            self._fill([], size)

            def compute(size: int = size) -> Tensor:
                logits: Tensor = step(self._head[size], self._tables[:size], pools)
                return logits

            compute()  # Triton compiles, and libraries make their workspaces, outside of a graph
            self._graphs[size] = recorder.record(compute)

    def logits(self, requests: list[Request]) -> Tensor:
        """Overwritten by the next call."""
        size = bucket_for(len(requests), self._sizes)
        self._fill(requests, size)
        replay, logits = self._graphs[size]
        replay()
        return logits[: len(requests)]

    def _fill(self, requests: list[Request], size: int) -> None:
        """Pinned memory is written again only when the step's tokens have come back."""
        self._rows.fill(requests, size)
        tables = self._rows.tables
        self._head[size].copy_(self._rows.head, non_blocking=True)
        self._tables[:size, : tables.shape[1]].copy_(tables, non_blocking=True)
