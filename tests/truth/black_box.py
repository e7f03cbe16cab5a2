"""Measure the scripted server through the command line as a black box, and hold it to the truth.

The server's own stamps are the truth; only t0 is the harness's, which no server can know. A delay
may be off by max(5 ms, 10 %) and one step; counts must be exact where the method claims a point.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from tests.e2e.running import Run, measure, scripted_server
from tests.truth.known import seconds
from tests.truth.scripted_engine import Script
from tests.truth.settings import Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One quantity: what the server knows, between which limits the harness must lie, its figure.

    `told` is None where the harness says that it cannot tell, with the reason in `note`.
    """

    what: str
    known: float
    limits: tuple[float, float]
    told: float | None
    note: str = ""

    @property
    def is_right(self) -> bool:
        return self.told is not None and self.limits[0] <= self.told <= self.limits[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A run of the harness and the server's account of it; `works` by the client's request id."""

    script: Script
    run: Run
    truth: dict[str, Any]

    @property
    def works(self) -> dict[str, dict[str, Any]]:
        return {work["client_id"]: work for work in self.truth["requests"]}

    def left(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """When each client went away that did so before its end (or was cut off), and its work."""
        works = self.works
        for row in self.run.rows("requests"):
            work = works.get(row["request_id"])
            if work is not None and row["outcome"] in ("abandoned", "cut_off", "timed_out"):
                yield row["abandoned_ns"] or row["ended_ns"], work


def look(setting: Setting, script: Script, workload: str, folder: Path) -> Seen:
    """One run against a server of its own."""
    folder.mkdir(parents=True)
    target, load = folder / "truth.toml", folder / "load.toml"
    target.write_text(setting.target())
    load.write_text(workload)
    with scripted_server(**asdict(script)) as server:
        run = measure(load, folder / "run", "--target", server.url, "--engine", str(target))
        return Seen(script=script, run=run, truth=server.truth())


def hold_to_truth(setting: Setting, folder: Path) -> list[Line]:
    """Both runs of a setting, and everything that they must tell."""
    recovery = look(setting, setting.delays_only, setting.recovery_workload(), folder / "recovery")
    users = look(setting, setting.script, setting.abandon_workload(), folder / "users")
    return [*recovery_lines(recovery), *user_lines(users)]


# What a probe tells...


def recovery_lines(seen: Seen) -> Iterator[Line]:
    rows, works, metrics = seen.run.rows("requests"), seen.works, seen.run.metrics
    t0_of = {r["trial"]: r["abandoned_ns"] for r in rows if r["outcome"] == "abandoned"}
    leavers = [(r["abandoned_ns"], works[r["request_id"]]) for r in rows if r["abandoned_ns"]]
    probes = [r for r in rows if (r["role"], r["arm"]) == ("probe", "abandon")]
    served = fmean(
        seconds(t0_of[row["trial"]], works[row["request_id"]]["sent_times_ns"][0]) for row in probes
    )
    recovery, unloaded = metrics["slot_recovery_s"], metrics["probe_ttft_unloaded_s"]
    yield delay_line("slot recovery by probe", served, recovery["mean"], seen.script)
    held = fmean(seconds(t0, work["freed_ns"]) for t0, work in leavers)
    told = recovery["mean"] - unloaded["mean"]
    yield delay_line("cancel latency by probe, less the unloaded", held, told, seen.script)
    found = seen.run.manifest["target"].get("slots_found")
    yield count_line("batch slots, found by trying", seen.script.slots, found)


# What gauges and counters tell...


def user_lines(seen: Seen) -> Iterator[Line]:
    script, summary = seen.script, seen.run.summary
    yield count_line("wedged", script.wedge_after > 0, summary["wedged"])
    yield audit_line(seen)
    if script.wedge_after:
        return
    left = list(seen.left())
    # One who was to get a short answer and was cut off has ended by itself.
    ghosts = sum(work["is_ghost"] and work["removed_ns"] is None for _, work in left)
    lost = sum(work["has_leaked_slot"] for _, work in left)
    metrics = seen.run.metrics
    rate = metrics["ghost_rate"]
    counted = ghosts + lost if ghosts else 0  # beside a ghost nobody can tell that a slot is lost
    yield count_line("ghosts, by gauge", counted, rate["mean"] * rate["n"])
    apart = 0 if ghosts else lost
    yield count_line("lost slots that are no ghosts", apart, rate["others"].get("lost_slots", 0))
    going_on = rate["others"].get("still_generating")
    yield count_line("some of them still generate", ghosts > 0, bool(going_on))
    yield count_line("leaked slots", ghosts + lost, metrics["leaked_slots"]["mean"])
    if not ghosts:
        blocks = sum(work["leaked_blocks"] for work in seen.truth["requests"])
        yield count_line("leaked blocks", blocks, metrics["leaked_blocks"]["mean"])
    yield waste_line(seen, ghosts)
    if not ghosts and not lost:
        yield from latency_lines(seen, left)


def audit_line(seen: Seen) -> Line:
    """Is the verdict on the counter of aborts the one that the script makes true?"""
    verdicts = {one["role"]: one["verdict"] for one in seen.run.summary["audit"]["counters"]}
    expected, told = seen.script.aborted_counter, verdicts["aborted"]
    possible = {expected}
    if any(work["is_ghost"] for _, work in seen.left()):
        possible.add("lower")  # than the number of those who left; the server need not know all
    return count_line(f"audit: aborts are {expected}", 1, told in possible, note=f"said: {told}")


def waste_line(seen: Seen, ghosts: int) -> Line:
    """Tokens in all that nobody read; of ghosts that still run a lower bound."""
    rows = seen.run.rows("requests")
    made = sum(
        len(seen.works[r["request_id"]]["token_times_ns"])
        for r in rows
        if r["request_id"] in seen.works
    )
    known = made - sum(row["tokens_read"] for row in rows)
    wasted = seen.run.metrics["wasted_tokens"]
    told = wasted["others"]["total_tokens"]
    if ghosts:
        bound = wasted["bound"]
        limits = (1, known if bound == "lower" else 0)
        return Line(what="wasted tokens so far", known=known, limits=limits, told=told, note=bound)
    return count_line("wasted tokens, in all", known, told)


def latency_lines(seen: Seen, left: list[tuple[int, dict[str, Any]]]) -> Iterator[Line]:
    """The mean, from totals: the counter moves when a request is out, the gauge when it is free."""
    metric = seen.run.metrics["cancel_latency_s"]
    methods = {metric["method"]: metric, **metric["others"]}
    held = fmean(seconds(t0, gone_ns(work)) for t0, work in left)
    yield bounded_delay_line("cancel latency by gauge", held, methods.get("gauge"), seen.script)
    if seen.script.aborted_counter == "exact":
        out = fmean(seconds(t0, work["removed_ns"]) for t0, work in left)
        counted = methods.get("counter")
        yield bounded_delay_line("cancel latency by counter", out, counted, seen.script)


def gone_ns(work: dict[str, Any]) -> int:
    """When it held nothing that a gauge shows: neither a slot nor a place in the queue."""
    was_admitted = work["admitted_ns"] is not None
    end: int = work["freed_ns"] if was_admitted else work["removed_ns"]
    return end


def bounded_delay_line(
    what: str, known: float, metric: dict[str, Any] | None, script: Script
) -> Line:
    """Only what the summary shows counts: a mean, or where it shows none, what it does not exceed.

    What old pages can hide or add is part of the claim of a mean: `bias_low`, `bias_high`. In an
    upper limit it is contained.
    """
    if metric is None:
        return Line(what=what, known=known, limits=(known, known), told=None, note="not told")
    allowed = tolerance_s(known, script)
    if metric["mean"] is None:
        at_most = (known - allowed, math.inf)
        return Line(
            what=what, known=known, limits=at_most, told=metric["upper95"], note="at most so much"
        )
    low, high = metric["others"]["bias_low"], metric["others"]["bias_high"]
    limits = (known - allowed + low, known + allowed + high)
    note = f"old pages: {low:+.3f}, {high:+.3f}" if low or high else ""
    return Line(what=what, known=known, limits=limits, told=metric["mean"], note=note)


def tolerance_s(known: float, script: Script) -> float:
    return max(0.005, 0.1 * known) + script.step_s


def delay_line(what: str, known: float, told: float | None, script: Script) -> Line:
    allowed = tolerance_s(known, script)
    return Line(what=what, known=known, limits=(known - allowed, known + allowed), told=told)


def count_line(what: str, known: float, told: float | None, note: str = "") -> Line:
    """Exact; what is not rounded is counted all the same."""
    rounded = None if told is None else round(float(told), 6)
    return Line(what=what, known=float(known), limits=(known, known), told=rounded, note=note)


# What must not be said of a server with nothing wrong...

ALARMS = ("ghost", "leak", "wedged", "still", "health", "lies", "apart")
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
    return found


def false_alarms(setting: Setting, folder: Path) -> list[str]:
    """Of one run on a server with nothing wrong."""
    return alarms(look(setting, setting.script, setting.abandon_workload(), folder).run.summary)
