"""The load, run in a process of its own and watched while it goes on."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.resources import files
from itertools import count

from harness.errors import TargetError
from harness.load.plan import (
    AbandonLoad,
    CancelStormLoad,
    ChunkFrontierLoad,
    LoadPlan,
    SlotRecoveryLoad,
)
from harness.load.rows import ShardReader
from harness.open_loop_order import describe_open_loop
from harness.process import Child, python_module
from harness.progress import Snapshot
from harness.records import Outcome, RequestRow
from harness.store import RunFolder

WATCH_S = 0.2
CHECK_EVERY = 5  # of these turns
GRACE_S = 60.0  # to come up and to go down, beside the plan's own time


def load_command(folder: RunFolder) -> list[str]:
    """Locust without a web page, with the plan that lies in the run's folder."""
    locustfile = str(files("workloads") / "locustfile.py")
    return python_module(
        "locust",
        *("-f", locustfile, "--headless", "--only-summary"),
        *("--walkaway-plan", str(folder.load_plan), "--walkaway-exit-with-stdin"),
    )


def run_load(
    plan: LoadPlan,
    folder: RunFolder,
    *,
    check_server: Callable[[], None],
    watch_pid: Callable[[int], None],
    show: Callable[[Snapshot], None],
    interrupted: Callable[[], bool],
) -> None:
    """Run the load process to its end, or until interrupted. Its rows lie in shards then.

    `check_server` raises when there is no use in going on. Raises TargetError when the load
    process dies or hangs.
    """
    shards = ShardReader(folder.shards, RequestRow)
    counts: Counter[str] = Counter()
    started_s = time.monotonic()
    with Child("load", load_command(folder), folder.log("load")) as load:
        watch_pid(load.pid)
        for turn in count(1):
            code = load.wait(WATCH_S)
            if code == 0 or interrupted():
                return
            if code is not None:
                raise TargetError(f"the load process ended with code {code}:\n{load.tail()}")
            if turn % CHECK_EVERY == 0:
                check_server()
            elapsed_s = time.monotonic() - started_s
            if elapsed_s > plan.max_seconds + plan.timeouts.next_byte_s + GRACE_S:
                raise TargetError(f"the load process did not end in time:\n{load.tail()}")
            counts.update(row.outcome.value for row in shards.read_new())
            show(_snapshot(plan, elapsed_s, counts))


def find_hopeless(rows: Sequence[RequestRow]) -> TargetError | None:
    """The error to end with after a load in which nothing worked at all."""
    if not rows:
        return TargetError("the load made no request; see load.log in the run's folder")
    if all(row.outcome in (Outcome.FAILED, Outcome.REJECTED) for row in rows):
        return TargetError(f"all {len(rows)} requests failed; the first: {rows[0].error}")
    return None


def describe_load(plan: LoadPlan) -> str:
    """One line about what is going to happen."""
    if plan.open_loop is not None:
        return f"load: {describe_open_loop(plan.open_loop)}"
    match plan.load:
        case AbandonLoad(stop_after_abandons=None):
            return f"load: {plan.users} users for {plan.max_seconds:.0f} s"
        case AbandonLoad(stop_after_abandons=enough):
            most = f"{plan.max_seconds:.0f} s"
            return f"load: {plan.users} users until {enough} have walked away, at most {most}"
        case SlotRecoveryLoad(slots=slots, trials=trials):
            return f"load: {slots} slots, {trials} trials of each arm"
        case ChunkFrontierLoad(bystanders=others, pairs=pairs):
            return f"load: {others} bystanders, {pairs} long prompts read and as many abandoned"
        case CancelStormLoad(streams=streams, storms=storms):
            return f"load: {storms} storms, in each of which {streams} streams are left at once"


def _snapshot(plan: LoadPlan, elapsed_s: float, counts: Counter[str]) -> Snapshot:
    enough = plan.load.stop_after_abandons if isinstance(plan.load, AbandonLoad) else None
    return Snapshot(
        elapsed_s=elapsed_s,
        limit_s=plan.max_seconds,
        outcomes=dict(counts),
        stop_after_abandons=enough,
    )
