"""The end of a run on a terminal: of recorded runs of every kind, and of made-up ones."""

import io
import json
from typing import Any, Final

import msgspec
import numpy as np
import pytest
from rich.console import Console

from harness.analysis import figure
from harness.analysis.littles_law import Balance, as_figure
from harness.commands.run_table import print_arms, print_summary
from harness.formatting import DASH, interval
from harness.records import ArmsSummary, Metric, Summary
from harness.store.run_folder import as_summary
from tests.conftest import Snapshot
from tests.harness.documents import ROOT
from tests.made_up.summaries import made_up_arms_summary, made_up_summary

RECORDED: Final = ROOT / "tests/golden/expected"
TWO_ARMS: Final = [f"arm-{i}" for i in range(2)]


def shown(summary: Summary | ArmsSummary, width: int = 100, *, shows_all: bool = True) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    if isinstance(summary, ArmsSummary):
        print_arms(console, summary, shows_all=shows_all)
    else:
        print_summary(console, summary, shows_all=shows_all)
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    return lines


def recorded(name: str) -> Summary | ArmsSummary:
    return as_summary(json.loads((RECORDED / name / "summary.json").read_bytes()))


@pytest.mark.parametrize(
    "name", ["ghosts", "generic", "open_loop", "slot_recovery", "nobody_left", "value"]
)
def test_a_recorded_run_ends_as_before(name: str, snapshot: Snapshot) -> None:
    """Whole on a narrow and on a wide terminal, without and with `--all`."""
    parts = []
    for width, shows_all in ((54, False), (80, False), (80, True)):
        title = f"== {width} columns{', --all' if shows_all else ''}"
        parts += [title, *shown(recorded(name), width, shows_all=shows_all)]
    snapshot(f"terminal/{name}", "\n".join(parts) + "\n")


def arms(names: list[str], **more: Any) -> ArmsSummary:
    """Arms with two figures each, the second of bystanders."""
    figures = {"preemptions": ("preemptions", 1234.0), "itl_s": ("s", 0.0123)}
    metrics: dict[str, dict[str, Any]] = {
        name: {"unit": unit, "n": 3, "method": "exact", "mean": mean, "p50": mean, "p99": 2 * mean}
        for name, (unit, mean) in figures.items()
    }
    metrics["itl_s"]["of"] = "bystanders"
    each = {name: {"metrics": metrics | more.pop(name, {})} for name in names}
    return made_up_arms_summary({"arms": each, "headlines": ["preemptions"], **more})


def difference(arm: str, low: float, high: float, **more: Any) -> dict[str, Any]:
    one = {"arm": arm, "reference": "arm-0", "n": 3, "difference": -1.0}
    ratio = {"ratio": (low + high) / 2, "ratio_ci95": [low, high]}
    return {**one, "difference_ci95": [-2.0, 1.0], **ratio, **more}


@pytest.mark.parametrize(("width", "tables"), [(100, 1), (60, 2), (30, 6)])
def test_every_arm_is_shown_whole(width: int, tables: int) -> None:
    names = [f"arm-{i}" for i in range(6)]
    lines = shown(arms(names), width)
    assert [line.split()[0] for line in lines if line].count("figure") == tables
    assert all(name in "\n".join(lines) for name in names)
    assert "\n".join(lines).count("1,234") == 6
    rows = [line.split()[:2] for line in lines if line.startswith(("preem", "itl"))]
    assert rows[:3] == [["preemptions", "mean"], ["itl_s", "p50"], ["itl_s", "p99"]]


