"""Torch's errors of a device, in the words of the Runner protocol.

After an error such as an illegal access the CUDA context is dead: every later call fails with the
same error, and only a new process can continue. When memory runs out, the context stays alive.
"""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from reference_engine.model.runners import DeviceFailedError, OutOfMemoryError

# torch before 2.8 raises a plain RuntimeError.
_ACCELERATOR_ERROR: Final[type[Exception] | tuple[()]] = getattr(torch, "AcceleratorError", ())
_OF_A_DEVICE: Final = (
    *("CUDA error", "CUDA driver error", "device-side assert", "Triton Error [CUDA]"),
    *("CUBLAS_STATUS", "CUDNN_STATUS"),
)
_OF_MEMORY: Final = ("out of memory", "STATUS_ALLOC_FAILED")
_OF_THE_HOST: Final = "DefaultCPUAllocator: can't allocate memory"
_NUM_SENTENCES: Final = 3  # then torch gives advice


@contextmanager
def device_errors(device: torch.device | None = None) -> Iterator[None]:
    """Raises OutOfMemoryError, with all that it can give back to the `device`, DeviceFailedError,
    and any other error as it is.
    """
    try:
        yield
    except RuntimeError as error:
        failure = translated(error)
        if failure is None:
            raise
        if isinstance(failure, OutOfMemoryError):
            traceback.clear_frames(error.__traceback__)  # they hold the tensors of the step
            if device is not None and device.type == "cuda":
                _give_back(device)
        raise failure from None


def translated(error: RuntimeError) -> OutOfMemoryError | DeviceFailedError | None:
    said = (str(error) or repr(error)).strip().splitlines()[0]
    said = ". ".join(said.split(". ")[:_NUM_SENTENCES]).removesuffix(".")
    if isinstance(error, torch.OutOfMemoryError) or _OF_THE_HOST in said:
        return OutOfMemoryError(said)
    if not isinstance(error, _ACCELERATOR_ERROR) and not any(one in said for one in _OF_A_DEVICE):
        return None
    is_of_memory = any(one in said for one in _OF_MEMORY)
    return OutOfMemoryError(said) if is_of_memory else DeviceFailedError(said)


def _give_back(device: torch.device) -> None:
    with device_errors():
        torch.cuda.synchronize(device)  # copies may still read what the next step overwrites
        torch.cuda.empty_cache()
