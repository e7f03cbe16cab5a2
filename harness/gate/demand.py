"""What was asked of a server, with the keys that there were not yet when the run was made.

A workload that has got a new setting asks for the same as before where that is at its default.
"""

from typing import Any

from msgspec.structs import replace
from pydantic import ValidationError

from harness.config import Workload, as_plain_data
from harness.gate.measured import Conditions, Measured


def with_defaults(measured: Measured) -> Measured:
    """The same with whole demands."""
    sides = {
        name: replace(side, conditions=_whole(side.conditions))
        for name, side in measured.sides.items()
    }
    return replace(measured, conditions=_whole(measured.conditions), sides=sides)


def _whole(conditions: Conditions) -> Conditions:
    """A demand that no workload could have any more stays as it is."""
    demand: dict[str, Any] = conditions.demand
    try:
        workload = Workload.model_validate({"name": "any", "question": "any", **demand})
    except ValidationError:
        return conditions
    filled = {section: as_plain_data(getattr(workload, section)) for section in demand}
    return replace(conditions, demand=filled)