def test_only_certain_differences_are_shown_and_the_others_counted() -> None:
    """Without a ratio, the difference with its unit; of many, the first."""
    certain = [difference(f"arm-{i}", 0.3, 0.5) for i in range(1, 10)]
    plain = {"ratio": None, "ratio_ci95": None, "difference": 0.02, "difference_ci95": [0.01, 0.03]}
    times = [difference("arm-1", 1, 1, **plain), *certain[1:]]
    made = {"preemptions": {"mean": certain}, "itl_s": {"p50": times, "p99": [
        difference("arm-1", 0.8, 1.4)
    ]}}  # fmt: skip
    lines = shown(arms([f"arm-{i}" for i in range(10)], differences=made), 80)
    start = next(i for i, line in enumerate(lines) if line.startswith("certain difference")) + 2
    rows = [line.split() for line in lines[start : start + 12]]
    assert rows[0] == ["preemptions", "mean", "arm-1", "0.4", "times", "0.3", "to", "0.5"]
    assert rows[9] == ["itl_s", "p50", "arm-1", "+20", "ms", "10", "to", "30", "ms"]
    assert lines[start + 12] == "6 more are certain at 95 %: see the report"
    assert lines[start + 13] == "1 other differences are not certain at 95 %"


def test_of_many_shifts_between_requests_the_first_are_shown() -> None:
    one = {"n": 40, "n_reference": 50, "shift": 0.02, "shift_ci95": [0.01, 0.03]}
    shifts = {"itl_s": {f"arm-{i}": one | {"superiority": 0.64} for i in range(1, 9)}}
    made = arms([f"arm-{i}" for i in range(9)], shifts=shifts)
    lines = [line for line in shown(made) if "shift" in line or "each request" in line]
    assert lines[0] == (
        "itl_s of each request: arm-1 against arm-0 +20 ms (10 to 30 ms), larger in 64 % of pairs"
    )
    assert lines[6:] == ["2 more shifts are in summary.json"]


def test_figures_by_different_methods_name_theirs_and_their_n() -> None:
    limit = {"unit": "s", "n": 9, "upper95": 0.02, "method": "gauge", "bound": "upper"}
    mean = {"unit": "s", "n": 9, "mean": 0.3, "method": "counter", "bound": "lower"}
    more = {"arm-0": {"cancel_latency_s": limit}, "arm-1": {"cancel_latency_s": mean}}
    (line,) = [one for one in shown(arms(TWO_ARMS, **more)) if one.startswith("cancel_latency_s")]
    assert line.split("  ")[0] == "cancel_latency_s mean"
    assert "≤ 20 ms (gauge, n 9)" in line
    assert "≥ 300 ms (counter, n 9)" in line


def printed(**metrics: Metric) -> str:
    summary = made_up_summary({"metrics": msgspec.to_builtins(metrics)})
    return " ".join(" ".join(shown(summary)).split())


def test_a_limit_stands_where_the_mean_would_and_a_bound_where_the_largest_would() -> None:
    most = Metric(unit="s", n=9, upper95=0.02, method="gauge", bound="upper")
    assert f"cancel_latency_s ≤ 20 ms {DASH} {DASH} {DASH} 9 gauge" in printed(
        cancel_latency_s=most
    )
    share = Metric(unit="ratio", n=9, mean=1.0, lower95=0.717, method="exact")
    shares = printed(refilled_next_schedule=share, cancel_latency_s=most)
    assert f"refilled_next_schedule 100 % {DASH} {DASH} ≥ 71.7 % 9 exact" in shares


def test_what_old_pages_may_add_to_a_mean_and_that_p99_is_the_largest_is_said() -> None:
    sums, counts = np.array([1.0, 1.2, 0.8]), np.full(3, 10)
    found = Balance(edges_ns=np.arange(3), sums=sums, counts=counts, bias=(-0.01, 0.02))
    mean = as_figure(found, "counter")
    assert isinstance(mean, Metric)
    assert (
        f"95 % interval of the mean {interval(mean, 'mean')}, which includes a bias of "
        "-10 ms to 20 ms from the age of the metrics pages"
    ) in printed(cancel_latency_s=mean)
    for n, is_said in ((61, True), (161, False)):
        one = figure.describe(figure.Sample(values=np.arange(n) / 1e3), unit="s", method="client")
        assert ("p99 of n < 100 values is the largest of them" in printed(ttft_s=one)) is is_said
