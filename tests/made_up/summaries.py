"""Summaries from the few fields that a test is about."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from harness.records import ArmsSummary, Summary

_HEAD: Final = {
    "run_id": "the-run",
    "status": "complete",
    "workload": "w",
    "engine": "reference",
    "model": "tiny",
    "validity": [],
}
_SIDE: Final[Mapping[str, Any]] = {"outcomes": {}, "metrics": {}}


def made_up_summary(content: Mapping[str, Any]) -> Summary:
    return msgspec.convert({**_HEAD, **_SIDE, **content}, Summary)


def made_up_arms_summary(content: Mapping[str, Any]) -> ArmsSummary:
    arms = {name: {**_SIDE, "per_round": {}, **arm} for name, arm in content["arms"].items()}
    rounds = {"reference": next(iter(arms)), "rounds": 1, "headlines": [], "differences": {}}
    return msgspec.convert({**_HEAD, **rounds, **content, "arms": arms}, ArmsSummary)


def content_of_arms(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The keys that turn the content of a `summary.json` into that of a run with these arms."""
    content: dict[str, Any] = msgspec.to_builtins(made_up_arms_summary({"arms": arms}))
    return {
        name: content[name] for name in ("reference", "rounds", "headlines", "differences", "arms")
    }
