"""Limits held against made-up runs, and arms whose rounds are given."""

from collections.abc import Sequence
from typing import Any

from harness.gate.judge import GateVerdict, Judgement, Measured, judge
from harness.gate.limits import Limit, parse_limits
from tests.made_up import gated

Rounds = Sequence[float | None]

PASS, FAIL, OPEN = GateVerdict.PASS, GateVerdict.FAIL, GateVerdict.CANNOT_DECIDE


def judged(
    run: Measured, *lines: str | Limit, baseline: Measured | None = None, fewest: int = 2
) -> Judgement:
    arms = [name for name in run.sides if name != "run"]
    limits = [one for line in lines for one in _parsed(line, arms)]
    return judge(run, limits, run="folder", baseline=baseline, fewest_abandons=fewest)


def _parsed(line: str | Limit, arms: list[str]) -> list[Limit]:
    return [line] if isinstance(line, Limit) else parse_limits([line], source="test", arms=arms)


def wasting(name: str, values: Rounds, counting: str | None) -> dict[str, dict[str, Any]]:
    """An arm with these wasted tokens, by round."""
    metric = gated.steps()
    metric.unit = "tokens"
    rounds = {"wasted_tokens": {"mean": list(values)}}
    return {name: gated.arm({"wasted_tokens": metric}, rounds, counting)}


def of_arms(*arms: dict[str, dict[str, Any]]) -> Measured:
    merged = {name: one for arm in arms for name, one in arm.items()}
    return gated.measured(gated.summary_of_arms(merged), list(merged))
