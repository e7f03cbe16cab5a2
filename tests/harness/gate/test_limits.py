"""Limits as people write them, and what is said of limits that make no sense."""

import re
import tomllib
from pathlib import Path

import pytest

from harness.gate.limits import FEWEST_ABANDONS, Limit, parse_limits
from harness.workload.workload import GateSettings


def parse(*lines: str, arms: tuple[str, ...] = ()) -> list[Limit]:
    return parse_limits(lines, source="limits.txt", arms=arms)


def test_a_run_without_settings_is_judged_as_one_with_the_defaults() -> None:
    assert GateSettings().min_abandons == FEWEST_ABANDONS


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("cancel_latency_steps.p99<=2", "cancel_latency_steps.p99 <= 2"),
        ("  ghost_rate.upper95  <  3e-3  # rarely", "ghost_rate.upper95 < 0.003"),
        ("run: leaked_blocks.max == 0", "leaked_blocks.max == 0"),
        ("new: itl_s.mean <= 0.05", "new: itl_s.mean <= 0.05"),
        ("new - old: itl_s.mean <= 0.01", "new - old: itl_s.mean <= 0.01"),
        ("new / baseline: itl_s.mean <= 1.1", "new / baseline: itl_s.mean <= 1.1"),
        ("re-new - new: itl_s.mean < 2", "re-new - new: itl_s.mean < 2"),
    ],
)
def test_a_line_is_read_whatever_its_blanks(line: str, text: str) -> None:
    arms = ("new", "old", "re-new") if "new" in line else ()
    (limit,) = parse("", line, "  # nothing here", arms=arms)
    assert limit.text == text


TWO = ("old", "new")


def test_with_arms_a_limit_that_names_none_holds_for_each() -> None:
    lines = ("itl_s.p99 < 2", "run / baseline: itl_s.p50 < 2")
    assert [limit.text for limit in parse(*lines, arms=("old", "new"))] == [
        "old: itl_s.p99 < 2",
        "new: itl_s.p99 < 2",
        "old / baseline: itl_s.p50 < 2",
        "new / baseline: itl_s.p50 < 2",
    ]


@pytest.mark.parametrize(
    "lines",
    [
        ("itl_s.p99 <= 2", "itl_s.p99 >= 2"),
        ("itl_s.p99 < 3", "itl_s.p99 > 2"),
        ("itl_s.p50 >= 2", "itl_s.p99 <= 2"),
        ("itl_s.p50 <= 2", "itl_s.p99 >= 3"),
        ("itl_s.mean > 3", "itl_s.p99 <= 2"),
        ("itl_s.p50 >= 3", "ttft_s.p99 <= 2"),
        ("ghost_rate.mean <= 0",),
        ("ghost_rate.mean >= 1",),
        ("memory_per_abandon.mean < 0",),
        ("new / old: itl_s.mean <= 0.5",),
        ("new - old: itl_s.p50 < -1",),
    ],
)
def test_limits_that_can_be_kept_are_taken(lines: tuple[str, ...]) -> None:
    assert len(parse(*lines, arms=TWO if "old" in lines[0] else ())) == len(lines)


def test_the_page_shows_limits_that_can_be_written() -> None:
    page = Path(__file__).parents[3] / "docs" / "gate.md"
    shown = re.findall(r"^\| `([^`]+ (?:<=|<|>=|>|==) [^`]+)` \|", page.read_text(), re.MULTILINE)
    assert len(shown) == 5
    for line in shown:
        parse(line, arms=("old", "new") if "new" in line else ())
    (block,) = re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL)
    settings = tomllib.loads(block)["gate"]
    assert len(parse(*GateSettings(**settings).limits)) == 3
