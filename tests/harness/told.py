"""What an analysis told: a figure, why there is none, a time, the warnings of a run."""

from typing import Any

import pytest

from harness.analysis.figure import Figure, NotMeasurable
from harness.analysis.summary import summarise
from harness.records import Metric
from tests.made_up.run import RunBuilder


def metric(figure: Figure) -> Metric:
    assert isinstance(figure, Metric), figure
    return figure


def reason(figure: Figure) -> str:
    assert isinstance(figure, NotMeasurable), figure
    return figure.reason


def ms(value: float) -> Any:
    return pytest.approx(value / 1e3, abs=1e-9)


def warnings(run: RunBuilder) -> list[str]:
    said: list[dict[str, Any]] = summarise(run.frames())["validity"]
    return [one["text"] for one in said if one["level"] == "warning"]
