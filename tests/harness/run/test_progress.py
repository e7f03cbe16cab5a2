"""Progress: a live panel on a terminal, plain lines elsewhere; the latency so far."""

import io
import shlex

import pytest
from rich.console import Console

from harness.records import LifecycleEvent
from harness.run.progress import (
    LatencySoFar,
    LiveProgress,
    PlainProgress,
    QuietProgress,
    Snapshot,
    choose_progress,
    describe,
)
from harness.run.run_config import repeat_command
from tests.made_up.rows import lifecycle_event


def console(*, is_terminal: bool = False, width: int = 80) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=width, force_terminal=is_terminal), file


def snapshot(elapsed_s: float) -> Snapshot:
    return Snapshot(
        elapsed_s=elapsed_s,
        limit_s=60,
        outcomes={"abandoned": 30, "completed": 9, "cut_off": 2},
        stop_after_abandons=100,
        gauges={"running": 8.0, "waiting": 4.0, "kv_usage": 0.5},
        cancel_latency_s=0.0117,
        client_lag_s=0.0002,
    )


def test_a_snapshot_in_one_line() -> None:
    assert describe(snapshot(12)) == (
        "12 s of at most 60 s · abandoned 30 of 100 · completed 9 · cut off 2 · "
        "running 8 · waiting 4 · cancel latency 11.7 ms · client lag 200 µs · about 28 s left"
    )


def test_what_nobody_tells_is_not_shown() -> None:
    bare = Snapshot(elapsed_s=12, limit_s=60)
    assert describe(bare) == "12 s of at most 60 s · abandoned 0 · completed 0 · about 48 s left"
    over = Snapshot(elapsed_s=61, limit_s=60)
    assert describe(over).endswith(" · ending")


def test_the_time_left_is_the_shorter_of_two() -> None:
    assert snapshot(6).left_s == pytest.approx(14)
    assert snapshot(50).left_s == pytest.approx(10)


def test_the_share_done_is_that_of_what_ends_the_load_first() -> None:
    assert snapshot(6).share_done == pytest.approx(0.3)
    assert snapshot(45).share_done == pytest.approx(0.75)
    assert snapshot(90).share_done == 1.0


def test_plain_progress_says_a_line_every_few_seconds() -> None:
    plain, file = console()
    progress = PlainProgress(plain)
    progress.phase("starting")
    for elapsed_s in (1, 4.9, 5.1, 6, 10.2):
        progress.update(snapshot(elapsed_s))
    progress.close()
    lines = file.getvalue().splitlines()
    assert lines[0] == "walkaway: starting"
    assert len(lines) == 3
    assert lines[1].startswith("walkaway: 5 s of at most 60 s")


def test_live_progress_leaves_only_the_phases() -> None:
    terminal, file = console(is_terminal=True)
    progress = LiveProgress(terminal)
    progress.phase("load")
    progress.update(snapshot(5))
    progress.update(snapshot(6))
    progress.phase("settling")
    progress.close()
    assert "abandoned 30 of 100" in file.getvalue()
    assert "cancel latency 11.7 ms · client lag 200 µs" in file.getvalue()
    assert "settling" in file.getvalue()


def test_progress_fits_the_console() -> None:
    plain, file = console()
    terminal, _ = console(is_terminal=True)
    assert isinstance(choose_progress(plain, is_quiet=False), PlainProgress)
    assert isinstance(choose_progress(terminal, is_quiet=False), LiveProgress)
    quiet = choose_progress(plain, is_quiet=True)
    assert isinstance(quiet, QuietProgress)
    quiet.phase("x")
    quiet.update(snapshot(99))
    quiet.close()
    assert file.getvalue() == ""


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
