"""Measure the scripted server through the command line as a black box, and hold it to the truth.

The server's own stamps are the truth; only t0 is the harness's, which no server can know. A delay
may be off by max(5 ms, 10 %) and one step; counts must be exact where the method claims a point.
"""

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple

import msgspec

from harness.records import Metric
from harness.run.settle import LATER_S
from harness.text.headlines import report_sentence
from tests.e2e.running import Run
from tools.truth.known import Observed, observe, seconds
from tools.truth.scripted_engine import Script
from tools.truth.settings import Setting

LONGEST_READ: Final = 1.5  # times what was asked for

# Words that accuse a server, in a warning and in the report's first sentences.
ALARMS: Final = ("ghost", "leak", "wedged", "still", "health", "lies", "apart")
ACCUSING: Final = ("not stopped", "kept running as if", "never came back", "still held")
NEVER_THERE: Final = ("ghost_rate", "leaked_slots", "leaked_blocks", "leaked_kv_share")


class Line(NamedTuple):
    """One quantity: the server's figure, the limits of the harness's, and the harness's.

    `shown` is None where the harness gives no figure; `note` says why.
    """

    what: str
    known: float
    limits: tuple[float, float]
    shown: float | None
    note: str = ""

    @property
    def is_right(self) -> bool:
        return self.shown is not None and self.limits[0] <= self.shown <= self.limits[1]


def look(setting: Setting, script: Script, workload: str, folder: Path) -> Observed:
    folder.mkdir(parents=True)
    target = folder / "truth.toml"
    target.write_text(setting.target())
    return observe(folder, script, workload, engine=str(target))


def look_at_users(setting: Setting, folder: Path) -> Observed:
    """The run in which users walk away.

    It rests on frequent readings of the metrics page. If these came much more seldom than asked
    for, the run is made once more; the second one counts, whatever it is like.
    """
    workload = setting.abandon_workload()
    seen = look(setting, setting.script, workload, folder / "users")
    if not _was_read_too_seldom(seen.run):
        return seen
    return look(setting, setting.script, workload, folder / "again")


def was_made_again(seen: Observed) -> bool:
    return seen.run.folder.parent.name == "again"


def _was_read_too_seldom(run: Run) -> bool:
    """The mean interval between two readings, weighted by its length: a user is likelier to leave
    in a long one. Without any reading the whole load is one interval."""
    window, asked_s = run.manifest["window"], float(run.manifest["scrape_interval_s"])
    began, ended = window["load_started_ns"], window["load_ended_ns"]
    at_ns = {row["t_ns"] for row in run.rows("server_metrics")}
    in_load = sorted(t for t in at_ns if began < t < ended)
    intervals_s = [seconds(*pair) for pair in pairwise([began, *in_load, ended])]
    longest_s = LONGEST_READ * asked_s
    return sum(length * length for length in intervals_s) > longest_s * sum(intervals_s)


def hold_to_truth(setting: Setting, folder: Path) -> list[Line]:
    return list(user_lines(look_at_users(setting, folder)))


# Accusations, which a server with nothing wrong must not get...


def alarms(summary: dict[str, Any]) -> list[str]:
    metrics = summary["metrics"]
    there = [name for name in NEVER_THERE if name in metrics and metrics[name]["mean"]]
    found = [f"{name} is {metrics[name]['mean']}" for name in there]
    if summary["wedged"] is not False:
        found.append(f"wedged is {summary['wedged']}")
    found += [
        f"{one['role']} is called {one['verdict']}"
        for one in summary["audit"]["counters"]
        if one["verdict"] not in ("exact", "unknown", "cannot be judged")
    ]
    for remark in summary["validity"]:
        is_grave = remark["level"] != "info"
        if is_grave and any(word in remark["text"] for word in ALARMS):
            found.append(remark["text"])
    return found + accusations(summary)


def accusations(summary: dict[str, Any]) -> list[str]:
    breakdown = summary["breakdown"]
    said = report_sentence(
        summary["outcomes"],
        msgspec.convert(summary["metrics"], dict[str, Metric]),
        breakdown["leaks_in_use"],
        breakdown["leaks_lost"],
    )
    parts = [part.strip(" .") for part in said.split(". ")]
    return [part for part in parts if any(words in part for words in ACCUSING)]


# Figures from gauges and counters...


