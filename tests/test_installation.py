"""What README, docs/install.md and the Makefile install can be resolved: both builds of torch, on
each Python.

The extras of all commands are resolved at once: versions that suit all of them suit each command.
uv reads metadata alone, and takes the markers of the Python and the platform that it is asked for;
pip would take the markers of the Python that runs it.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from packaging.utils import canonicalize_name

from tests.harness.documents import README, ROOT

PAGES: Final = (README, ROOT / "docs" / "install.md", ROOT / "Makefile")
TEXT: Final = "".join(page.read_text() for page in PAGES)
COMMANDS: Final = re.findall(r"^[^`\n]*pip(?: --\S+)* install .*", TEXT, re.MULTILINE)
EXTRAS: Final = {name for names in re.findall(r"'\.\[(.*?)\]'", TEXT) for name in names.split(",")}

# From METADATA in torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl, which PyPI does not have.
CPU_BUILD: Final = """
[[dependency-metadata]]
name = "torch"
version = "2.13.0"
requires-dist = [
  "filelock", "typing-extensions>=4.10.0", "setuptools>=77.0.3", "sympy>=1.13.3",
  "networkx>=2.5.1", "jinja2", "fsspec>=0.8.5",
]
"""
CUDA_PACKAGES: Final = ("cuda-", "nvidia-")  # torch's CUDA build says which

for_each_python = pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])


def packages(requirements: str) -> set[str]:
    names = re.findall(r"^(\S+)==", requirements, re.MULTILINE)
    return {canonicalize_name(name) for name in names}


PINNED: Final = packages((ROOT / "constraints.txt").read_text())


def resolved(python: str, *settings: str | Path) -> set[str]:
    """The packages of an installation on Linux with this Python."""
    resolver = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "--quiet"]
    target = ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28"]
    here = ["--python", sys.executable, "--no-python-downloads", "--no-header", "--no-annotate"]
    wanted = ["--constraint", "constraints.txt", "--only-binary", ":all:"]
    extras = [f"--extra={name}" for name in sorted(EXTRAS)]
    command = [*resolver, *target, *here, *wanted, *extras, *settings]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return packages(done.stdout)


def test_every_command_takes_the_pinned_versions() -> None:
    assert len(COMMANDS) >= 4
    assert [line for line in COMMANDS if "--constraint constraints.txt" not in line] == []


@pytest.mark.slow
@for_each_python
def test_with_a_gpu_the_pins_are_what_torch_requires(python: str) -> None:
    found = resolved(python, "--no-config")
    unpinned = found - PINNED
    assert any(name.startswith("nvidia-cudnn") for name in unpinned), "not the CUDA build"
    assert [name for name in unpinned if not name.startswith(CUDA_PACKAGES)] == []


@pytest.mark.slow
@for_each_python
def test_without_a_gpu_all_that_is_installed_is_pinned(python: str, tmp_path: Path) -> None:
    config = tmp_path / "uv.toml"
    config.write_text(CPU_BUILD)
    found = resolved(python, "--config-file", config)
    assert sorted(found - PINNED) == []
    assert "triton" in found, "it interprets the kernels for GPUs"
