"""The average over leaves, held against made-up gauges whose truth is known.

A slot is given back at a step's beginning, so a hold of 211 ms is one of 221 ms on average.
"""

import math

import numpy as np
import pytest

from harness.experiments.averaged import Averaged, LeaveWindow, MeanEstimate, average
from tests.harness.experiments.crowd import STEP_S, seeds, watched

SEEDS = 40
WINDOW = LeaveWindow.of(poll_s=0.05, step_s=STEP_S, after_s=1.2)
QUICK = LeaveWindow.of(poll_s=0.02, step_s=STEP_S, after_s=1.2)


def over_seeds(
    held_s: float, ghosts: float = 0.0, *, ramp: float = 0.0, window: LeaveWindow = WINDOW
) -> list[Averaged]:
    found = []
    for rng in seeds(SEEDS):
        seen = watched(
            rng,
            12,
            lambda: held_s,
            ghosts=ghosts,
            streams=2,
            poll_s=window.poll_s,
            ramp=ramp,
        )
        one = average(seen.leaves, seen.times_s, seen.values, window, rng)
        assert one is not None
        found.append(one)
    return found


@pytest.mark.parametrize("held_s", [0.013, 0.211, 0.609])
def test_a_dozen_leaves_of_two_streams_beside_twelve_users_show_how_long_a_slot_is_held(
    held_s: float,
) -> None:
    found = over_seeds(held_s)
    true_s = held_s + STEP_S / 2
    places = [one.place_s for one in found]
    assert np.median(places) == pytest.approx(true_s, abs=0.005)
    assert np.percentile(np.abs(np.array(places) - true_s), 80) < 0.02
    covered = [one.place_ci95.low - 0.005 <= true_s <= one.place_ci95.high + 0.005 for one in found]
    assert np.mean(covered) >= 0.9


@pytest.mark.parametrize("ghosts", [0.0, 0.02, 0.5, 1.0])
@pytest.mark.parametrize("ramp", [0.0, 0.2])
def test_the_share_that_was_freed_is_true_whatever_the_load_does(
    ghosts: float, ramp: float
) -> None:
    found = over_seeds(0.013, ghosts, ramp=ramp)
    freed = [one.freed for one in found]
    assert np.mean([one.mean for one in freed]) == pytest.approx(1 - ghosts, abs=0.08)
    covered = [one.interval().low <= 1 - ghosts <= one.interval().high for one in freed]
    assert np.mean(covered) >= 0.85
    assert np.mean([one.interval().width for one in freed]) < 1.2


def test_a_dozen_leaves_tell_half_of_ghosts_from_none() -> None:
    """The interval excludes that all leaves are acted on, in most worlds with ghosts."""
    half = over_seeds(0.013, 0.5, window=QUICK)
    assert np.mean([one.freed.interval().high < 1 for one in half]) >= 0.7
    none = over_seeds(0.013, window=QUICK)
    assert np.mean([one.freed.interval().high < 1 for one in none]) <= 0.1


def test_two_in_a_hundred_need_thousands_of_leaves_but_no_leave_is_seen_wrongly() -> None:
    rng = np.random.default_rng(7)
    seen = watched(rng, 600, lambda: 0.013, ghosts=0.02, streams=2)
    found = average(seen.leaves, seen.times_s, seen.values, WINDOW, rng)
    assert found is not None
    assert found.freed.mean == pytest.approx(0.98, abs=2 * found.freed.error)
    assert 0.05 < found.freed.interval().width < 0.12


def test_a_stream_that_begins_is_seen_in_the_reading_or_it_is_another_servers() -> None:
    seen = [one.seen for one in over_seeds(0.013) if one.seen is not None]
    assert np.mean([one.mean for one in seen]) == pytest.approx(1, abs=0.06)
    rng = np.random.default_rng(1)
    ours, other = (watched(rng, 12, lambda: 0.013, streams=2) for _ in range(2))
    elsewhere = [one._replace(asked_s=one.asked_s + 0.5) for one in ours.leaves]
    found = average(elsewhere, other.times_s, other.values, WINDOW, rng)
    assert found is not None
    assert found.seen is not None
    assert found.seen.interval().low < 0.5


def test_the_same_at_moments_without_a_leave_shows_nothing() -> None:
    controls = [one.control for one in over_seeds(0.013) if one.control is not None]
    assert len(controls) == SEEDS
    assert np.mean([one.mean for one in controls]) == pytest.approx(0, abs=0.06)
    covered = [one.interval().low <= 0 <= one.interval().high for one in controls]
    assert np.mean(covered) >= 0.85


def test_leaves_that_are_let_go_of_later_than_most_have_gone_at_the_windows_end() -> None:
    """A server that looks for leaves between steps computes another's prompt in one piece first."""
    rng = np.random.default_rng(1)
    held_s = lambda: rng.uniform(0.15, 0.6) if rng.random() < 0.3 else 0.01  # noqa: E731
    seen = watched(rng, 40, held_s, users=0, poll_s=QUICK.poll_s)
    found = average(seen.leaves, seen.times_s, seen.values, QUICK, rng)
    assert found is not None
    assert found.freed.mean < 0.85
    assert found.at_last.mean == pytest.approx(1)


def test_a_window_in_which_the_page_was_not_read_is_left_out() -> None:
    rng = np.random.default_rng(1)
    seen = watched(rng, 12, lambda: 0.211)
    gap = seen.leaves[3].t0_s
    is_read = (seen.times_s < gap - 0.2) | (seen.times_s > gap + 0.4)
    found = average(seen.leaves, seen.times_s[is_read], seen.values[is_read], WINDOW, rng)
    assert found is not None
    assert found.leaves == 11
    early = [one._replace(t0_s=one.t0_s - 1e3) for one in seen.leaves]
    assert average(early, seen.times_s, seen.values, WINDOW, rng) is None


def test_an_estimate_has_its_standard_error() -> None:
    one = MeanEstimate.of(np.array([1.0, 2.0, 3.0]))
    assert one.mean == 2.0
    assert one.error == pytest.approx(1 / math.sqrt(3))
