"""The ways that need no full slots, on a server whose truth is known: good, ten steps late, and one
that never lets go of anything."""

from typing import Any

import pytest

from tools.truth.ways import SERVERS, WAYS, watch

pytestmark = pytest.mark.e2e

TRIES = 2
LATE, NEVER = SERVERS["ten steps late"], SERVERS["never"]
SLOWER, BUSY = WAYS["pace"], WAYS["quiet"]


@pytest.mark.parametrize("script", [{}, LATE], ids=["good", "late"])
def test_a_gauge_shows_how_long_each_stream_was_held(script: dict[str, Any]) -> None:
    told, held_s = watch("gauge", tries=TRIES, **script)
    assert len(told["tries_s"]) == len(held_s) == TRIES
    for seen_s, true_s in zip(told["tries_s"], held_s, strict=True):
        assert seen_s == pytest.approx(true_s, abs=told["floor_s"] + 0.01)
    assert max(told["controls_s"]) <= told["floor_s"] + 0.01


def test_a_gauge_shows_streams_that_are_held_for_ever_by_two_tries() -> None:
    told, _ = watch("gauge", tries=TRIES, **NEVER)
    assert told["tries_s"] == [None, None]
    assert len(told["controls_s"]) == 1
    assert told["natural_s"] > told["waited_s"]


@pytest.mark.table
def test_a_pace_comes_back_when_the_server_let_go_of_the_others() -> None:
    told, held_s = watch("pace", tries=TRIES, **SLOWER, **LATE)
    assert len(told["tries_s"]) == TRIES
    true_s = sorted(one for one in held_s if one is not None)
    for seen_s in told["tries_s"]:
        assert true_s[0] - told["floor_s"] <= seen_s <= true_s[-1] + told["floor_s"]
    assert max(told["controls_s"]) <= told["floor_s"]


@pytest.mark.table
def test_a_pace_does_not_come_back_where_the_others_are_computed_for_nobody() -> None:
    told, _ = watch("pace", tries=TRIES, **SLOWER, **NEVER)
    assert told["tries_s"] == [None, None]
    assert max(told["controls_s"]) <= told["floor_s"]


@pytest.mark.table
@pytest.mark.parametrize(("every", "held"), [(0, 0), (2, 8)])
def test_a_pace_shows_how_many_of_those_that_left_are_still_computed(every: int, held: int) -> None:
    """Of 16; every other one is forgotten."""
    told, _ = watch("pace", tries=0, is_share=True, ghost_every=every, **SLOWER)
    assert told["held"] == pytest.approx(held, abs=3 if held else 0)


@pytest.mark.parametrize(
    "way",
    [
        "gauge",
        pytest.param("pace", marks=pytest.mark.table),
        pytest.param("quiet", marks=pytest.mark.table),
    ],
)
@pytest.mark.parametrize("name", ["good", "never"])
def test_a_stream_that_leaves_before_its_first_token_is_seen_afterwards(
    way: str, name: str
) -> None:
    told, _ = watch(way, tries=TRIES, is_early=True, **WAYS[way], **SERVERS[name])
    if name == "never":
        assert set(told["tries_s"]) == {None}
    else:
        assert len(told["tries_s"]) == TRIES
        assert max(told["tries_s"]) <= max(told["controls_s"]) + told["floor_s"] + 0.05


def test_where_others_slow_nobody_pace_says_that_it_sees_nothing() -> None:
    told, _ = watch("pace", tries=TRIES, most_others=4)
    assert "by pace it cannot be seen here" in told["why"]
    assert told["ratio"] == pytest.approx(1.0, abs=0.3)


@pytest.mark.table
def test_a_processor_is_at_rest_again_when_the_server_stopped() -> None:
    told, held_s = watch("quiet", tries=TRIES, **BUSY, **LATE)
    assert len(told["tries_s"]) == len(held_s) == TRIES
    for seen_s, true_s in zip(told["tries_s"], held_s, strict=True):
        assert seen_s == pytest.approx(true_s, abs=told["floor_s"])


@pytest.mark.table
def test_a_processor_stays_busy_for_nobody() -> None:
    told, _ = watch("quiet", tries=TRIES, **BUSY, **NEVER)
    assert told["tries_s"] == [None, None]
    assert max(told["controls_s"]) <= told["floor_s"]


def test_a_server_that_costs_all_but_nothing_cannot_be_judged_by_its_processor() -> None:
    told, _ = watch("quiet", tries=TRIES)
    assert "about as busy at rest" in told["why"]
