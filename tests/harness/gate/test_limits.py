"""Limits as people write them, and what is said of those that cannot be."""

import re
import tomllib
from pathlib import Path

import pytest

from harness.errors import ConfigError
from harness.gate.limits import Limit, parse_limits
from harness.run.run_config import RunConfig, resolve_run
from harness.workload.workload import SHIPPED_WORKLOADS, GateSettings, load_workload, shipped


def parse(*lines: str, arms: tuple[str, ...] = ()) -> list[Limit]:
    return parse_limits(lines, source="limits.txt", arms=arms)


def refusal(*lines: str, arms: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as raised:
        parse(*lines, arms=arms)
    return str(raised.value)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("cancel_latency_steps.p99<=2", "cancel_latency_steps.p99 <= 2"),
        ("  ghost_rate.upper95  <  3e-3  # rarely", "ghost_rate.upper95 < 0.003"),
        ("run: leaked_blocks.max == 0", "leaked_blocks.max == 0"),
        ("new: itl_s.mean <= 0.05", "new: itl_s.mean <= 0.05"),
        ("new - old: itl_s.mean <= 0.01", "new - old: itl_s.mean <= 0.01"),
        ("new / baseline: itl_s.mean <= 1.1", "new / baseline: itl_s.mean <= 1.1"),
    ],
)
def test_a_line_is_read_whatever_its_blanks(line: str, text: str) -> None:
    arms = ("new", "old") if "new" in line else ()
    (limit,) = parse(line, arms=arms)
    assert limit.text == text


def test_an_arm_may_have_a_dash_in_its_name() -> None:
    (limit,) = parse("rebuild-cost / off: itl_s.mean < 2", arms=("off", "rebuild-cost"))
    assert (limit.arm, limit.relation, limit.against) == ("rebuild-cost", "/", "off")


def test_empty_lines_and_comments_are_no_limits() -> None:
    assert parse("", "  # nothing here", "#") == []


TWO = ("old", "new")


@pytest.mark.parametrize(
    ("line", "arms", "said"),
    [
        ("cancel_latency_step.p99 < 2", (), "near it: cancel_latency_steps"),
        ("itl_s.p98 < 2", (), "near it: p99"),
        ("itl_s.p99 ~ 2", (), "must look like"),
        ("itl_s.p99 < two", (), "'two' is not a number"),
        ("itl_s.p99 < inf", (), "take a finite number"),
        ("new: itl_s.p99 < 2", (), "there is no arm `new`: the workload has none"),
        ("run - run: itl_s.p99 < 2", (), "compares an arm with itself"),
        ("run / baseline: itl_s.max < 2", (), "no figure `max` of a difference"),
        ("other: itl_s.p99 < 2", TWO, "there is no arm `other`; there are: old, new"),
        ("run - old: itl_s.p99 < 2", TWO, "say of which arm: old, new"),
        ("baseline: itl_s.p99 < 2", TWO, "there is no arm `baseline`"),
    ],
)
def test_a_mistake_is_named_with_its_line(line: str, arms: tuple[str, ...], said: str) -> None:
    text = refusal("# first", line, arms=arms)
    assert text.startswith("limits.txt, limit 2: ")
    assert said in text


def test_with_arms_a_limit_that_names_none_holds_for_each() -> None:
    lines = ("itl_s.p99 < 2", "run / baseline: itl_s.p50 < 2")
    assert [limit.text for limit in parse(*lines, arms=("old", "new"))] == [
        "old: itl_s.p99 < 2",
        "new: itl_s.p99 < 2",
        "old / baseline: itl_s.p50 < 2",
        "new / baseline: itl_s.p50 < 2",
    ]


@pytest.mark.parametrize("name", ["baseline", "run"])
def test_no_arm_has_a_name_that_means_something_else_in_a_limit(name: str) -> None:
    said = f"an arm cannot be named `{name}`"
    assert said in refusal(f"new - {name}: itl_s.mean <= 0.5", arms=(name, "new"))
    settings = [f'arms=[{{name="{name}"}}]', "run.rounds=3"]
    with pytest.raises(ConfigError, match=said):
        resolve_run(RunConfig(workload="gate", settings=settings))


