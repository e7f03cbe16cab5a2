"""The table of arms: every arm whole, whatever the terminal's width; only what is certain below."""

import io
import re
from typing import Any

import pytest
from rich.console import Console

from harness.commands.run_table import print_arms
from tests.made_up.summaries import made_up_arms_summary

UNITS = {"preemptions": "preemptions", "itl_s": "s"}


def metric(name: str, value: float) -> dict[str, Any]:
    figures = {"mean": value, "p50": value, "p99": 2 * value}
    whose = {"of": "bystanders"} if name == "itl_s" else {}
    return {"unit": UNITS[name], "n": 3, **whose, "method": "exact", **figures}


def difference(arm: str, low: float, high: float) -> dict[str, Any]:
    return {
        "arm": arm,
        "reference": "arm-0",
        "n": 3,
        "difference": -1.0,
        "difference_ci95": [-2.0, 1.0],
        "ratio": (low + high) / 2,
        "ratio_ci95": [low, high],
    }


def summary(num_arms: int) -> dict[str, Any]:
    names = [f"arm-{i}" for i in range(num_arms)]
    return {
        "workload": "w",
        "engine": "reference",
        "model": "tiny",
        "reference": "arm-0",
        "rounds": 3,
        "headlines": ["preemptions"],
        "arms": {
            name: {
                "metrics": {
                    "itl_s": metric("itl_s", 0.0123),
                    "preemptions": metric("preemptions", 1234.0),
                }
            }
            for name in names
        },
        "differences": {
            "preemptions": {
                "mean": [difference("arm-1", 0.3, 0.5), difference("arm-2", 0.8, 1.4)],
                "p99": [difference("arm-1", 0.1, 0.2)],
            }
        },
        "validity": [{"level": "warning", "text": "too few"}],
    }


def shown(width: int, num_arms: int) -> list[str]:
    return printed(width, summary(num_arms))


def printed(width: int, made: dict[str, Any]) -> list[str]:
    file = io.StringIO()
    print_arms(Console(file=file, width=width), made_up_arms_summary(made), shows_all=True)
    return [line.rstrip() for line in file.getvalue().splitlines()]


@pytest.mark.parametrize(("width", "tables"), [(100, 1), (60, 2), (30, 6)])
def test_every_arm_is_shown_whole(width: int, tables: int) -> None:
    lines = shown(width, 6)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    assert "…" not in text
    assert [line.split()[0] for line in lines].count("figure") == tables
    assert all(f"arm-{i}" in text for i in range(6))
    assert text.count("1,234") == 6


def test_the_figures_of_the_question_come_first() -> None:
    rows = [line.split()[:2] for line in shown(100, 3) if line.startswith(("preem", "itl"))]
    assert rows[:3] == [["preemptions", "mean"], ["itl_s", "p50"], ["itl_s", "p99"]]


def below(lines: list[str], head: str) -> list[list[str]]:
    """The cells of the table under this head, up to the first line that is none."""
    start = next(i for i, line in enumerate(lines) if line.startswith(head))
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines[start + 2 :]]
    return rows[: next(i for i, row in enumerate(rows) if len(row) < 4)]


def test_only_certain_differences_are_told_and_the_others_counted() -> None:
    lines = shown(80, 3)
    assert below(lines, "certain difference") == [
        ["preemptions mean", "arm-1", "0.4 times", "0.3 to 0.5"]
    ]
    assert "1 other differences are not certain at 95 %" in lines
    assert "warning: too few" in lines


def test_where_there_is_no_ratio_the_difference_is_told_with_its_unit() -> None:
    made = summary(2)
    plain = difference("arm-1", 1, 1) | {"ratio": None, "ratio_ci95": None}
    plain |= {"difference": 0.02, "difference_ci95": [0.01, 0.03]}
    made["differences"] = {"itl_s": {"p50": [plain]}}
    assert below(printed(80, made), "certain difference") == [
        ["itl_s p50", "arm-1", "+20 ms", "10 ms to 30 ms"]
    ]


def test_of_many_certain_differences_the_first_are_told_and_the_others_counted() -> None:
    made = summary(10)
    certain = [difference(f"arm-{i}", 0.3, 0.5) for i in range(1, 10)]
    made["differences"] = {"itl_s": {"p50": certain}, "preemptions": {"mean": certain}}
    lines = printed(80, made)
    rows = below(lines, "certain difference")
    assert [row[0] for row in rows] == ["preemptions mean"] * 9 + ["itl_s p50"] * 3
    assert "6 more are certain at 95 %: see the report" in lines
    assert max(map(len, lines)) <= 80


def test_a_limit_is_told_as_one_and_times_known_by_totals_by_their_mean() -> None:
    made = summary(2)
    limit = {"unit": "s", "n": 9, "upper95": 0.02, "method": "gauge", "bound": "upper"}
    mean = {"unit": "s", "n": 9, "mean": 0.3, "method": "gauge", "bound": "lower"}
    made["arms"]["arm-0"]["metrics"]["cancel_latency_s"] = limit
    made["arms"]["arm-1"]["metrics"]["cancel_latency_s"] = mean
    (line,) = [line for line in printed(100, made) if line.startswith("cancel_latency_s")]
    assert re.split(r"\s{2,}", line) == [
        "cancel_latency_s mean",
        "≤ 20 ms (gauge, n 9)",
        "≥ 300 ms (gauge, n 9)",
    ]


def test_how_far_the_requests_of_two_arms_lie_apart_is_told_compactly() -> None:
    made = summary(9)
    one = {"n": 40, "n_reference": 50, "shift": 0.02, "shift_ci95": [0.01, 0.03]}
    made["shifts"] = {"itl_s": {f"arm-{i}": one | {"superiority": 0.64} for i in range(1, 9)}}
    lines = [line for line in printed(100, made) if "shift" in line or "each request" in line]
    assert lines[0] == (
        "itl_s of each request: arm-1 against arm-0 +20 ms (10 to 30 ms), larger in 64 % of pairs"
    )
    assert lines[6:] == ["2 more shifts are in summary.json"]


def test_whose_a_figure_is_stands_below_the_table() -> None:
    assert [line for line in shown(100, 3) if "bystanders" in line] == ["itl_s: of bystanders"]


def test_figures_by_different_methods_tell_theirs_and_their_n() -> None:
    made = summary(2)
    made["arms"]["arm-1"]["metrics"]["preemptions"] |= {"method": "gauge", "n": 1}
    row = next(line for line in printed(100, made) if line.startswith("preemptions"))
    assert "1,234 (exact, n 3)" in row
    assert "1,234 (gauge, n 1)" in row
