"""The catalogue, in the order in which its cases run."""

from importlib import import_module
from typing import Final

from harness.conform.case import CASES

ROOMS: Final = (
    "stream",
    "silences",
    "queue",
    "prefill",
    "crowds",
    "fan_out",
    "dialects",
    "shapes",
    "leaks",
    "neighbours",
    "next_request",
    "same_request",
    "limits",
    "resume",
    "cancel_api",
    "background",
    "pooling",
    "adapters",
    "counts",
    "hops",
)


def load_cases() -> None:
    """Declare them all (harness/conform/case.py), in this order even if one was imported before."""
    for room in ROOMS:
        import_module(f"{__name__}.{room}")
    rank = {f"{__name__}.{room}": number for number, room in enumerate(ROOMS)}
    ordered = sorted(CASES.items(), key=lambda one: rank[one[1].check.__module__])
    CASES.clear()
    CASES.update(ordered)
