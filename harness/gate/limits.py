"""Limits, one a line; `#` begins a comment.

    cancel_latency_steps.p99 <= 2                  a figure of the run
    new: cancel_latency_steps.p99 <= 2             a figure of an arm
    new - old: cancel_latency_s.mean <= 0.02       the difference of two arms
    new / old: cancel_latency_s.mean <= 1.2        their ratio
    run / baseline: wasted_tokens.mean <= 1.1      the ratio to the baseline; or: new / baseline

A line that names no arm holds for each arm. Left of the operator stand a metric of `summary.json`
and one of its figures, right of it a number in the metric's unit (a ratio has none).
"""

import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Final, Literal

from harness.errors import ConfigError, did_you_mean
from harness.metrics import METRICS
from harness.records import FIGURES, FIGURES_PER_ROUND

Operator = Literal["<=", "<", ">=", ">", "=="]
Relation = Literal["-", "/"]

RUN: Final = "run"  # the one side of a workload without arms
BASELINE: Final = "baseline"
_TAKEN: Final = {BASELINE: "a run that was saved", RUN: "a run without arms"}
# A report holds a run to these if its workload has no limit that can be judged without a baseline:
# every abandoned request is stopped, nothing is missing afterwards, and a cancel takes the step in
# progress and little more.
FEWEST_ABANDONS: Final = 100  # with fewer, no pass; `gate.min_abandons` takes its place
DEFAULT_LIMITS: Final = (
    "ghost_rate.mean == 0",
    "leaked_slots.max == 0",
    "leaked_blocks.max == 0",
    "cancel_latency_steps.p50 <= 2",
    "cancel_latency_steps.p99 <= 5",
    "wasted_after_close_tokens.mean <= 2",
)

# Within one metric, no figure is above the next.
_ASCENDING: Final = (
    ("p50", "p90", "p95", "p99", "max"),
    ("lower95", "mean", "upper95"),
    ("mean", "max"),
)

