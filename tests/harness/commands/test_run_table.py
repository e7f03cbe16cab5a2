"""The end of a run on a terminal: of recorded runs of every kind, and of made-up ones."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console

from harness.analysis import figure
from harness.analysis.littles_law import Balance, as_figure
from harness.commands.run_table import print_arms, print_summary
from harness.records import ArmsSummary, Metric, Summary
from tests.conftest import Snapshot
from tests.golden.recorded import judged_today
from tests.made_up.arms import with_savings
from tests.made_up.summaries import made_up_arms_summary, made_up_summary


def shown(summary: Summary | ArmsSummary, *widths: int, shows_all: bool = True) -> list[str]:
    lines: list[str] = []
    for width in widths:
        console = Console(file=io.StringIO(), width=width)
        if isinstance(summary, ArmsSummary):
            print_arms(console, summary, shows_all=shows_all)
        else:
            print_summary(console, summary, shows_all=shows_all)
        assert isinstance(console.file, io.StringIO)
        printed = [line.rstrip() for line in console.file.getvalue().splitlines()]
        assert max(map(len, printed)) <= width
        lines += [f"== {width} columns{', --all' if shows_all else ''}", *printed]
    assert "…" not in "".join(lines)
    return lines


@pytest.mark.parametrize(
    "name", ["ghosts", "generic", "open_loop", "slot_recovery", "nobody_left", "value"]
)
def test_a_recorded_run_ends_as_before(name: str, snapshot: Snapshot, tmp_path: Path) -> None:
    """Whole on a narrow and on a wide terminal, without and with `--all`."""
    summary = judged_today(name, tmp_path).read_summary()
    lines = shown(summary, 40, 54, 80, shows_all=False) + shown(summary, 80)
    snapshot(f"terminal/{name}", "\n".join(lines) + "\n")


def difference(arm: str, ratio: Sequence[float] | None, **more: Any) -> dict[str, Any]:
    one = {"arm": arm, "reference": "arm-0", "n": 3, "difference": -1.0}
    known = {} if ratio is None else {"ratio": sum(ratio) / 2, "ratio_ci95": ratio}
    return {**one, "difference_ci95": [-2.0, 1.0], **known, **more}


def test_many_arms_are_shown_whole(snapshot: Snapshot) -> None:
    """Certain differences and shifts are named, the first of many; the others are counted. A figure
    by other methods in the arms has its method and n."""
    figures = {
        "preemptions": {"unit": "preemptions", "mean": 1234.0},
        "itl_s": {"unit": "s", "p50": 0.0123, "p99": 0.0246, "of": "bystanders"},
    }
    metrics = {name: {"n": 3, "method": "exact", **one} for name, one in figures.items()}
    limit = {"unit": "s", "n": 9, "upper95": 0.02, "method": "gauge", "bound": "upper"}
    mean = {"unit": "s", "n": 9, "mean": 0.3, "method": "counter", "bound": "lower"}
    arms = {f"arm-{number}": {"metrics": metrics} for number in range(10)}
    arms["arm-0"] = {"metrics": metrics | {"cancel_latency_s": limit}}
    arms["arm-1"] = {"metrics": metrics | {"cancel_latency_s": mean}}

    certain = [difference(f"arm-{number}", (0.3, 0.5)) for number in range(1, 10)]
    no_ratio = difference("arm-1", None, difference=0.02, difference_ci95=[0.01, 0.03])
    one = {"n": 40, "n_reference": 50, "shift": 0.02, "shift_ci95": [0.01, 0.03]}
    differences = {
        "preemptions": {"mean": certain},
        "itl_s": {"p50": [no_ratio, *certain[1:]], "p99": [difference("arm-1", (0.8, 1.4))]},
    }
    shifts = {"itl_s": {f"arm-{number}": one | {"superiority": 0.64} for number in range(1, 9)}}
    content = {"arms": arms, "headlines": ["preemptions"]}
    summary = made_up_arms_summary(content | {"differences": differences, "shifts": shifts})
    snapshot("terminal/many_arms", "\n".join(shown(summary, 100, 60)) + "\n")


def test_early_stopping_stands_beside_its_source(snapshot: Snapshot) -> None:
    """Also without `--all`, of several arms or one run; on a narrow terminal in several tables."""
    content = with_savings(["off", "after-20", "after-60"])
    found = content["arms"]["after-20"]["breakdown"]
    lines = shown(made_up_arms_summary(content), 90, 60, shows_all=False)
    lines += shown(made_up_summary({"breakdown": found}), 60, shows_all=False)
    snapshot("terminal/early_stopping", "\n".join(lines) + "\n")


def test_what_a_figure_is_and_what_it_is_not(snapshot: Snapshot) -> None:
    """A limit stands where the mean would, a bound where the largest would; said are what old pages
    may add to a mean, and that p99 of few is the largest."""
    found = Balance(
        edges_ns=np.arange(3),
        sums=np.array([1.0, 1.2, 0.8]),
        counts=np.full(3, 10),
        bias=(-0.01, 0.02),
    )
    several: list[dict[str, Any]] = [
        {
            "cancel_latency_s": Metric(unit="s", n=9, upper95=0.02, method="gauge", bound="upper"),
            "refilled_next_schedule": Metric(
                unit="ratio", n=9, mean=1.0, lower95=0.717, method="exact"
            ),
        },
        {"cancel_latency_s": as_figure(found, "counter")},
    ]
    for n in (61, 161):
        values = figure.Sample(values=np.arange(n) / 1e3)
        several.append({"ttft_s": figure.describe(values, unit="s", method="client")})
    lines = [
        line
        for metrics in several
        for line in shown(made_up_summary({"metrics": msgspec.to_builtins(metrics)}), 100)
    ]
    snapshot("terminal/made_up", "\n".join(lines) + "\n")
