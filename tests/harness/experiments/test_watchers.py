"""The ways that need no full slots, on a server whose truth is known: good, ten steps late, and one
that never lets go of anything."""

import json
import subprocess
import sys
from typing import Any, NamedTuple

import pytest

from tests.e2e.running import scripted_server

pytestmark = pytest.mark.e2e

TRIES = 2
SETTLE_S = 1.0
LATE: dict[str, Any] = {"linger_steps": 10}
NEVER: dict[str, Any] = {"ghost_every": 1}


class Watched(NamedTuple):
    """`told`: what the way says; `held_s`: how long the server held each stream that left."""

    told: dict[str, Any]
    held_s: list[float | None]


def watch(
    way: str,
    *,
    step_s: float = 0.02,
    most_others: int = 32,
    is_share: bool = False,
    tries: int = TRIES,
    **script: Any,
) -> Watched:
    with scripted_server(slots=32, step_s=step_s, num_blocks=8192, **script) as server:
        asked = {
            "url": server.url,
            "way": way,
            "slots": 32,
            "step_s": step_s,
            "settle_s": SETTLE_S,
            "tries": tries,
            "is_share": is_share,
            "pid": server.process.pid,
            "most_others": most_others,
        }
        done = subprocess.run(
            [sys.executable, "-m", "tests.harness.experiments.watching"],
            input=json.dumps(asked),
            stdout=subprocess.PIPE,
            text=True,
            timeout=60,
            check=True,
        )
        left = [one for one in server.truth()["requests"] if one["closed_ns"] is not None]
        held_s = [
            None if one["freed_ns"] is None else (one["freed_ns"] - one["closed_ns"]) / 1e9
            for one in left
        ]
        return Watched(json.loads(done.stdout), held_s)


@pytest.mark.parametrize("script", [{}, LATE], ids=["good", "late"])
def test_a_gauge_shows_how_long_each_stream_was_held(script: dict[str, Any]) -> None:
    told, held_s = watch("gauge", **script)
    assert len(told["tries_s"]) == len(held_s) == TRIES
    for seen_s, true_s in zip(told["tries_s"], held_s, strict=True):
        assert seen_s == pytest.approx(true_s, abs=told["floor_s"] + 0.01)
    assert max(told["controls_s"]) <= told["floor_s"] + 0.01


def test_a_gauge_shows_a_stream_that_is_held_for_ever_and_one_try_is_enough() -> None:
    told, _ = watch("gauge", **NEVER)
    assert told["tries_s"] == [None]
    assert len(told["controls_s"]) == 1
    assert told["natural_s"] > told["waited_s"]


SLOWER: dict[str, Any] = {"step_s": 0.01, "stream_s": 0.004}


@pytest.mark.slow
def test_a_pace_comes_back_when_the_server_let_go_of_the_others() -> None:
    told, held_s = watch("pace", **SLOWER, **LATE)
    assert len(told["tries_s"]) == TRIES
    true_s = sorted(one for one in held_s if one is not None)
    for seen_s in told["tries_s"]:
        assert true_s[0] - told["floor_s"] <= seen_s <= true_s[-1] + told["floor_s"]
    assert max(told["controls_s"]) <= told["floor_s"]


@pytest.mark.slow
def test_a_pace_does_not_come_back_where_the_others_are_computed_for_nobody() -> None:
    told, _ = watch("pace", **SLOWER, **NEVER)
    assert told["tries_s"] == [None]
    assert max(told["controls_s"]) <= told["floor_s"]


@pytest.mark.slow
@pytest.mark.parametrize(("every", "share"), [(0, 0.0), (2, 0.5)])
def test_half_of_the_others_leave_and_a_share_of_them_is_still_computed(
    every: int, share: float
) -> None:
    told, _ = watch("pace", tries=0, is_share=True, ghost_every=every, **SLOWER)
    lost, (low, high) = told["lost"]
    assert lost == pytest.approx(share, abs=0.2)
    assert low - 0.1 <= share <= high + 0.1


def test_where_others_slow_nobody_pace_says_that_it_sees_nothing() -> None:
    told, _ = watch("pace", most_others=4)
    assert "by pace it cannot be seen here" in told["why"]
    assert told["ratio"] == pytest.approx(1.0, abs=0.3)


BUSY: dict[str, Any] = {"busy_s": 0.006}


@pytest.mark.slow
def test_a_processor_is_at_rest_again_when_the_server_stopped() -> None:
    told, held_s = watch("quiet", **BUSY, **LATE)
    assert len(told["tries_s"]) == len(held_s) == TRIES
    for seen_s, true_s in zip(told["tries_s"], held_s, strict=True):
        assert seen_s == pytest.approx(true_s, abs=told["floor_s"])


@pytest.mark.slow
def test_a_processor_stays_busy_for_nobody() -> None:
    told, _ = watch("quiet", **BUSY, **NEVER)
    assert told["tries_s"] == [None]
    assert max(told["controls_s"]) <= told["floor_s"]


def test_a_server_that_costs_all_but_nothing_cannot_be_judged_by_its_processor() -> None:
    told, _ = watch("quiet")
    assert "about as busy at rest" in told["why"]
