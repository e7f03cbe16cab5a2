"""What the stages need of Python and of the machine, found without importing any package.

What a run needs is what pyproject.toml declares; the rest is few enough to be named here.
"""

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from typing import Any, Final

from tools.gpu.stages import ROOT, GpuStage, Kind

Find = Callable[[str], object | None]
Requires = Callable[[str], list[str] | None]

PAGE: Final = ("msgspec", "psutil")  # of the table, and of ending processes
MODEL: Final = ("torch", "numpy", *PAGE)
NVML: Final = "nvidia-ml-py"
_TESTS: Final = ("pytest", "pytest-timeout", "hypothesis")
_OTHERWISE: Final = ("h2", "ray")  # declared, and used by no run
_IMPORTED_AS: Final = {NVML: "pynvml"}


def lacking(packages: Iterable[str], find: Find = find_spec) -> list[str]:
    return [name for name in packages if find(_IMPORTED_AS.get(name, _module(name))) is None]


def unmet(packages: Iterable[str], requires: Requires = requires) -> list[str]:
    """What installed packages require on any machine, and they in turn, and is not installed:
    packages may have been brought one by one.
    """
    missing, seen, waiting = [], set[str](), list(packages)
    while waiting:
        name = _canonical(waiting.pop())
        if name in seen:
            continue
        seen.add(name)
        try:
            lines = requires(name) or []
        except PackageNotFoundError:
            missing.append(name)
        else:
            waiting += [_name(line) for line in lines if ";" not in line]
    return sorted(missing)


def needed(kind: Kind, *, rehearses: bool) -> list[str]:
    of_kind: Mapping[Kind, Sequence[str]] = {
        "device": (),
        "tests": _TESTS,
        "bench": (),
        "run": declared(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]),
    }
    triton = () if rehearses or kind == "device" else ("triton",)
    return list(dict.fromkeys([*MODEL, *triton, *of_kind[kind]]))


def declared(project: Mapping[str, Any]) -> list[str]:
    """The distributions that a run needs, by the table `[project]`."""
    extras = project.get("optional-dependencies", {})
    lines = [*project["dependencies"], *extras.get("load", ())]
    return [name for name in map(_name, lines) if name not in _OTHERWISE]


def what_is_missing(
    missing: Mapping[str, Sequence[str]], tools: Sequence[str], *, lacks_nvml: bool
) -> str:
    """One sentence; `missing`: the packages that each stage lacks; `tools`: what Triton needs and
    the machine lacks. "" if nothing is missing.
    """
    stages_of: dict[str, list[str]] = {}
    for stage, packages in missing.items():
        for package in packages:
            stages_of.setdefault(package, []).append(stage)
    together: dict[tuple[str, ...], list[str]] = {}
    for package, stages in stages_of.items():
        together.setdefault(tuple(stages), []).append(package)
    parts = []
    for whole, packages in together.items():
        whose = ", ".join(whole) if len(whole) < len(missing) else "all stages"
        parts.append(f"{', '.join(packages)} (needed by {whose})")
    if lacks_nvml:
        parts.append(f"{NVML} (without it power, energy, utilisation and clocks are not known)")
    of_python = f"this Python lacks {'; '.join(parts)}: install with pip" if parts else ""
    of_machine = f"this machine lacks {' and '.join(tools)}, which Triton needs" if tools else ""
    return "; ".join(filter(None, (of_python, of_machine)))


def missing_of(
    stages: Iterable[GpuStage], *, rehearses: bool, find: Find = find_spec
) -> dict[str, list[str]]:
    missing = {}
    for stage in stages:
        packages = needed(stage.kind, rehearses=rehearses)
        lacks = lacking(packages, find)
        if not lacks and stage.kind == "run":
            lacks = unmet(packages)
        missing[stage.name] = lacks
    return missing


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _module(distribution: str) -> str:
    return distribution.replace("-", "_").lower()
