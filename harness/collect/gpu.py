"""The GPUs that compute for the server: through NVML, or from the page of a DCGM exporter.

Units of NVML: percent, bytes, milliwatts, millijoules. Units of DCGM's fields: percent (a ratio for
GR_ENGINE_ACTIVE), MiB, watts, millijoules; an exporter leaves out what a device does not support.
Source of both: NVML's API reference; dcgm-exporter's etc/default-counters.csv.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import httpx

from harness.collect.scrape import read_samples
from harness.collect.source import Notes, SourceError
from harness.records import GpuSample

NO_COUNTERS: Final = "no GPU counters: "
_OF_MIG: Final = (
    "the engine computes on an instance of MIG, and of GPU counters only the memory is its own: "
    "utilisation, power and energy are of the whole GPU, and not measured"
)
_MEND: Final = (
    "; it comes with NVIDIA's driver, and into a container with "
    "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
)

# The first field that a device shows is taken: NVML's utilisation is the same quantity as GPU_UTIL.
_FIELDS: Final[Mapping[str, tuple[tuple[str, float], ...]]] = {
    "utilisation": (("DCGM_FI_DEV_GPU_UTIL", 0.01), ("DCGM_FI_PROF_GR_ENGINE_ACTIVE", 1.0)),
    "memory_bytes": (("DCGM_FI_DEV_FB_USED", 2.0**20),),
    "power_w": (("DCGM_FI_DEV_POWER_USAGE", 1.0),),
    "energy_j": (("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", 1e-3),),
}
_NAMES: Final = {name for fields in _FIELDS.values() for name, _ in fields}


class Gpus(Protocol):
    """The target's devices. `sample` gives one row a device and raises SourceError."""

    names: list[str]
    interval_s: float

    def sample(self) -> list[GpuSample]: ...

    def close(self) -> None: ...


class NvmlGpus:
    """GPUs by an initialised `pynvml`: the device of this UUID, else all devices of this machine.

    Of an instance of MIG only the memory is read: its other counters, where it has them, are of
    the whole GPU.
    """

    interval_s = 0.1

    def __init__(self, nvml: Any, clock_ns: Callable[[], int], *, uuid: str | None = None) -> None:
        self._nvml = nvml
        self._clock_ns = clock_ns
        handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
        self._handles = {
            index: handle
            for index, handle in enumerate(handles)
            if uuid in (None, str(nvml.nvmlDeviceGetUUID(handle)))
        }
        self.is_mig = uuid is not None and uuid.startswith("MIG-")
        if self.is_mig and (instance := self._read(nvml.nvmlDeviceGetHandleByUUID, uuid)):
            self._handles = {0: instance}
        self.names = [str(nvml.nvmlDeviceGetName(handle)) for handle in self._handles.values()]
        self.close = nvml.nvmlShutdown

    def sample(self) -> list[GpuSample]:
        t_ns, nvml = self._clock_ns(), self._nvml
        rows = []
        for index, handle in self._handles.items():
            memory = self._read(nvml.nvmlDeviceGetMemoryInfo, handle)
            busy = power_mw = energy_mj = None
            if not self.is_mig:
                busy = self._read(nvml.nvmlDeviceGetUtilizationRates, handle)
                power_mw = self._read(nvml.nvmlDeviceGetPowerUsage, handle)
                energy_mj = self._read(nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
            if (busy, memory, power_mw, energy_mj) == (None,) * 4:
                raise SourceError(f"GPU {index} shows none of its counters through NVML")
            rows.append(
                GpuSample(
                    t_ns=t_ns,
                    gpu=index,
                    utilisation=None if busy is None else busy.gpu / 100,
                    memory_bytes=None if memory is None else memory.used,
                    power_w=None if power_mw is None else power_mw / 1000,
                    energy_j=None if energy_mj is None else energy_mj / 1000,
                )
            )
        return rows

    def _read(self, function: Callable[[object], Any], argument: object) -> Any:
        try:
            return function(argument)
        except self._nvml.NVMLError:  # not every GPU has every counter
            return None


class DcgmGpus:
    """GPUs by the page of a DCGM exporter: the device of this UUID, else all on the page.

    Owns and closes `client`. Instances of MIG are left out: their page repeats the power of the
    whole GPU. Raises SourceError if the page cannot be read or shows no such device.
    """

    interval_s = 0.5

    def __init__(
        self,
        client: httpx.Client,
        url: str,
        clock_ns: Callable[[], int],
        *,
        uuid: str | None = None,
    ) -> None:
        self._client = client
        self._url = url
        self._clock_ns = clock_ns
        self.close = client.close
        _, shown = self._read()
        if not shown:
            raise SourceError(
                f"the page at {url} shows none of {', '.join(sorted(_NAMES))}: name the page of a "
                "DCGM exporter, which by default is http://HOST:9400/metrics"
            )
        found = {key: name for key, (name, _) in shown.items() if uuid in (None, key)}
        if not found:
            raise SourceError(
                f"the page at {url} does not show {uuid}, on which the engine computes, but "
                f"{', '.join(sorted(shown))}: name the exporter of the engine's machine"
            )
        self._numbers = {key: number for number, key in enumerate(sorted(found))}
        self.names = [found[key] for key in self._numbers]

    def sample(self) -> list[GpuSample]:
        t_ns, shown = self._read()
        return [
            GpuSample(t_ns=t_ns, gpu=number, **_quantities(shown[key][1]))
            for key, number in self._numbers.items()
            if key in shown
        ]

    def _read(self) -> tuple[int, dict[str, tuple[str, dict[str, float]]]]:
        """When, and by device its model's name and its fields."""
        samples = read_samples(self._client, [self._url], clock_ns=self._clock_ns)
        shown: dict[str, tuple[str, dict[str, float]]] = {}
        for sample in samples:
            labels = json.loads(sample.labels) if sample.name in _NAMES else {}
            if labels and not labels.get("GPU_I_ID"):
                key = labels.get("UUID") or f"{labels.get('Hostname', '')} {labels.get('gpu', '')}"
                _, fields = shown.setdefault(key, (labels.get("modelName", "GPU"), {}))
                fields[sample.name] = sample.value
        return (samples[0].t_ns if samples else 0), shown


def _quantities(fields: Mapping[str, float]) -> dict[str, Any]:
    found = {
        column: next((fields[name] * factor for name, factor in of if name in fields), None)
        for column, of in _FIELDS.items()
    }
    memory = found["memory_bytes"]
    return {**found, "memory_bytes": None if memory is None else round(memory)}


def open_nvml(notes: Notes, clock_ns: Callable[[], int], *, uuid: str | None) -> NvmlGpus | None:
    """None, with a note, if no such GPU can be read."""
    try:
        import pynvml
    except ImportError:
        notes.add(f"{NO_COUNTERS}nvidia-ml-py is not installed (pip install 'walkaway[gpu]')")
        return None
    return gpus_of(pynvml, notes, clock_ns, uuid=uuid)


def gpus_of(
    nvml: Any, notes: Notes, clock_ns: Callable[[], int], *, uuid: str | None
) -> NvmlGpus | None:
    """GPUs by a `pynvml` that is not yet initialised; None, with a note, if no such GPU can be
    read."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        notes.add(f"{NO_COUNTERS}NVML says {error}{_MEND if uuid is not None else ''}")
        return None
    gpus = NvmlGpus(nvml, clock_ns, uuid=uuid)
    if gpus.names:
        if gpus.is_mig:
            notes.add(_OF_MIG)
        return gpus
    gpus.close()
    notes.add(f"{NO_COUNTERS}NVML finds no GPU{'' if uuid is None else f' {uuid}'}")
    return None
