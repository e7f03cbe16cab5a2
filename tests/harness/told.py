"""Results of an analysis: a figure, why there is none, a time, the remarks on a run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import pytest

from harness.analysis.figure import Figure, NotMeasurable
from harness.analysis.summary import summarise
from harness.compare.pool import ArmRound, pool
from harness.records import Metric
from harness.store.frames import RunFrames
from tests.made_up.run import RunBuilder

MakeRun = Callable[[], RunBuilder]
Value = TypeVar("Value")


def summary_of(frames: RunFrames) -> dict[str, Any]:
    """The content of the run's `summary.json`."""
    content: dict[str, Any] = msgspec.to_builtins(summarise(frames))
    return content


def pooled_summary(rounds: Sequence[ArmRound], manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The content of the `summary.json` of several runs; without a status they are complete."""
    content: dict[str, Any] = msgspec.to_builtins(pool(rounds, {"status": "complete", **manifest}))
    return content


def remarks(run: RunBuilder, part: str = "", level: str | None = None) -> list[str]:
    """The texts of the run's remarks that hold `part`, of all levels or of one."""
    said: list[dict[str, Any]] = summary_of(run.frames())["validity"]
    return [one["text"] for one in said if part in one["text"] and level in (None, one["level"])]


def warnings(run: RunBuilder, part: str = "") -> list[str]:
    return remarks(run, part, "warning")


def metric(figure: Figure) -> Metric:
    assert isinstance(figure, Metric), figure
    return figure


def known(value: Value | None) -> Value:
    assert value is not None
    return value


def reason(figure: Figure) -> str:
    assert isinstance(figure, NotMeasurable), figure
    return figure.reason


def ms(value: float) -> Any:
    return pytest.approx(value / 1e3, abs=1e-9)
