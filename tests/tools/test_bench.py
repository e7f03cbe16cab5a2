"""The benchmarks run, at their smallest sizes, and a broken bound shows."""

import json
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from tools.bench.__main__ import BENCHMARKS, measure, report, run, table
from tools.bench.load_generator import (
    BARE,
    RIGHT,
    against,
    against_the_server,
    lags_p99_ms,
    percentiles,
)
from tools.bench.ratio import BenchRatio, RatioLimit, UnavailableError, share, times_as_fast
from tools.bench.streaming import Traffic, WatchedAnswer, WatchedLoad

LONG = ("served_speed",)  # a minute; `make bench` runs it, too


@pytest.mark.slow
@pytest.mark.timeout(400)  # one compiles the decode step
@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=pytest.mark.table if one in LONG else ()) for one in BENCHMARKS],
)
def test_every_benchmark_runs(name: str) -> None:
    left_out: list[str] = []
    ratios = list(run([name], quick=True, leave_out=left_out.append))
    if left_out:
        pytest.skip(left_out[0])
    assert ratios  # whether a bound holds at these sizes says nothing, so that is not asserted
    # 0 where the machine was so busy that what is compared came all at once
    assert all(0 <= ratio.ratio < inf for ratio in ratios)
    assert all(ratio.what in table(ratios) for ratio in ratios)


@pytest.mark.slow
def test_the_price_of_a_preemption_is_that_of_a_model_which_is_named() -> None:
    pytest.importorskip("torch", reason="needs the extra `engine` (torch)")
    lines = list(run(["swap_or_recompute"], quick=True, leave_out=pytest.fail))
    assert {line.what.partition(":")[0] for line in lines} == {"tiny in float32"}


def test_ratios_are_taken_round_by_round() -> None:
    ratio = times_as_fast("speed", "ms", [1.0, 10.0, 2.0], [3.0, 20.0, 8.0], at_least=3.0)
    assert (ratio.ours, ratio.theirs, ratio.unit) == (2.0, 8.0, "ms")
    assert ratio.ratio == 3.0  # of 3, 2 and 4; the medians alone would say 4
    assert ratio.spread == (2.5, 3.5)
    assert ratio.holds


def of(ratio: float, bound: RatioLimit | None) -> BenchRatio:
    return share("share", "ms", [ratio], [1.0], bound)


def test_a_bound_is_broken_on_its_own_side_only() -> None:
    assert [of(r, RatioLimit("at least", 1.6)).holds for r in (1.5, 1.6, 1.7)] == [
        False,
        True,
        True,
    ]
    assert [of(r, RatioLimit("at most", 1.6)).holds for r in (1.5, 1.6, 1.7)] == [True, True, False]
    near = RatioLimit("off 1 by at most", 0.1)
    assert [of(r, near).holds for r in (0.85, 0.95, 1.05, 1.15)] == [False, True, True, False]
    assert of(9.0, None).holds
    assert not replace(of(1.0, near), is_overrun=True).holds, "its cost is that of less"
    assert replace(of(1.0, None), is_overrun=True).holds, "nothing to hold"


def test_a_broken_bound_is_shown_and_ends_in_1_as_does_nothing_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept = times_as_fast("fast", "ms", [1.0], [3.0], at_least=1.5)
    broken = times_as_fast("too slow", "ms", [2.0], [3.0], at_least=1.6)
    assert report([kept]) == 0
    assert report([kept, broken]) == 1
    line = capsys.readouterr().out.splitlines()[-1]
    assert " ".join(line.split()) == "too slow 2 ms 3 ms 1.50 1.50-1.50 at least 1.6 BROKEN"
    assert report([kept, broken], judges=False) == 0
    assert capsys.readouterr().out.splitlines()[-1] == line
    assert report([], judges=False) == 1
    assert capsys.readouterr().out == "nothing measured\n"


def test_an_interrupted_benchmark_has_kept_its_lines(tmp_path: Path) -> None:
    first, second = of(1.2, RatioLimit("at most", 1.1)), of(1.3, None)

    def lines() -> Iterator[BenchRatio]:
        yield first
        assert json.loads(file.read_text())["ratio"] == 1.2, "a kill may come at any time"
        yield second
        raise KeyboardInterrupt

    file = tmp_path / "lines.jsonl"
    with file.open("w") as out:
        assert measure(lines(), out) == ([first, second], False)
    written = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["bound"], line["holds"]) for line in written] == [
        (["at most", 1.1], False),
        (None, True),
    ]


def watched(sent_ns: list[int], got_ns: list[int]) -> WatchedLoad:
    """One answer, as the server sent it and as a client stamped it, watched for a second."""
    return WatchedLoad(
        traffic=Traffic(streams=1),
        start_ns=-1,
        end_ns=1_000_000_000,
        cpu_ns=1_000_000,
        rss_before_bytes=1,
        rss_bytes=1,
        sent={"r": WatchedAnswer(0, sent_ns)},
        got={"r": WatchedAnswer(0, got_ns)},
    )


HUNDRED: list[int] = list(range(0, 1_000_000_000, 10_000_000))


def test_what_came_all_at_once_has_a_ratio_and_what_did_not_come_is_left_out() -> None:
    assert percentiles("gap", [([0, 0, 5_000_000], [5_000_000] * 3)], 50, RIGHT).ratio == 0
    with pytest.raises(UnavailableError, match="gap: no answer fell into the window"):
        percentiles("gap", [([], [])], 50, RIGHT)
    with pytest.raises(UnavailableError, match="lag of stamps: no token fell into the window"):
        lags_p99_ms([watched(HUNDRED, [])])


def test_a_rival_that_did_not_keep_up_is_shown_and_bounds_nothing() -> None:
    ours, saturated = [watched(HUNDRED, HUNDRED)], [watched(HUNDRED, HUNDRED[:50])]
    assert against(BARE, Traffic(streams=1), ours, ours).bound is not None
    line = against(BARE, Traffic(streams=1), ours, saturated)
    assert (line.bound, line.what.endswith(", saturated")) == (None, True)
    assert against(BARE, Traffic(streams=1), saturated, ours).is_overrun


SERVER_MS = range(20, 220, 5)  # 40 tokens after 20 ms, one each 5 ms
BY_THE_KILOBYTE = [float(SERVER_MS[number // 4 * 4 + 3]) for number in range(len(SERVER_MS))]


@pytest.mark.parametrize(
    ("tokens_ms", "broken"),
    [
        ([ms + 0.5 for ms in SERVER_MS], []),
        (BY_THE_KILOBYTE, ["TTFT p50", "TTFT p99", "gap p50", "gap p90"]),
        ([20.0] * len(SERVER_MS), ["gap p50", "gap p90"]),
        ([0.0] * len(SERVER_MS), ["TTFT p50", "TTFT p99", "gap p50", "gap p90"]),
        ([ms + 6.0 for ms in SERVER_MS], ["TTFT p50", "TTFT p99"]),
    ],
)
def test_a_client_that_stamps_wrongly_breaks_the_bounds(
    tokens_ms: list[float], broken: list[str]
) -> None:
    sent_ns, got_ns = ([round(ms * 1e6) for ms in times] for times in (SERVER_MS, tokens_ms))
    lines = list(against_the_server("a client", [watched(sent_ns, got_ns)]))
    assert len(lines) == 4
    assert [line.what.partition(",")[0] for line in lines if not line.holds] == broken
