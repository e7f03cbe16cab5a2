"""How a run is held to the truth: by what its summary shows, and by nothing else."""

from typing import Any

import pytest

from tools.truth.black_box import bounded_lines
from tools.truth.scripted_engine import Script

SCRIPT = Script(step_s=0.01)  # with 5 ms, 15 ms are allowed


def metric(
    mean: float | None, interval: tuple[float, float] | None = None, upper95: float | None = None
) -> dict[str, Any]:
    return {"mean": mean, "mean_ci95": interval, "upper95": upper95}


@pytest.mark.parametrize(
    ("shown", "is_right"),
    [
        (metric(0.06, (0.04, 0.08)), True),
        (metric(0.06, (0.065, 0.08)), False),  # the truth is not in its interval
        (metric(0.06), False),
        (metric(0.07, (0.0, 0.2)), False),  # even where old pages hide much
        (metric(None, upper95=0.3), True),
        (metric(None, upper95=0.049), False),
        (None, False),
    ],
)
def test_a_delay_is_right_if_the_summary_shows_it(
    shown: dict[str, Any] | None, *, is_right: bool
) -> None:
    lines = bounded_lines("cancel latency by gauge", 0.05, shown, SCRIPT)
    assert all(line.is_right for line in lines) is is_right
