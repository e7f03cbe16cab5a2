"""Torch's errors of a device: which end a step, which end the process, and which are bugs."""

import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the extra `engine` (torch)")

from reference_engine.config import EngineConfig  # noqa: E402
from reference_engine.core.request import Request, Sampling  # noqa: E402
from reference_engine.core.scheduler import Scheduler  # noqa: E402
from reference_engine.model.attention import ReadBuffer  # noqa: E402
from reference_engine.model.device_errors import device_errors  # noqa: E402
from reference_engine.model.runners import DeviceFailedError, OutOfMemoryError  # noqa: E402
from reference_engine.model.tokenizer import EOS_TOKEN_ID  # noqa: E402
from reference_engine.model.torch_runner import TorchRunner  # noqa: E402
from tests.reference_engine.conftest import end, run_step, run_to_the_end  # noqa: E402

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


@pytest.mark.gpu
def test_a_cuda_device_that_is_out_of_memory_gives_back_what_the_step_had_and_computes_on() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda")
    torch.ones(1, device=device)
    reserved = torch.cuda.memory_reserved(device)

    def compute() -> None:
        activations = torch.ones(2**28, device=device)
        torch.empty(2**50, device=activations.device)

    with pytest.raises(OutOfMemoryError, match="out of memory"), device_errors(device):
        compute()
    assert torch.cuda.memory_reserved(device) <= reserved
    assert torch.ones(4, device=device).sum().item() == 4


def test_a_read_buffer_that_had_no_room_to_grow_is_what_it_was() -> None:
    buffer = ReadBuffer(1, 4, torch.empty(0))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            buffer.views(2**40, 1, 16)
        copied, keys, values = buffer.views(3, 1, 16)
        assert copied.fill_(1.0).sum() == 3 * 16
        assert (keys.shape, values.shape) == ((1, 1, 6, 4), (1, 1, 6, 4))


class NoRoom:
    """In the place of a runner's step, with torch's own error."""

    is_compiled = False

    def logits(self, spans: Any) -> Any:
        return torch.empty(2**60), []


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_after_a_step_without_room_the_next_request_gets_the_tokens_that_it_always_gets(
    phase: str,
) -> None:
    config = EngineConfig(
        device="cpu", max_num_seqs=2, num_blocks=16, block_size=4, max_model_len=32
    )
    runner, scheduler = TorchRunner(config), Scheduler(config, frozenset({EOS_TOKEN_ID}))

    def ask(name: str) -> Request:
        sampling = Sampling(max_tokens=6, temperature=0.0, ignore_eos=True)
        request = Request(name, [300, 301, 302, 303, 304, 305, 306, 307, 308], sampling)
        scheduler.add(request)
        return request

    undisturbed = ask("undisturbed")
    run_to_the_end(scheduler, runner)
    ask("fails")
    if phase == "decode":
        run_step(scheduler, runner=runner)
    step, plan = runner.step, scheduler.schedule()
    runner.step = NoRoom()
    with pytest.raises(OutOfMemoryError, match="can't allocate memory"):
        runner.launch(plan)()
    runner.step = step
    for request in scheduler.give_up(plan):
        end(scheduler, request.request_id)
    scheduler.check_integrity()
    again = ask("again")
    run_to_the_end(scheduler, runner)
    assert again.token_ids == undisturbed.token_ids
