"""Which device computes: asked of CUDA's driver itself, since to import torch takes seconds.

The driver counts devices as torch does (CUDA_VISIBLE_DEVICES holds for both), and no context is
made, so nothing of a device's memory is taken. Only the standard library is imported here: `make
gpu` asks before it knows which packages there are.
"""

import ctypes
import os
import runpy
import shutil
import sysconfig
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

_LIBRARY: Final = "libcuda.so.1"
_NO_DEVICE: Final = 100  # CUDA_ERROR_NO_DEVICE
_CAPABILITY: Final = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
_NAME_BYTES: Final = 256
_COMPILERS: Final = ("gcc", "clang")


class Gpu(NamedTuple):
    """`device`: torch's name for it; `capability`: NVIDIA's, such as (9, 0)."""

    device: str
    name: str
    total_bytes: int
    capability: tuple[int, int]


class NoGpuError(Exception):
    """Why there is no device, and what to do. `is_usual`: nobody would expect one here."""

    def __init__(self, why: str, *, is_usual: bool = False) -> None:
        super().__init__(why)
        self.is_usual = is_usual


class Surroundings(NamedTuple):
    """What decides on the device. `torch`: its version and that of its CUDA, if it has any.
    `missing_tools`: what Triton needs to compile and this machine lacks.

    `load_driver` raises OSError if there is none.
    """

    torch: tuple[str, str | None] | None
    has_triton: bool
    missing_tools: Sequence[str]
    load_driver: Callable[[], Any]


def look_around() -> Surroundings:
    return Surroundings(
        torch=read_torch_version(),
        has_triton=find_spec("triton") is not None,
        missing_tools=look_for_tools(),
        load_driver=lambda: ctypes.CDLL(_LIBRARY),
    )


def look_for_tools() -> list[str]:
    """Triton's own choice of them: Debian's scheme would name headers of another folder."""
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    headers = Path(sysconfig.get_paths(scheme)["include"])
    return missing_tools(os.environ.get("CC"), shutil.which, headers)


def missing_tools(
    compiler: str | None, find: Callable[[str], str | None], headers: Path
) -> list[str]:
    """What a machine lacks to compile the launcher of each kernel, and what to install.

    `compiler`: what the variable CC says; `find` gives the path of a command; `headers`: Python's.
    """
    missing = []
    if compiler is not None and find(compiler) is None:
        missing.append(f"the C compiler {compiler!r} that CC names (install it, or unset CC)")
    if compiler is None and not any(map(find, _COMPILERS)):
        missing.append("a C compiler (install gcc or clang)")
    if not (header := headers / "Python.h").exists():
        missing.append(f"{header} (install python3-dev)")
    return missing


def read_torch_version() -> tuple[str, str | None] | None:
    """Read it from the one small file of torch that has it."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    said = runpy.run_path(str(Path(torch.origin).with_name("version.py")))
    return said["__version__"], said.get("cuda")


def choose_gpu(wanted: str, around: Surroundings) -> Gpu:
    """The device `wanted`: auto, cuda or cuda:N. Raises NoGpuError, also if it cannot be used."""
    gpus = find_gpus(around)
    number = int(wanted.partition(":")[2] or 0)
    if number >= len(gpus):
        shown = " to ".join(dict.fromkeys((gpus[0].device, gpus[-1].device)))
        raise NoGpuError(
            f"there is no such device, the driver shows {shown}: name one that it shows, or look "
            "at CUDA_VISIBLE_DEVICES"
        )
    if not around.has_triton:
        raise NoGpuError("attention on CUDA needs Triton: pip install triton")
    if around.missing_tools:
        raise NoGpuError(
            "attention on CUDA needs what Triton compiles its launchers with, and this machine "
            f"lacks {' and '.join(around.missing_tools)}"
        )
    return gpus[number]


def find_gpus(around: Surroundings) -> list[Gpu]:
    """What torch and the driver show: one or more. Raises NoGpuError."""
    if around.torch is None:
        raise NoGpuError("torch is not installed: pip install 'walkaway[engine]'", is_usual=True)
    version, cuda = around.torch
    if cuda is None:
        raise NoGpuError(
            f"torch {version} is built without CUDA: install a build with CUDA", is_usual=True
        )
    try:
        driver = around.load_driver()
    except OSError:
        raise NoGpuError(
            f"there is no NVIDIA driver here, {_LIBRARY}: install it, or let the container see it",
            is_usual=True,
        ) from None
    newest = _ask(driver, "cuDriverGetVersion")
    if newest // 1000 < int(cuda.partition(".")[0]):
        raise NoGpuError(
            f"the NVIDIA driver is for CUDA {newest // 1000}.{newest % 1000 // 10} at most, and "
            f"torch {version} for CUDA {cuda}: update the driver, or install a torch for its CUDA"
        )
    number = _num_devices(driver)
    if number == 0:
        raise NoGpuError(
            "the NVIDIA driver shows no device: look at CUDA_VISIBLE_DEVICES and nvidia-smi",
            is_usual=True,
        )
    return [_describe(driver, device) for device in range(number)]


def _describe(driver: Any, number: int) -> Gpu:
    """A device's handle may differ from its number."""
    device = _ask(driver, "cuDeviceGet", number)
    name, total = ctypes.create_string_buffer(_NAME_BYTES), ctypes.c_size_t()
    _check(driver.cuDeviceGetName(name, _NAME_BYTES, device), "cuDeviceGetName")
    _check(driver.cuDeviceTotalMem_v2(ctypes.byref(total), device), "cuDeviceTotalMem")
    major, minor = (
        _ask(driver, "cuDeviceGetAttribute", attribute, device) for attribute in _CAPABILITY
    )
    return Gpu(f"cuda:{number}", name.value.decode(errors="replace"), total.value, (major, minor))


def _num_devices(driver: Any) -> int:
    if (status := driver.cuInit(0)) == _NO_DEVICE:
        return 0
    _check(status, "cuInit")
    return _ask(driver, "cuDeviceGetCount")


def _ask(driver: Any, question: str, *arguments: int) -> int:
    """The number with which the driver answers. Raises NoGpuError."""
    answer = ctypes.c_int()
    _check(getattr(driver, question)(ctypes.byref(answer), *arguments), question)
    return answer.value


def _check(status: int, question: str) -> None:
    if status:
        raise NoGpuError(
            f"the NVIDIA driver does not work ({question}: error {status}): see what nvidia-smi "
            "says"
        )
