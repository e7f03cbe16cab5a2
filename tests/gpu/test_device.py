"""What is said of a device, and why there is none."""

import warnings
from typing import Any

import pytest

from reference_engine.device import NoGpuError
from tests.gpu.device import copy_rates, describe, facts_of_nvml, why_no_cuda
from tests.gpu.made_up_device import NOON, NVML, fake_torch


def test_a_device_is_described_by_torch_and_its_own_nvml_counters() -> None:
    facts = describe(fake_torch(), NVML, "cuda", NOON, [4e12, 5e12, 6e12])
    assert (facts["card"], facts["cuda"], facts["compute_capability"]) == (
        "NVIDIA H200",
        "13.0",
        "9.0",
    )
    assert facts["clocks_mhz"] == {"graphics": [1755, 1980], "memory": [3201, 3201]}
    assert facts["power_limit_w"] is None, "it does not show it"
    assert facts["mig"] is False
    assert facts["copy_bytes_s"] == [4.5e12, 5e12, 5.5e12]
    assert "driver" not in describe(fake_torch(), None, "cuda", NOON)
    assert set(facts_of_nvml(NVML, "GPU-of-nobody")) == {"driver"}, "not those of another device"


def test_without_a_device_one_sentence_says_why() -> None:
    def no_driver() -> None:
        raise NoGpuError("there is no NVIDIA driver here: install it")

    def unavailable() -> bool:
        warnings.warn(
            "CUDA initialization: CUDA unknown error - this may be due to an incorrectly set up "
            "environment, e.g. changing CUDA_VISIBLE_DEVICES. Setting the available devices to be "
            "zero. (Triggered internally at x.cpp:119.)",
            stacklevel=1,
        )
        return False

    assert why_no_cuda(fake_torch(), lambda: None) is None
    said = why_no_cuda(fake_torch(), no_driver)
    assert said == "there is no NVIDIA driver here: install it"
    assert why_no_cuda(fake_torch(is_available=unavailable), lambda: None) == (
        "torch 2.11.0+cu130 sees no CUDA device, though the driver shows one (CUDA unknown error - "
        "this may be due to an incorrectly set up environment, e.g. changing "
        "CUDA_VISIBLE_DEVICES): see what nvidia-smi says"
    )


def test_copies_are_timed_on_the_cpu_too() -> None:
    torch: Any = pytest.importorskip("torch", reason="needs the extra `engine` (torch)")
    rates = copy_rates(torch, "cpu", 1 << 16, 3)
    assert len(rates) == 3
    assert all(rate > 0 for rate in rates)
