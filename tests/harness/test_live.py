"""What is shown while a load goes on, and the line that repeats a run."""

import shlex

import pytest

from harness.records import LifecycleEvent
from harness.run.progress import LatencySoFar
from harness.run.run_config import repeat_command
from tests.made_up.rows import lifecycle_event


def event(name: str, request: str | None, t_ns: int) -> LifecycleEvent:
    return lifecycle_event(1, t_ns, name, "a", client_request_id=request)


def test_the_latency_so_far_needs_both_ends_whichever_is_told_first() -> None:
    so_far = LatencySoFar()
    log = [
        event("blocks_freed", "a", 30),
        event("removed", "b", 35),
        event("blocks_freed", None, 1),
    ]
    so_far.add({"b": 10}, log)
    assert so_far.typical_s is None
    so_far.add({"a": 10}, [])
    assert so_far.typical_s == pytest.approx(20e-9)
    so_far.add({}, [event("blocks_freed", "b", 50)])
    assert so_far.typical_s == pytest.approx(30e-9)


def test_who_was_freed_long_ago_is_forgotten() -> None:
    so_far = LatencySoFar()
    so_far.add({}, [event("blocks_freed", "a", 30), event("blocks_freed", "b", 20_000_000_000)])
    so_far.add({"a": 10, "b": 19_000_000_000}, [])
    assert so_far.typical_s == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("walkaway demo", "walkaway demo --set run.seed=7"),
        ("walkaway run demo --set run.seed=3", "walkaway run demo --set run.seed=3"),
        ("walkaway run demo --set=run.seed=3", "walkaway run demo --set=run.seed=3"),
        ("walkaway run a.toml --out x --json", "walkaway run a.toml --json --set run.seed=7"),
        ("walkaway run demo --out=x", "walkaway run demo --set run.seed=7"),
        (
            "walkaway run 'my load.toml' --header X-Key=***",
            "walkaway run 'my load.toml' --header 'X-Key=***' --set run.seed=7",
        ),
        ("", ""),
    ],
)
def test_the_line_that_repeats_a_run(typed: str, line: str) -> None:
    assert repeat_command(shlex.split(typed), seed=7) == line
