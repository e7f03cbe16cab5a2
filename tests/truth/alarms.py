"""What must not be said of a server with nothing wrong."""

from typing import Any

import msgspec

from dashboards.sentence import sentence
from harness.records import Metric

ALARMS = ("ghost", "leak", "wedged", "still", "health", "lies", "apart")
ACCUSING = ("not stopped", "went on as if", "never came back", "still held")
NEVER_THERE = ("ghost_rate", "leaked_slots", "leaked_blocks", "leaked_kv_share")


def alarms(summary: dict[str, Any]) -> list[str]:
    """Everything in a summary that accuses the server of something."""
    metrics = summary["metrics"]
    there = [name for name in NEVER_THERE if name in metrics and metrics[name]["mean"]]
    found = [f"{name} is {metrics[name]['mean']}" for name in there]
    if summary["wedged"] is not False:
        found.append(f"wedged is {summary['wedged']}")
    found += [
        f"{one['role']} is called {one['verdict']}"
        for one in summary["audit"]["counters"]
        if one["verdict"] not in ("exact", "not told", "cannot be judged")
    ]
    for remark in summary["validity"]:
        is_grave = remark["level"] != "info"
        if is_grave and any(word in remark["text"] for word in ALARMS):
            found.append(remark["text"])
    return found + accusations(summary)


def accusations(summary: dict[str, Any]) -> list[str]:
    """What the report's first sentences say against the server."""
    breakdown = summary["breakdown"]
    said = sentence(
        summary["outcomes"],
        msgspec.convert(summary["metrics"], dict[str, Metric]),
        breakdown["leaks_in_use"],
        breakdown["leaks_lost"],
    )
    parts = [part.strip(" .") for part in said.split(". ")]
    return [part for part in parts if any(words in part for words in ACCUSING)]
