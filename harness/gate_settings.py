"""`[gate]`: what a run of this workload must keep to; `walkaway gate` judges it."""

from typing import Annotated

from pydantic import Field

from harness.values import LARGEST_INT, Section


class GateSettings(Section):
    """`[gate]`: limits, a line each (see `harness.gate.limits`).

    `noise`: so much more than the baseline, as a share of it, is no regression yet. `min_abandons`:
    with fewer requests abandoned (in any arm) the run does not pass.
    """

    limits: list[str] = Field(default_factory=list)
    noise: Annotated[float, Field(gt=0, le=10)] = 0.1
    min_abandons: Annotated[int, Field(ge=0, le=LARGEST_INT)] = 100
