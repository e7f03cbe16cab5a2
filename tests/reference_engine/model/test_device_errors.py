"""Torch's errors of a device: which end a step, which end the process, and which are bugs."""

import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the extra `engine` (torch)")

from reference_engine.model.device_errors import device_errors  # noqa: E402
from reference_engine.model.runners import DeviceFailedError, OutOfMemoryError  # noqa: E402

ASYNC = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the "
    "stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1"
)
SHORT = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of "
    "which 1.19 GiB is free"
)
REST = ". Including non-PyTorch memory, this process has 77.91 GiB memory in use. See also"
# As torch 2.6 to 2.13 and triton word them; before torch 2.8 an AcceleratorError is a RuntimeError.
OF_MEMORY = [
    (torch.OutOfMemoryError(SHORT + REST), SHORT),
    (RuntimeError(f"CUDA error: out of memory{ASYNC}"), "CUDA error: out of memory"),
    (
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ),
    (RuntimeError("Triton Error [CUDA]: out of memory"), "Triton Error [CUDA]: out of memory"),
]
OF_THE_DEVICE = [
    f"CUDA error: an illegal memory access was encountered{ASYNC}",
    f"CUDA error: device-side assert triggered{ASYNC}",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(handle)`",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "Triton Error [CUDA]: misaligned address",
]


@pytest.mark.parametrize(("error", "said"), OF_MEMORY, ids=[said[:40] for _, said in OF_MEMORY])
def test_out_of_memory_in_the_devices_words_without_the_advice(
    error: RuntimeError, said: str
) -> None:
    with pytest.raises(OutOfMemoryError) as raised, device_errors():
        raise error
    assert str(raised.value) == said


@pytest.mark.parametrize("said", OF_THE_DEVICE, ids=[said[:40] for said in OF_THE_DEVICE])
def test_a_device_that_has_failed_in_its_own_words(said: str) -> None:
    with pytest.raises(DeviceFailedError) as raised, device_errors():
        raise RuntimeError(said)
    assert str(raised.value) == said.splitlines()[0]


@pytest.mark.skipif(not hasattr(torch, "AcceleratorError"), reason="torch before 2.8")
def test_torchs_own_kind_of_error_is_the_devices_whatever_it_says() -> None:
    with pytest.raises(DeviceFailedError, match="something new"), device_errors():
        raise torch.AcceleratorError("something new")


def test_a_bug_stays_the_error_that_it_is() -> None:
    bug = RuntimeError("Expected all tensors to be on the same device")
    with pytest.raises(RuntimeError) as raised, device_errors():
        raise bug
    assert raised.value is bug


def test_a_step_that_is_out_of_memory_holds_none_of_its_tensors_any_more() -> None:
    seen: list[weakref.ref[Any]] = []

    def compute() -> None:
        activations = torch.ones(10)
        seen.append(weakref.ref(activations))
        torch.empty(2**60)
        raise AssertionError("there was room for an exabyte")

    out_of_memory = pytest.raises(OutOfMemoryError, match="can't allocate memory")
    with out_of_memory as raised, device_errors(torch.device("cpu")):
        compute()
    assert raised.value.__context__ is not None, "which has the frames of the step"
    assert seen[0]() is None
