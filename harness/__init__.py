"""walkaway: what does an LLM server do after the user walks away?

    import harness

    run = harness.load_run("results/20261121-053012-demo-4f2a")
    run.metrics["cancel_latency_s"].p99

Names are loaded when they are first used: importing `harness` alone costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.export.library import Run, load_run

__all__ = ["Run", "load_run"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("harness.export.library"), name)
