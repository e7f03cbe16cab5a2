"""The machine's own counters: CPU and memory through psutil, GPUs through NVML."""

from typing import Any

import psutil

from harness.collect.source import Notes, SourceError
from harness.records import CpuSample, GpuSample

MACHINE = "machine"
_NO_GPU = "no GPU counters: "


class CpuSampler:
    """CPU time between two calls, per process. `watch` may be called from another thread."""

    def __init__(self) -> None:
        self._processes: dict[str, psutil.Process] = {}
        self._last: dict[str, tuple[int, float]] = {}

    def watch(self, name: str, pid: int, t_ns: int) -> None:
        """Count the process's time from now on: a short load meets only one sample."""
        try:
            process = psutil.Process(pid)
            times = process.cpu_times()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            self._processes.pop(name, None)
            return
        self._last[name] = (t_ns, float(times.user + times.system))
        self._processes[name] = process

    def sample(self, t_ns: int) -> list[CpuSample]:
        """A row for each process, and from the second call on for the machine."""
        rows = self._add(t_ns, MACHINE, psutil.cpu_times(), psutil.virtual_memory().used, None)
        for name, process in list(self._processes.items()):
            try:
                memory, handles = process.memory_info().rss, process.num_fds()
                rows += self._add(t_ns, name, process.cpu_times(), memory, handles)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                self._processes.pop(name, None)
        return rows

    def _add(
        self, t_ns: int, name: str, times: Any, memory: int, handles: int | None
    ) -> list[CpuSample]:
        cpu_s = float(times.user + times.system)
        if name == MACHINE:
            cpu_s += getattr(times, "nice", 0.0)
        last_ns, last_s = self._last.get(name, (t_ns, 0.0))
        self._last[name] = (t_ns, cpu_s)
        if t_ns <= last_ns:
            return []
        cores = max(0.0, cpu_s - last_s) / ((t_ns - last_ns) / 1e9)
        return [CpuSample(t_ns=t_ns, process=name, cores=cores, rss_bytes=memory, handles=handles)]


class GpuSampler:
    """Reads all GPUs of the machine at once, by an initialised `pynvml`."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles = [
            nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())
        ]
        self.names = [str(nvml.nvmlDeviceGetName(handle)) for handle in self._handles]
        self.close = nvml.nvmlShutdown

    def sample(self, t_ns: int) -> list[GpuSample]:
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

    def _power_w(self, handle: object) -> float | None:
        try:
            return float(self._nvml.nvmlDeviceGetPowerUsage(handle)) / 1000
        except self._nvml.NVMLError:  # not every GPU reports it
            return None


def open_gpus(notes: Notes) -> GpuSampler | None:
    """None, with a note, if no GPU can be read."""
    try:
        import pynvml
    except ImportError:
        notes.add(f"{_NO_GPU}nvidia-ml-py is not installed (pip install 'walkaway[gpu]')")
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        notes.add(f"{_NO_GPU}NVML says {error}")
        return None
    gpus = GpuSampler(pynvml)
    if gpus.names:
        return gpus
    gpus.close()
    notes.add(f"{_NO_GPU}NVML finds no GPU")
    return None
