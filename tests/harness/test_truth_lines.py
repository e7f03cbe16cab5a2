"""How a run is held to the truth: by what its summary shows, and by nothing else."""

from typing import Any

import pytest

from tests.truth.black_box import bounded_delay_line
from tests.truth.scripted_engine import Script

SCRIPT = Script(step_s=0.01)  # with 5 ms, 15 ms are allowed


def metric(mean: float | None, upper95: float | None = None, bias: float = 0.0) -> dict[str, Any]:
    others = {"bias_low": -bias, "bias_high": bias, "estimate": 0.05}
    return {"mean": mean, "upper95": upper95, "others": others}


@pytest.mark.parametrize(
    ("shown", "is_right"),
    [
        (metric(0.06), True),
        (metric(0.07), False),
        (metric(0.07, bias=0.01), True),
        (metric(None, upper95=0.3), True),
        (metric(None, upper95=0.03), False),  # although what the totals gave is the truth
        (metric(None), False),
        (None, False),
    ],
)
def test_a_delay_is_right_if_the_summary_shows_it(
    shown: dict[str, Any] | None, *, is_right: bool
) -> None:
    line = bounded_delay_line("cancel latency by gauge", 0.05, shown, SCRIPT)
    assert line.is_right is is_right
