"""The catalogue, in the order in which its cases run."""

from importlib import import_module
from typing import Final

ROOMS: Final = (
    "stream",
    "unary",
    "queue",
    "prefill",
    "crowds",
    "fan_out",
    "dialects",
    "shapes",
    "leaks",
    "neighbours",
    "next_request",
    "cancel_api",
    "counts",
    "hops",
)


def load_cases() -> None:
    """Declare them all (harness/conform/case.py)."""
    for room in ROOMS:
        import_module(f"{__name__}.{room}")
