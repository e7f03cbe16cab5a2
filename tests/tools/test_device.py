"""What is said of a device, and why there is none."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from reference_engine.device import look_around
from tests.conftest import has_gpu
from tests.reference_engine.fake_driver import H100, H200, machine
from tools.gpu.device import describe, facts_of_nvml, main, why_no_cuda
from tools.gpu.made_up_device import NVML, UUID, fake_torch
from tools.gpu.session import folder_name


def test_a_device_is_described_by_torch_and_its_own_nvml_counters() -> None:
    facts = describe(fake_torch(), NVML, UUID)
    assert (facts["card"], facts["cuda"], facts["compute_capability"]) == (
        "NVIDIA H200",
        "13.0",
        "9.0",
    )
    assert facts["clocks_mhz"] == {"graphics": [1755, 1980], "memory": [3201, 3201]}
    assert facts["power_limit_w"] is None, "it does not show it"
    assert facts["mig"] is False
    assert "driver" not in describe(fake_torch(), None, UUID)
    assert set(facts_of_nvml(NVML, "GPU-of-nobody")) == {"driver"}, "not those of another device"


def test_the_cards_name_is_written_before_torch_is_loaded(tmp_path: Path) -> None:
    """To load torch from a cold disk may take longer than the stage's box."""

    def load() -> Any:
        raise KeyboardInterrupt

    file = tmp_path / "device.json"
    with pytest.raises(KeyboardInterrupt):
        main(file, rehearses=False, look_around=machine(H200, H100), load_torch=load)
    assert json.loads(file.read_text())["card"] == "NVIDIA H200"
    assert folder_name(tmp_path) == "nvidia-h200"


def test_a_rehearsal_measures_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs the extra `engine` (torch)")
    file = tmp_path / "device.json"
    assert main(file, rehearses=True) == 0
    facts = json.loads(file.read_text())
    low, middle, high = facts["copy_bytes_s"]
    assert 0 < low <= middle <= high
    assert facts["card"] == "CPU"
    assert [one.name for one in tmp_path.iterdir()] == ["device.json"]


def test_kernels_are_interpreted_where_torch_sees_no_device() -> None:
    torch: Any = pytest.importorskip("torch", reason="needs the extra `engine` (torch)")
    assert has_gpu(look_around()) == torch.cuda.is_available()
    assert has_gpu(machine(H100, has_triton=False)()), "wherever its device file is, if anywhere"
    assert not has_gpu(machine()())


def test_without_a_device_one_sentence_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def unavailable() -> bool:
        warnings.warn(
            "CUDA initialization: CUDA unknown error - this may be due to an incorrectly set up "
            "environment, e.g. changing CUDA_VISIBLE_DEVICES. Setting the available devices to be "
            "zero. (Triggered internally at x.cpp:119.)",
            stacklevel=1,
        )
        return False

    file = tmp_path / "device.json"
    assert main(file, rehearses=False, look_around=machine(), load_torch=fake_torch) == 2
    assert capsys.readouterr().out.startswith("there is no NVIDIA driver here, libcuda.so.1: ")
    assert not file.exists()
    assert why_no_cuda(fake_torch()) is None
    assert why_no_cuda(fake_torch(is_available=unavailable)) == (
        "torch 2.11.0+cu130 sees no CUDA device, though the driver shows one (CUDA unknown error - "
        "this may be due to an incorrectly set up environment, e.g. changing "
        "CUDA_VISIBLE_DEVICES): see what nvidia-smi says"
    )
