"""The benchmarks run, at their smallest sizes, and a broken bound is told from a kept one."""

import json
from math import inf
from pathlib import Path

import pytest

from tests.bench.__main__ import BENCHMARKS, report, run, table
from tests.bench.ratio import Bound, Figure, share, times_as_fast


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    ratios = list(run([name], quick=True))
    if "left out" in (said := capsys.readouterr().err):
        pytest.skip(said)
    assert ratios  # whether a bound holds at these sizes says nothing, so that is not asserted
    assert all(0 < ratio.ratio < inf for ratio in ratios)
    assert all(ratio.what in table(ratios) for ratio in ratios)


def test_ratios_are_taken_round_by_round() -> None:
    ratio = times_as_fast("speed", "ms", [1.0, 10.0, 2.0], [3.0, 20.0, 8.0], at_least=3.0)
    assert (ratio.ours, ratio.theirs) == (Figure(2.0, "ms"), Figure(8.0, "ms"))
    assert ratio.ratio == 3.0  # of 3, 2 and 4; the medians alone would say 4
    assert ratio.spread == (2.5, 3.5)
    assert ratio.holds


def test_a_bound_is_broken_on_its_own_side_only() -> None:
    assert not times_as_fast("speed", "ms", [2.0], [3.0], at_least=1.6).holds
    assert times_as_fast("speed", "ms", [2.0], [3.0]).holds
    assert share("share", "ms", [1.0], [10.0], Bound("at most", 0.1)).holds
    assert not share("share", "ms", [1.1], [10.0], Bound("at most", 0.1)).holds


def test_a_broken_bound_is_shown_and_ends_in_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = times_as_fast("fast", "ms", [1.0], [3.0], at_least=1.5)
    broken = times_as_fast("too slow", "ms", [2.0], [3.0], at_least=1.6)
    assert report([kept], None) == 0
    assert report([kept, broken], tmp_path / "figures.json") == 1
    line = capsys.readouterr().out.splitlines()[-1]
    assert " ".join(line.split()) == "too slow 2 ms 3 ms 1.50 1.50-1.50 at least 1.6 BROKEN"
    written = json.loads((tmp_path / "figures.json").read_text())
    assert [ratio["holds"] for ratio in written["ratios"]] == [True, False]
    assert written["versions"]["python"]
