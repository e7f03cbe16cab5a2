"""The GPUs of a server: through a made-up NVML, and from the page of a loopback exporter."""

import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from harness.collect.gpu import DcgmGpus, NvmlGpus, gpus_of
from harness.collect.source import Notes, SourceError
from harness.records import GpuSample
from tests.conftest import ServePages


class NvmlError(Exception):
    """As pynvml's."""


def unless(is_hidden: bool, value: object) -> Callable[[object], Any]:
    def read(_: object) -> Any:
        if is_hidden:
            raise NvmlError("not supported")
        return value

    return read


def fake_nvml(**hidden: bool) -> SimpleNamespace:
    """Two GPUs; `hidden`: the quantities that they do not show."""

    def hides(name: str) -> bool:
        return hidden.get(name, False) or hidden.get("all", False)

    return SimpleNamespace(
        NVMLError=NvmlError,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetUUID=lambda index: f"GPU-{index}",
        nvmlDeviceGetName=lambda index: f"Fake {index}",
        nvmlDeviceGetUtilizationRates=unless(hides("utilisation"), SimpleNamespace(gpu=50)),
        nvmlDeviceGetMemoryInfo=unless(hides("memory"), SimpleNamespace(used=1024)),
        nvmlDeviceGetPowerUsage=unless(hides("power"), 70_500),
        nvmlDeviceGetTotalEnergyConsumption=unless(hides("energy"), 9_250),
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
    )


def by_uuid(uuid: str) -> int:
    if uuid != "MIG-7":
        raise NvmlError("not found")
    return 7


def test_nvml_gives_a_row_a_device_in_our_units_and_null_for_what_it_hides() -> None:
    gpus = NvmlGpus(fake_nvml(), lambda: 7)
    assert gpus.names == ["Fake 0", "Fake 1"]
    row = GpuSample(t_ns=7, gpu=0, utilisation=0.5, memory_bytes=1024, power_w=70.5, energy_j=9.25)
    assert gpus.sample()[0] == row
    (_, other) = NvmlGpus(fake_nvml(power=True, energy=True), lambda: 7).sample()
    assert (other.gpu, other.utilisation, other.power_w, other.energy_j) == (1, 0.5, None, None)
    with pytest.raises(SourceError, match="GPU 0 shows none of its counters"):
        NvmlGpus(fake_nvml(all=True), lambda: 7).sample()


def test_nvml_reads_only_the_device_that_computes_for_the_server() -> None:
    gpus = NvmlGpus(fake_nvml(), lambda: 7, uuid="GPU-1")
    assert gpus.names == ["Fake 1"]
    assert [row.gpu for row in gpus.sample()] == [1]
    assert NvmlGpus(fake_nvml(), lambda: 7, uuid="GPU-of-another-machine").names == []


def test_of_an_instance_of_mig_only_its_memory_is_read_which_is_said() -> None:
    notes = Notes()
    gpus = gpus_of(fake_nvml(), notes, lambda: 7, uuid="MIG-7")
    assert gpus is not None
    assert gpus.names == ["Fake 7"]
    assert gpus.sample() == [
        GpuSample(t_ns=7, gpu=0, utilisation=None, memory_bytes=1024, power_w=None)
    ]
    assert "only the memory is its own" in "".join(notes.texts())


@pytest.mark.parametrize(
    ("uuid", "is_broken", "why"),
    [
        ("MIG-8", False, "no GPU counters: NVML finds no GPU MIG-8"),
        (None, True, "no GPU counters: NVML says it is not there$"),
        ("GPU-0", True, "NVML says it is not there; it comes with NVIDIA's driver"),
    ],
)
def test_gpus_that_nvml_does_not_show_are_a_note(
    uuid: str | None, is_broken: bool, why: str
) -> None:
    def init() -> None:
        if is_broken:
            raise NvmlError("it is not there")

    notes, nvml = Notes(), fake_nvml()
    nvml.nvmlInit = init
    assert gpus_of(nvml, notes, lambda: 7, uuid=uuid) is None
    assert re.search(why, "".join(notes.texts()))


def fields(uuid: str, more: str = "", **values: float) -> str:
    labels = f'{{gpu="0",UUID="{uuid}",modelName="Card of {uuid}"{more}}}'
    return "".join(f"DCGM_FI_{name}{labels} {value}\n" for name, value in values.items())


PAGE = (
    "# TYPE DCGM_FI_DEV_POWER_USAGE gauge\n"
    "# TYPE DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION counter\n"
    + fields("b", DEV_GPU_UTIL=97, PROF_GR_ENGINE_ACTIVE=0.5, DEV_FB_USED=3, DEV_POWER_USAGE=310.5)
    + fields("b", DEV_TOTAL_ENERGY_CONSUMPTION=4_500, DEV_SM_CLOCK=1980)
    + fields("a", PROF_GR_ENGINE_ACTIVE=0.25)
    + fields("c", ',GPU_I_ID="1"', DEV_POWER_USAGE=99)
)


Exporter = Callable[..., DcgmGpus]


@pytest.fixture
def exporter(serve_pages: ServePages) -> Iterator[Exporter]:
    with httpx.Client(trust_env=False) as client:

        def read(*, status: int = 200, page: str = PAGE, **more: Any) -> DcgmGpus:
            url = serve_pages(lambda _: (status, {}, page.encode()))
            return DcgmGpus(client, f"{url}/metrics", lambda: 7, **more)

        yield read


def test_a_dcgm_page_gives_a_row_a_device_in_our_units(exporter: Exporter) -> None:
    """The instance of MIG is left out."""
    gpus = exporter()
    assert gpus.names == ["Card of a", "Card of b"]
    assert gpus.sample() == [
        GpuSample(t_ns=7, gpu=0, utilisation=0.25, memory_bytes=None, power_w=None),
        GpuSample(
            t_ns=7, gpu=1, utilisation=0.97, memory_bytes=3 * 2**20, power_w=310.5, energy_j=4.5
        ),
    ]
    of_one = exporter(uuid="b")
    assert (of_one.names, [row.power_w for row in of_one.sample()]) == (["Card of b"], [310.5])


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"status": 404}, "could not be read: status 404"),
        ({"page": "<html>"}, "is not in the Prometheus text format"),
        ({"page": "up 1\n"}, "shows none of DCGM_FI_DEV_FB_USED, .*: name the page of a DCGM"),
        ({"page": ""}, "shows none of DCGM_FI_DEV_FB_USED"),
        ({"uuid": "z"}, "does not show z, on which the engine computes, but a, b: name"),
    ],
)
def test_a_page_that_cannot_serve_says_why(
    exporter: Exporter, given: dict[str, Any], why: str
) -> None:
    with pytest.raises(SourceError, match=why):
        exporter(**given)
