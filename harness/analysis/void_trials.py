"""Trials of slot recovery that could mean nothing, and why: told by the load as it went on."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from harness.records import Remark

_MEASURING: Final = "abandon"  # the arm in which somebody leaves; the others are its controls


def all_are_void(manifest: Mapping[str, Any]) -> bool:
    """Is there no trial left in which anybody left?"""
    void = [one for one in manifest.get("void_trials") or [] if one["arm"] == _MEASURING]
    return bool(void) and len(void) >= _planned(manifest)


def about_void_trials(manifest: Mapping[str, Any]) -> list[Remark]:
    """One sentence with all reasons, each with how often it was."""
    void = manifest.get("void_trials") or []
    if not void:
        return []
    reasons = Counter(one["why"] for one in void)
    told = "; ".join(f"{why} ({n})" for why, n in reasons.most_common())
    text = f"void trials: {len(void)}, because {told}"
    return [Remark(level="invalid" if all_are_void(manifest) else "warning", text=text)]


def _planned(manifest: Mapping[str, Any]) -> int:
    workload = manifest["workload"]
    return int(workload["load"]["trials"]) * int(workload["run"].get("loops", 1))
