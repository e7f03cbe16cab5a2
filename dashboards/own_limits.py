"""The gate's judgement of a run by the limits that its own workload carries."""

from pathlib import Path
from typing import Any

from harness.errors import ConfigError
from harness.gate.judge import Judgement, Terms, judge, refuse
from harness.gate.limits import BASELINE, Limit, parse_limits
from harness.gate.run_folder import read_run
from harness.store.run_folder import UnusableRunError
from harness.workload.workload import GateSettings


def judged_by_own_limits(path: Path, workload: dict[str, Any]) -> Judgement | None:
    """The judgement; None where the workload has no limits.

    A limit against a baseline is left to `walkaway gate`: a report is of its run alone.
    """
    settings = workload.get("gate") or {}
    if not settings.get("limits"):
        return None
    try:
        limits = _limits(settings["limits"], workload)
    except (ConfigError, KeyError, TypeError) as error:
        return refuse(path.name, f"its limits cannot be read: {error}", "limits that can be")
    try:
        measured = read_run(path)
    except UnusableRunError as error:
        return refuse(path.name, error.reason, error.remedy)
    fewest = int(settings.get("min_abandons", GateSettings().min_abandons))
    terms = Terms(limits=limits, baseline=None, fewest_abandons=fewest)
    return judge(measured, terms, run=path.name)


def _limits(lines: list[str], workload: dict[str, Any]) -> list[Limit]:
    arms = [arm["name"] for arm in workload.get("arms") or []]
    found = parse_limits(lines, source="[gate]", arms=arms)
    return [limit for limit in found if limit.against != BASELINE]
