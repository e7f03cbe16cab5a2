"""`[value]`: the table of what cancellation is worth; `harness.analysis.value` makes it."""

from typing import Annotated

from pydantic import Field

from harness.values import Milliseconds, Name, Section


class ValueSettings(Section):
    """`[value]`: what cancellation is worth, from an arm that honours it and one that ignores it.

    `price_per_million_tokens` in any currency; absent: no money is told. `assumed_ms_per_token` is
    for the estimate from tokens alone, beside what was measured.
    """

    honoured: Name
    ignored: Name
    price_per_million_tokens: Annotated[float, Field(ge=0, le=1e9)] | None = None
    assumed_ms_per_token: Milliseconds = 20.0