def user_lines(seen: Observed) -> Iterator[Line]:
    script, summary = seen.script, seen.run.summary
    again = "made again: the page was read too seldom" if was_made_again(seen) else ""
    yield count_line("wedged", script.wedge_after > 0, summary["wedged"], again)
    yield audit_line(seen)
    if script.wedge_after:
        return
    left = list(seen.left())
    # A short answer that was cut off has ended by itself.
    ghosts = sum(work["is_ghost"] and work["removed_ns"] is None for _, work in left)
    lost = sum(work["has_leaked_slot"] for _, work in left)
    metrics = seen.run.metrics
    rates = by_method(metrics["ghost_rate"])
    rate = rates["gauge"]
    counted = ghosts + lost if ghosts else 0  # among ghosts a lost slot looks like one more
    yield count_line("ghosts, by gauge", counted, rate["mean"] * rate["n"])
    apart = 0 if ghosts else lost
    yield count_line("lost slots that are no ghosts", apart, rate["others"].get("lost_slots", 0))
    going_on = rate["others"].get("still_generating")
    yield count_line("some of them still generate", ghosts > 0, bool(going_on))
    yield count_line("leaked slots", ghosts + lost, metrics["leaked_slots"]["mean"])
    blocks = sum(work["leaked_blocks"] for work in seen.truth["requests"])
    missing = metrics["leaked_blocks"]
    if not ghosts:
        yield count_line("leaked blocks", blocks, missing["mean"])
    else:  # the blocks that ghosts hold are missing, too
        most = math.inf if missing["bound"] == "upper" else blocks
        yield Line("leaked blocks, at most", blocks, (blocks, most), missing["mean"])
    yield waste_line(seen, ghosts)
    if not ghosts and not lost:
        yield from latency_lines(seen, left)


def audit_line(seen: Observed) -> Line:
    verdicts = {one["role"]: one["verdict"] for one in seen.run.summary["audit"]["counters"]}
    expected, shown = seen.script.aborted_counter, verdicts["aborted"]
    possible = {expected}
    if any(work["is_ghost"] for _, work in seen.left()):
        possible.add("lower")  # than the abandons: the server need not know all
    return count_line(f"audit: aborts are {expected}", 1, shown in possible, note=f"said: {shown}")


def waste_line(seen: Observed, ghosts: int) -> Line:
    """All generated tokens that no client read. Ghosts still generate: what counts is the time of
    the reading, after the settle time and before the pause that precedes the last one."""
    read = sum(row["tokens_read"] for row in seen.run.rows("requests"))
    wasted = seen.run.metrics["wasted_tokens"]
    shown = wasted["others"]["total_tokens"]
    if not ghosts:
        return count_line("wasted tokens, in all", made_by(seen, math.inf) - read, shown)
    window = seen.run.manifest["window"]
    paused_ns = window["held_until_ns"][-1] - int(LATER_S * 1e9)
    low, high = (made_by(seen, t_ns) - read for t_ns in (window["settled_ns"], paused_ns))
    is_bounded = wasted["bound"] == "lower"
    limits = (low, high if is_bounded else -1)
    return Line("wasted tokens so far", high, limits, shown, wasted["bound"])


def made_by(seen: Observed, t_ns: float) -> int:
    works = seen.works
    rows = [row for row in seen.run.rows("requests") if row["request_id"] in works]
    return sum(t <= t_ns for row in rows for t in works[row["request_id"]]["token_times_ns"])


def by_method(metric: dict[str, Any]) -> dict[str, dict[str, Any]]:
    others = {name: one for name, one in metric["others"].items() if isinstance(one, dict)}
    return {metric["method"]: metric, **others}


def latency_lines(seen: Observed, left: list[tuple[int, dict[str, Any]]]) -> Iterator[Line]:
    """The mean, from totals: the gauge moves when a request is free."""
    methods = by_method(seen.run.metrics["cancel_latency_s"])
    held = fmean(seconds(t0, gone_ns(work)) for t0, work in left)
    yield from bounded_lines("cancel latency by gauge", held, methods.get("gauge"), seen.script)


def gone_ns(work: dict[str, Any]) -> int:
    """The time at which it left every gauge: it holds neither a slot nor a place in the queue."""
    was_admitted = work["admitted_ns"] is not None
    end: int = work["freed_ns"] if was_admitted else work["removed_ns"]
    return end


def bounded_lines(
    what: str, known: float, metric: dict[str, Any] | None, script: Script
) -> Iterator[Line]:
    """Check what the summary shows: a mean with its interval, which allows for old pages; without
    a mean, the upper bound."""
    if metric is None:
        yield Line(what, known, (known, known), None, "not shown")
    elif metric["mean"] is None:
        yield Line(what, known, (known, math.inf), metric["upper95"], "at most")
    else:
        yield delay_line(what, known, metric["mean"], script)
        yield interval_line(f"{what}: in its interval", known, metric["mean_ci95"], script)


def interval_line(
    what: str, known: float, limits: tuple[float, float] | None, script: Script
) -> Line:
    """The truth lies in it. The server works in steps: an end may be off by one."""
    if limits is None:
        return Line(what, known, (known, known), None, "no interval")
    low, high = limits
    return Line(what, known, (low - script.step_s, high + script.step_s), known)


def delay_line(what: str, known: float, shown: float | None, script: Script) -> Line:
    allowed = max(0.005, 0.1 * known) + script.step_s
    return Line(what, known, (known - allowed, known + allowed), shown)


def count_line(what: str, known: float, shown: float | None, note: str = "") -> Line:
    """Exact; what is not rounded is counted all the same."""
    rounded = None if shown is None else round(float(shown), 6)
    return Line(what, float(known), (known, known), rounded, note)
