"""How many tokens more than planned a client had read when it left: by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from harness.analysis.figure import NotMeasurable
from harness.analysis.tokens import over_read_figures
from harness.records import Metric

if TYPE_CHECKING:
    from tests.made_up.run import RunBuilder

    MakeRun = Callable[[], RunBuilder]

MS = 1_000_000


def over_read(run: RunBuilder) -> Metric:
    figure = over_read_figures(run.frames().requests)["over_read_tokens"]
    assert isinstance(figure, Metric)
    return figure


@pytest.mark.parametrize(
    ("tokens", "more", "expected"),
    [
        # As planned: after the second, at once.
        ([10, 20], {"planned_abandon": 2, "think_ns": 0}, 0),
        # Three in one receive: nobody could have left after the first.
        ([10, 10, 10], {"planned_abandon": 1, "think_ns": 0}, 2),
        ([10, 20], {"planned_abandon": 2, "think_ns": 0, "event_tokens": [1, 4]}, 3),
        # Who thinks reads on; what comes when that is over is too much.
        ([10, 20, 29], {"planned_abandon": 1, "think_ns": 20 * MS}, 0),
        ([10, 20, 30, 31], {"planned_abandon": 1, "think_ns": 20 * MS}, 2),
        # Who waits for no token thinks from the sending on, here at 0.
        ([10, 20], {"planned_abandon": 0, "think_ns": 15 * MS}, 1),
        ([], {"planned_abandon": 0, "think_ns": 15 * MS}, 0),
    ],
)
def test_it_is_what_came_after_the_planned_moment(
    make_run: MakeRun, tokens: list[float], more: dict[str, Any], expected: int
) -> None:
    run = make_run()
    run.abandon("before", t0=40, tokens=[5, 6, 7], planned_abandon=2, think_ns=0)
    run.abandon("a", t0=40, tokens=tokens, **more)
    run.request("stays", sent=0, tokens=[5, 6, 7], outcome="completed", end=40)
    figure = over_read(run)
    assert (figure.n, figure.unit) == (2, "tokens")
    assert figure.mean == (1 + expected) / 2
    assert figure.max == max(1, expected)


def test_bytes_left_in_the_kernel_show_as_resets(make_run: MakeRun) -> None:
    run = make_run()
    for name, way, wire_close in (("a", "fin", "rst"), ("b", "fin", "fin"), ("c", "rst", "rst")):
        run.abandon(name, t0=9, tokens=[5], think_ns=0, way=way, wire_close=wire_close)
    unread = over_read(run).others["unread_at_t0"]
    assert (unread.n, unread.mean) == (2, 0.5)


def test_where_nobody_left_there_is_none(make_run: MakeRun) -> None:
    run = make_run()
    run.request("stays", sent=0, tokens=[5], outcome="completed", end=40)
    figure = over_read_figures(run.frames().requests)["over_read_tokens"]
    assert figure == NotMeasurable("nobody left a stream by plan")
