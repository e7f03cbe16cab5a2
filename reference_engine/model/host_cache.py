"""Blocks of the cache on the host: preempted requests keep what they have computed there, and
another worker's blocks arrive there.

A request's blocks lie anywhere in the cache, and mostly one after the other on the host. So they
are gathered on the device and copied in long runs. On CUDA the host's memory is pinned, and the
copies are ordered with the step's kernels by their stream.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from reference_engine.config import EngineConfigError
from reference_engine.core.step import StepPlan
from reference_engine.model.device_errors import device_errors
from reference_engine.model.runners import OutOfMemoryError

_GB = 1e9
_ADVICE = "lower --swap-space-blocks, or do without --preemption swap"


def allocate_on_host(cache: Tensor, num_blocks: int) -> Tensor:
    """`num_blocks` blocks like the cache's on the host; pinned for a cache on CUDA."""
    shape = (num_blocks, *cache.shape[1:])
    return torch.empty(shape, dtype=cache.dtype, pin_memory=cache.is_cuda)


class HostCache:
    """A tensor [num_host_blocks, ...] on the host for each of the `caches` [num_blocks, ...]."""

    def __init__(
        self,
        caches: Sequence[Tensor],
        num_host_blocks: int,
        free: int,
        allocate: Callable[[Tensor, int], Tensor] = allocate_on_host,
    ) -> None:
        """Raises EngineConfigError if they need more than the host's `free` bytes, or more than
        `allocate` gets: a host may limit what is pinned.
        """
        self.block_bytes = sum(cache[:1].nbytes for cache in caches)
        needed = num_host_blocks * self.block_bytes
        what = f"swap_space_blocks: {num_host_blocks:,} blocks ({needed / _GB:.1f} GB) do not fit"
        if needed > free:
            raise EngineConfigError(
                f"{what} into the {free / _GB:.1f} GB of the host's memory that are free: {_ADVICE}"
            )
        try:
            with device_errors():
                self._caches = [(cache, allocate(cache, num_host_blocks)) for cache in caches]
        except OutOfMemoryError as error:
            raise EngineConfigError(
                f"{what} into the host's memory ({error}): {_ADVICE}"
            ) from error

    def copy(self, plan: StepPlan) -> None:
        if plan.swap_out:
            blocks, on_host = zip(*plan.swap_out, strict=True)
            at = self._on_device(blocks)
            for cache, host in self._caches:
                staged = cache.index_select(0, at)
                for rows, run in _runs(on_host):
                    host[run].copy_(staged[rows], non_blocking=True)
        if plan.swap_in:
            on_host, blocks = zip(*plan.swap_in, strict=True)
            at = self._on_device(blocks)
            for cache, host in self._caches:
                staged = torch.empty_like(cache[: len(blocks)])
                for rows, run in _runs(on_host):
                    staged[rows].copy_(host[run], non_blocking=True)
                cache.index_copy_(0, at, staged)

    def export_blocks(self, blocks: Sequence[int]) -> bytearray:
        """[layers, blocks, ...] as bytes, from the device."""
        at = self._on_device(blocks)
        layers = [cache.index_select(0, at) for cache, _ in self._caches]
        return bytearray(torch.stack(layers).cpu().view(torch.uint8).numpy())

    def import_blocks(self, on_host: Sequence[int], data: bytes | bytearray) -> None:
        cache, _ = self._caches[0]
        layers = torch.frombuffer(bytearray(data), dtype=cache.dtype)
        layers = layers.view(len(self._caches), len(on_host), *cache.shape[1:])
        at = torch.tensor(on_host)
        for layer, (_, host) in zip(layers, self._caches, strict=True):
            host.index_copy_(0, at, layer)

    def _on_device(self, blocks: Sequence[int]) -> Tensor:
        """Call it once for all layers: such a copy waits for all that the device got before."""
        return torch.tensor(blocks, device=self._caches[0][0].device)


def _runs(blocks: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Stretches of consecutive numbers: where they stand in `blocks`, and the numbers."""
    breaks = [at for at, (a, b) in enumerate(pairwise(blocks), start=1) if b != a + 1]
    for start, end in pairwise([0, *breaks, len(blocks)]):
        yield slice(start, end), slice(blocks[start], blocks[start] + end - start)