_LINE: Final = re.compile(
    r"(?:(?P<arm>\S+?)(?:\s+(?P<relation>[-/])\s+(?P<against>\S+?))?\s*:\s*)?"
    r"(?P<metric>\w+)\.(?P<key>\w+)\s*(?P<operator><=|>=|==|<|>)\s*(?P<number>\S+)"
)
_FORM: Final = (
    "must look like `cancel_latency_steps.p99 <= 2`, with `arm:` or `arm - other:` before it where "
    "there are arms"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One line. `arm` is `RUN` in a workload without arms; `against` is another arm or `BASELINE`,
    None for a figure by itself."""

    arm: str = RUN
    relation: Relation | None = None
    against: str | None = None
    metric: str
    key: str
    operator: Operator
    number: float

    @property
    def text(self) -> str:
        return f"{self.figure} {self.operator} {self.number:.15g}"

    @property
    def figure(self) -> str:
        figure = f"{self.metric}.{self.key}"
        if self.against is not None:
            return f"{self.arm} {self.relation} {self.against}: {figure}"
        return figure if self.arm == RUN else f"{self.arm}: {figure}"

    @property
    def is_upper(self) -> bool:
        return self.operator in ("<=", "<")

    def holds(self, value: float) -> bool:
        return bool(_OPERATORS[self.operator](value, self.number))


_OPERATORS: Final = {
    "<=": operator.le,
    "<": operator.lt,
    ">=": operator.ge,
    ">": operator.gt,
    "==": operator.eq,
}


def workload_limits(workload: Mapping[str, Any], *, source: str = "[gate]") -> list[Limit]:
    lines = (workload.get("gate") or {}).get("limits") or []
    return parse_limits(lines, source=source, arms=arm_names(workload))


def arm_names(workload: Mapping[str, Any]) -> list[str]:
    return [arm["name"] for arm in workload.get("arms") or []]


def of_the_run_alone(limits: Iterable[Limit]) -> list[Limit]:
    return [limit for limit in limits if limit.against != BASELINE]


def fewest_abandons(workload: Mapping[str, Any]) -> int:
    return int((workload.get("gate") or {}).get("min_abandons", FEWEST_ABANDONS))


def parse_limits(lines: Iterable[str], *, source: str, arms: Sequence[str]) -> list[Limit]:
    """Raises ConfigError with a line for each mistake, also for an arm with a reserved name."""
    found: list[Limit] = []
    problems = [
        f"{source}: an arm cannot be named `{arm}`: in a limit that is {_TAKEN[arm]}"
        for arm in arms
        if arm in _TAKEN
    ]
    for number, line in enumerate(lines, start=1):
        text = " ".join(line.partition("#")[0].split())
        if not text:
            continue
        try:
            found += _parse(text, arms)
        except ValueError as error:
            problems.append(f"{source}, limit {number}: `{text}`: {error}")
    problems += [f"{source}: {said}" for said in _contradictions(found)]
    if problems:
        raise ConfigError("\n".join(problems))
    return found


def _parse(text: str, arms: Sequence[str]) -> list[Limit]:
    match = _LINE.fullmatch(text)
    if match is None:
        raise ValueError(_FORM)
    parts: dict[str, Any] = match.groupdict()
    arm, number = parts.pop("arm") or RUN, _number(parts.pop("number"))
    limit = Limit(arm=arm, number=number, **parts)
    if limit.metric not in METRICS:
        raise ValueError(
            f"there is no metric `{limit.metric}`{did_you_mean(limit.metric, METRICS)}"
        )
    keys = FIGURES if limit.relation is None else FIGURES_PER_ROUND
    if limit.key not in keys:
        where = "" if limit.relation is None else " of a difference"
        near = did_you_mean(limit.key, keys)
        there = ", ".join(keys)
        raise ValueError(f"there is no figure `{limit.key}`{where}{near or ';'} there are: {there}")
    if arms and arm == RUN and limit.against in (None, BASELINE):
        return [replace(limit, arm=one) for one in arms]
    _check_arm(limit.arm, arms)
    if limit.against not in (None, BASELINE):
        _check_arm(str(limit.against), arms)
    if limit.arm == limit.against:
        raise ValueError("compares an arm with itself")
    return [limit]


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a number") from error
    if not math.isfinite(value):
        raise ValueError(f"{text} is no limit: take a finite number")
    return value


def _check_arm(name: str, arms: Sequence[str]) -> None:
    if name in (arms or [RUN]):
        return
    if not arms:
        raise ValueError(f"there is no arm `{name}`: the workload has none")
    if name == RUN:
        raise ValueError(f"say of which arm: {', '.join(arms)}")
    raise ValueError(f"there is no arm `{name}`; there are: {', '.join(arms)}")


def _contradictions(limits: Sequence[Limit]) -> Iterable[str]:
    for place, first in enumerate(limits):
        if (said := _impossible(first)) is not None:
            yield f"`{first.text}` is impossible: {said}"
        for second in limits[place + 1 :]:
            if not (_can_both_hold(first, second) and _can_both_hold(second, first)):
                yield f"`{first.text}` and `{second.text}` contradict each other"


def _impossible(limit: Limit) -> str | None:
    if limit.relation == "/" and not _is_kept_between(limit, 0, math.inf):
        return "a ratio is never below 0"
    if limit.relation is not None:
        return None
    info = METRICS[limit.metric]
    if not info.may_be_negative and not _is_kept_between(limit, 0, math.inf):
        return f"{limit.metric} is never below 0"
    if info.kind == "proportion" and not _is_kept_between(limit, 0, 1):
        return f"{limit.metric} is a share, from 0 to 1"
    return None


def _is_kept_between(limit: Limit, low: float, high: float) -> bool:
    return any(low <= value <= high and limit.holds(value) for value in (low, high, limit.number))


def _can_both_hold(lower: Limit, higher: Limit) -> bool:
    is_same = lower.figure == higher.figure
    if not is_same and not _are_ordered(lower, higher):
        return True
    numbers = (lower.number, higher.number)
    some = (min(numbers) - 1, *numbers, sum(numbers) / 2, max(numbers) + 1)
    return any(
        lower.holds(low) and higher.holds(high)
        for low in some
        for high in some
        if low == high or (low < high and not is_same)
    )


def _are_ordered(lower: Limit, higher: Limit) -> bool:
    keys = (lower.key, higher.key)
    is_one_metric = (lower.arm, lower.metric) == (higher.arm, higher.metric)
    if not is_one_metric or lower.relation is not None or higher.relation is not None:
        return False
    return any(pair == keys for ascending in _ASCENDING for pair in combinations(ascending, 2))
