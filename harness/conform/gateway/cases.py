"""The catalogue of a gateway's cases, in the order in which they are shown."""

from importlib import import_module
from typing import Final

from harness.conform.gateway.case import GATEWAY_CASES, GatewayCase

_ROOMS: Final = ("answers", "leaves", "afterwards")


def gateway_cases() -> dict[str, GatewayCase]:
    """The cases by id, in this order even if one module was imported before."""
    for room in _ROOMS:
        import_module(f"{__package__}.{room}")
    rank = {f"{__package__}.{room}": number for number, room in enumerate(_ROOMS)}
    return dict(sorted(GATEWAY_CASES.items(), key=lambda one: rank[one[1].check.__module__]))