def test_the_workloads_own_limits_hold_for_rounds_of_it() -> None:
    settings = ['arms=[{name="build"}]', "run.rounds=3"]
    assert resolve_run(RunConfig(workload="gate", settings=settings)).arm_runs


@pytest.mark.parametrize(
    ("first", "second", "contradict"),
    [
        ("itl_s.p99 <= 2", "itl_s.p99 >= 3", True),
        ("itl_s.p99 < 2", "itl_s.p99 >= 2", True),
        ("itl_s.p99 == 1", "itl_s.p99 == 2", True),
        ("itl_s.p99 == 0", "itl_s.p99 > 0", True),
        ("itl_s.p99 <= 2", "itl_s.p99 >= 2", False),
        ("itl_s.p99 < 3", "itl_s.p99 > 2", False),
        ("itl_s.p99 <= 2", "itl_s.p50 >= 3", True),
        ("itl_s.p50 >= 3", "itl_s.p99 <= 2", True),
        ("itl_s.p50 > 2", "itl_s.max <= 2", True),
        ("itl_s.p50 >= 2", "itl_s.p99 <= 2", False),
        ("itl_s.p50 <= 2", "itl_s.p99 >= 3", False),
        ("itl_s.mean > 3", "itl_s.max <= 2", True),
        ("itl_s.mean > 3", "itl_s.p99 <= 2", False),
        ("ghost_rate.mean > 0.1", "ghost_rate.upper95 < 0.01", True),
        ("itl_s.p50 >= 3", "ttft_s.p99 <= 2", False),
    ],
)
def test_limits_that_contradict_are_named(first: str, second: str, contradict: bool) -> None:
    if contradict:
        assert f"`{first}` and `{second}` contradict each other" in refusal(first, second)
    else:
        assert len(parse(first, second)) == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("ghost_rate.mean < 0", "ghost_rate is never below 0"),
        ("cancel_latency_steps.p99 <= -1", "cancel_latency_steps is never below 0"),
        ("itl_s.p50 == -0.5", "itl_s is never below 0"),
        ("ghost_rate.mean > 1", "ghost_rate is a share, from 0 to 1"),
        ("ghost_rate.mean == 2", "ghost_rate is a share, from 0 to 1"),
        ("new / old: itl_s.mean <= -1", "a ratio is never below 0"),
        ("ghost_rate.mean <= 0", None),
        ("ghost_rate.mean >= 1", None),
        ("memory_per_abandon.mean < 0", None),
        ("itl_s.p50 > 9", None),
        ("new / old: itl_s.mean <= 0.5", None),
        ("new - old: itl_s.p50 < -1", None),
    ],
)
def test_a_limit_that_nothing_can_keep_is_named(line: str, said: str | None) -> None:
    arms = TWO if "old" in line else ()
    if said is None:
        assert len(parse(line, arms=arms)) == 1
    else:
        assert f"`{line}` is impossible: {said}" in refusal(line, arms=arms)


@pytest.mark.parametrize("name", sorted(shipped(SHIPPED_WORKLOADS)))
def test_the_limits_of_shipped_workloads_can_be_read(name: str) -> None:
    workload = load_workload(name)
    arms = [arm.name for arm in workload.arms]
    parse_limits(workload.gate.limits, source=name, arms=arms)


def test_a_slip_in_a_workload_is_said_before_it_is_run() -> None:
    order = RunConfig(workload="gate", settings=['gate.limits=["itl.p99 < 1"]'])
    with pytest.raises(ConfigError, match="there is no metric `itl`; near it: itl_s"):
        resolve_run(order)


def test_the_page_shows_limits_that_can_be_written() -> None:
    page = Path(__file__).parents[3] / "docs" / "gate.md"
    shown = re.findall(r"^\| `([^`]+ (?:<=|<|>=|>|==) [^`]+)` \|", page.read_text(), re.MULTILINE)
    assert len(shown) == 5
    for line in shown:
        parse(line, arms=("old", "new") if "new" in line else ())
    (block,) = re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL)
    settings = tomllib.loads(block)["gate"]
    assert len(parse(*GateSettings(**settings).limits)) == 3
