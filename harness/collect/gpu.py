"""The GPU's counters through NVML, if there is a GPU and `nvidia-ml-py` is installed."""

from typing import Any, Protocol

from harness.collect.source import SourceError
from harness.records import GpuSample


class GpuSampler(Protocol):
    """Reads all GPUs of the machine at once."""

    names: list[str]

    def sample(self, t_ns: int) -> list[GpuSample]: ...

    def close(self) -> None: ...


class NoGpu:
    """Samples nothing; `reason` says why."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.names: list[str] = []

    def sample(self, t_ns: int) -> list[GpuSample]:  # noqa: ARG002
        return []

    def close(self) -> None:
        return


class NvmlSampler:
    """NVML, initialised by `open_gpu_sampler`."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles = [
            nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())
        ]
        self.names = [str(nvml.nvmlDeviceGetName(handle)) for handle in self._handles]

    def sample(self, t_ns: int) -> list[GpuSample]:
        """One reading of each GPU. Raises SourceError."""
        try:
            return [
                GpuSample(
                    t_ns=t_ns,
                    gpu=index,
                    utilisation=self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
                    memory_bytes=self._nvml.nvmlDeviceGetMemoryInfo(handle).used,
                    power_w=self._power_w(handle),
                )
                for index, handle in enumerate(self._handles)
            ]
        except self._nvml.NVMLError as error:
            raise SourceError(f"GPU counters could not be read: {error}") from error

    def close(self) -> None:
        self._nvml.nvmlShutdown()

    def _power_w(self, handle: object) -> float | None:
        try:
            return float(self._nvml.nvmlDeviceGetPowerUsage(handle)) / 1000
        except self._nvml.NVMLError:  # not every GPU reports it
            return None


def open_gpu_sampler() -> GpuSampler:
    try:
        import pynvml
    except ImportError:
        return NoGpu("no GPU counters: nvidia-ml-py is not installed (pip install 'walkaway[gpu]')")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return NoGpu(f"no GPU counters: NVML says {error}")
    if pynvml.nvmlDeviceGetCount() == 0:
        pynvml.nvmlShutdown()
        return NoGpu("no GPU counters: NVML finds no GPU")
    return NvmlSampler(pynvml)
