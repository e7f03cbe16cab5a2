"""Progress: a live panel on a terminal, plain lines elsewhere."""

import errno
import io
import os

import pytest
from rich.console import Console

from harness.run.progress import (
    PrefixedProgress,
    ProgressConsole,
    Snapshot,
    choose_progress,
    describe,
)


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


def test_a_snapshot_in_one_line_leaves_out_unknown_figures() -> None:
    assert describe(snapshot(12)) == (
        "12 s of at most 60 s · abandoned 30 of 100 · completed 9 · cut off 2 · running 8 · "
        "waiting 4 · cancel latency 11.7 ms · client lag 200 µs · about 28 s left"
    )
    late = Snapshot(elapsed_s=61, limit_s=60)
    assert describe(late) == "61 s of at most 60 s · abandoned 0 · completed 0 · ending"


@pytest.mark.parametrize(
    ("elapsed_s", "left_s", "share_done"),
    [(6, 14, 0.3), (45, 15, 0.75), (50, 10, 50 / 60), (90, 0, 1.0)],
)
def test_the_load_ends_by_its_time_or_by_its_abandons(
    elapsed_s: float, left_s: float, share_done: float
) -> None:
    assert snapshot(elapsed_s).left_s == pytest.approx(left_s)
    assert snapshot(elapsed_s).share_done == pytest.approx(share_done)


def shown(*, is_terminal: bool, is_quiet: bool = False) -> str:
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=is_terminal)
    progress = choose_progress(console, is_quiet=is_quiet)
    progress.phase("starting")
    for elapsed_s in (1, 4.9, 5.1, 6, 10.2):
        progress.update(snapshot(elapsed_s))
    PrefixedProgress(progress, "round 1").phase("settling")
    progress.close()
    return file.getvalue()


def test_progress_is_a_line_every_few_seconds_or_a_panel_between_the_phases() -> None:
    lines = shown(is_terminal=False).splitlines()
    assert [line[:28] for line in lines] == [
        "walkaway: starting",
        "walkaway: 5 s of at most 60 ",
        "walkaway: 10 s of at most 60",
        "walkaway: round 1: settling",
    ]
    assert shown(is_terminal=False, is_quiet=True) == ""
    panel = shown(is_terminal=True)
    for text in ("abandoned 30 of 100", "11.7 ms · client lag 200 µs", "round 1: settling"):
        assert text in panel


class Unwritable(io.StringIO):
    def __init__(self, error: OSError) -> None:
        super().__init__()
        self._error = error

    def write(self, _: str) -> int:
        raise self._error


@pytest.mark.parametrize("number", [errno.EPIPE, errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_run_does_not_end_because_its_progress_cannot_be_shown(
    number: int, *, is_terminal: bool
) -> None:
    console = ProgressConsole()
    console.file = Unwritable(OSError(number, os.strerror(number)))
    console._force_terminal = is_terminal
    progress = choose_progress(console, is_quiet=False)
    for elapsed_s in (1, 6):
        progress.phase("loading")
        progress.update(snapshot(elapsed_s))
    progress.close()
