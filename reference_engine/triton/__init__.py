"""KServe's v2 protocol over gRPC, and repositories of models in Triton's layout.

Names are loaded when they are first used: a model's process needs none of them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reference_engine.triton.in_process import InferenceRequest, InferenceServer

__all__ = ["InferenceRequest", "InferenceServer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("reference_engine.triton.in_process"), name)
