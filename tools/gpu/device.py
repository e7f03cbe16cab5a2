"""The device and how fast it copies: `python -m tools.gpu.device FILE [--rehearse]`.

FILE gets the card's name from the driver at once, since the results are kept under it; then what
torch and NVML say, then the copy rate. The exit status is 2 if there is no CUDA device; standard
output then says why, in one sentence.
"""

import json
import platform
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import quantiles
from time import perf_counter
from typing import Any, Final

from reference_engine.device import NoGpuError, Surroundings, find_gpus, look_around

_LARGEST_COPY: Final = 1 << 31  # bytes
_COPIES: Final = 30
_WARM: Final = 5


def why_no_cuda(torch: Any) -> str | None:
    """A sentence of a torch that does not see what the driver shows; None if it does."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return None
    reason = str(said[0].message) if said else "it does not say why"
    first = re.split(r"\.\s+(?=[A-Z(])", reason.removeprefix("CUDA initialization: "))[0]
    return (
        f"torch {torch.__version__} sees no CUDA device, though the driver shows one "
        f"({first.rstrip('.')}): see what nvidia-smi says"
    )


def facts_of_torch(torch: Any, device: str) -> dict[str, Any]:
    """`memory_bytes`: all of the card's. Of a CPU only the versions."""
    triton = None
    with suppress(PackageNotFoundError):
        triton = version("triton")
    versions = {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "triton": triton,
        "python": platform.python_version(),
    }
    if device == "cpu":
        return {"card": "CPU", **versions}
    properties = torch.cuda.get_device_properties(0)
    return {
        "card": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "compute_capability": f"{properties.major}.{properties.minor}",
        **versions,
    }


def facts_of_nvml(nvml: Any, uuid: str) -> dict[str, Any]:
    """What an initialised `pynvml` says: what the device does not show is None. Clocks are (now,
    largest) in MHz, the limit of the power is in watts."""

    def read(name: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, name)(*arguments)
        except nvml.NVMLError:
            return None

    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    same = [one for one in handles if read("nvmlDeviceGetUUID", one) == uuid]
    driver = {"driver": read("nvmlSystemGetDriverVersion")}
    if len(chosen := same or handles) != 1:  # an instance of MIG has a UUID of its own
        return driver
    handle = chosen[0]
    kinds = {"graphics": nvml.NVML_CLOCK_GRAPHICS, "memory": nvml.NVML_CLOCK_MEM}
    reads = ("nvmlDeviceGetClockInfo", "nvmlDeviceGetMaxClockInfo")
    clocks = {kind: [read(name, handle, code) for name in reads] for kind, code in kinds.items()}
    limit_mw = read("nvmlDeviceGetEnforcedPowerLimit", handle)
    mig = read("nvmlDeviceGetMigMode", handle)
    return {
        **driver,
        "clocks_mhz": clocks,
        "power_limit_w": None if limit_mw is None else limit_mw / 1000,
        "mig": None if mig is None else bool(mig[0]),
    }


def describe(torch: Any, nvml: Any, uuid: str) -> dict[str, Any]:
    """`nvml` is None where it cannot be read."""
    of_nvml = {} if nvml is None else facts_of_nvml(nvml, uuid)
    return {**facts_of_torch(torch, "cuda"), **of_nvml}


def copy_rates(torch: Any, device: str, size: int, number: int) -> list[float]:
    """Bytes a second, read and written together, of copies within the device's memory."""
    here = torch.zeros(size, dtype=torch.uint8, device=device)
    there = torch.empty_like(here)

    def timed() -> float:
        if device == "cpu":
            began = perf_counter()
            there.copy_(here)
            return perf_counter() - began
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        there.copy_(here)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    return [2 * size / timed() for _ in range(_WARM + number)][_WARM:]


def _open_nvml() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _load_torch() -> Any:
    import torch

    return torch


def main(
    file: Path,
    *,
    rehearses: bool,
    look_around: Callable[[], Surroundings] = look_around,
    load_torch: Callable[[], Any] = _load_torch,
) -> int:
    try:
        card = "CPU" if rehearses else find_gpus(look_around())[0].name
    except NoGpuError as error:
        print(error)  # noqa: T201
        return 2
    _write(file, {"card": card})
    try:
        torch = load_torch()
    except (ImportError, OSError) as error:  # a package that is there and cannot be loaded
        print(f"torch does not load: {str(error).splitlines()[0]}")  # noqa: T201
        return 2
    if rehearses:
        _write(file, facts_of_torch(torch, "cpu"), copy_rates(torch, "cpu", 1 << 26, _COPIES))
        return 0
    if why := why_no_cuda(torch):
        print(why)  # noqa: T201
        return 2
    _measure_gpu(file, torch)
    return 0


def _measure_gpu(file: Path, torch: Any) -> None:
    from reference_engine.model.torch_runner import gpu_uuid

    nvml, uuid = _open_nvml(), gpu_uuid(torch.device("cuda", 0))
    _write(file, describe(torch, nvml, uuid))
    free, _ = torch.cuda.mem_get_info()
    rates = copy_rates(torch, "cuda", min(_LARGEST_COPY, free // 4), _COPIES)
    # The clocks are read again, as a device at rest lowers them.
    _write(file, describe(torch, nvml, uuid), rates)


def _write(file: Path, facts: Mapping[str, Any], rates: Sequence[float] = ()) -> None:
    """Whole, whenever this process is killed. `copy_bytes_s`: the quartiles of the rates."""
    whole = {"at": datetime.now(UTC).isoformat(timespec="seconds"), **facts}
    if rates:
        whole["copy_bytes_s"] = quantiles(rates, n=4, method="inclusive")
    part = file.with_suffix(".part")
    part.write_text(json.dumps(whole, indent=2) + "\n")
    part.replace(file)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), rehearses="--rehearse" in sys.argv))
