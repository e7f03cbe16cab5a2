"""Versions and hardware: figures mean little without them."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("torch", "transformers", "numpy", "msgspec", "uvloop", "httptools")
_CPUINFO = Path("/proc/cpuinfo")  # Linux; elsewhere the platform's word must do


def surroundings() -> dict[str, object]:
    """What is to stand beside the figures in a file."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "versions": versions,
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
    }


def _processor() -> str:
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
