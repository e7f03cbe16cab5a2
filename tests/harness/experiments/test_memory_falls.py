"""Each leave by the memory that a server shows, among users whose comings and goings are known."""

from typing import NamedTuple

import numpy as np
import pytest
from scipy import stats

from harness.experiments.gentle_memory import is_lost
from harness.experiments.gentle_plan import decide
from harness.experiments.memory_falls import (
    Array,
    Falls,
    FallTally,
    Mistaken,
    median_interval,
    needed,
)
from harness.intervals import Interval
from tests.harness.experiments.crowd import STEP_S, seeds

WINDOW_S = 1.0
TURN_S = 4.0


class Memory(NamedTuple):
    """Blocks of 16 tokens, read once a step; when ours left, and until when it was held."""

    times_s: Array
    values: Array
    others: Array
    left_s: Array
    freed_s: Array


def memory(rng: np.random.Generator, *, leaves: int, blocks: int, ghost_every: int = 0) -> Memory:
    """Twelve others with prompts of 16 to 512 tokens and answers of 20 to 250. A ghost of ours is
    held for 2.5 s, any other stream for 0.1 s."""
    seconds = leaves * TURN_S + 5
    times_s = np.arange(0, seconds, STEP_S)
    others = np.zeros(len(times_s))
    for _ in range(12):
        now_s = -rng.uniform(0, 5)
        while now_s < seconds:
            lasts_s = rng.integers(20, 251) * STEP_S * (rng.random() if rng.random() < 0.3 else 1)
            is_on = (times_s >= now_s) & (times_s < now_s + lasts_s)
            tokens = rng.integers(16, 513) + (times_s[is_on] - now_s) / STEP_S
            others[is_on] += np.ceil(tokens / 16)
            now_s += lasts_s + rng.exponential(1.0)
    began_s = 2 + TURN_S * np.arange(leaves)
    left_s = began_s + rng.uniform(0.4, 0.8, leaves)
    is_ghost = (np.arange(1, leaves + 1) % max(1, ghost_every) == 0) & (ghost_every > 0)
    freed_s = left_s + np.where(is_ghost, 2.5, 0.1)
    values = others.copy()
    for since_s, until_s in zip(began_s, freed_s, strict=True):
        values[(times_s >= since_s) & (times_s < until_s)] += blocks
    return Memory(times_s, values, others, left_s, freed_s)


def enough(rng: np.random.Generator) -> float:
    """The blocks that our request must hold among these users, by five seconds of them."""
    quiet = memory(rng, leaves=1, blocks=0)
    need = needed(Falls.of(quiet.times_s, quiet.values).sizes[:250])
    assert need is not None
    return need.ample


def test_beside_a_dozen_users_each_leave_is_told_by_itself() -> None:
    """Of a thousand leaves hardly one is mistaken, by a prompt of some hundred blocks."""
    wrong, mistaken = 0, Mistaken()
    for rng in seeds(10):
        blocks = round(1.3 * enough(rng))
        assert 40 < blocks < 400
        seen = memory(rng, leaves=100, blocks=blocks, ghost_every=10)
        falls = Falls.of(seen.times_s, seen.values)
        for left_s, freed_s in zip(seen.left_s, seen.freed_s, strict=True):
            place_s = falls.first(left_s, left_s + WINDOW_S, blocks)
            if freed_s - left_s < WINDOW_S:
                wrong += place_s is None or abs(place_s - freed_s) > 2 * STEP_S
            else:
                wrong += place_s is not None
        alone = Falls.of(seen.times_s, seen.others)
        mistaken = mistaken.also(alone, Interval(0, TURN_S * 100), blocks)
    assert wrong <= 10
    assert mistaken.share(WINDOW_S) < 0.01


def test_a_page_that_takes_long_hides_no_leave() -> None:
    """It left after 1.0 s and was let go of at once; no page was read from 0.6 to 1.1 s."""
    times_s = np.array([0.0, 0.2, 0.4, 0.6, 1.1, 1.2, 1.3])
    falls = Falls.of(times_s, np.array([9.0, 9, 9, 9, 1, 1, 1]))
    assert falls.first(1.0, 2.0, held=8) == pytest.approx(0.85)
    assert falls.first(1.15, 2.0, held=8) is None


def test_too_short_a_prompt_is_mistaken_for_others_and_that_is_measured() -> None:
    (rng,) = seeds(1)
    seen = memory(rng, leaves=50, blocks=0)
    falls = Falls.of(seen.times_s, seen.values)
    assert Mistaken().also(falls, Interval(0, 200), 20).share(WINDOW_S) > 0.5


def test_nothing_is_needed_but_what_was_seen() -> None:
    assert needed(np.zeros(10)) is None
    assert needed(np.zeros(100)) == (0, 0)
    assert needed(np.array([0.0, 10.0] * 50)) == (30, 30)  # six times the scatter
    seldom = needed(np.array([0.0] * 990 + [100.0] * 10))
    assert seldom == pytest.approx((59.7, 250), abs=0.1)  # none may hide ours


def test_a_median_has_an_interval_by_ranks() -> None:
    assert median_interval(range(1, 11)) == (2, 9)
    assert median_interval(range(1, 101)) == (40, 61)
    assert median_interval([5.0, 1.0, 3.0]) == (1, 5)


def test_three_ghosts_in_150_leaves_are_a_share_with_an_interval() -> None:
    tally = FallTally(leaves=150, held=3, unclear=0, ends=16, missed=0)
    assert tally.rate == pytest.approx(0.02)
    low, high = tally.interval()
    assert 0.003 < low < 0.02 < high < 0.06
    assert decide(tally, 0.95) is True


def test_a_leave_that_is_never_seen_to_fall_widens_the_interval_and_accuses_nobody() -> None:
    clean = FallTally(leaves=150, held=0, unclear=0, ends=16, missed=0)
    some = clean._replace(unclear=2)
    assert some.rate == 0
    assert some.interval().low == 0
    assert some.interval().high > clean.interval().high


@pytest.mark.parametrize(
    ("leaves", "unclear", "missed", "loses"),
    [
        (3, 3, 0, True),  # of 5 % of the memory each: no fourth one is risked
        (3, 3, 1, True),
        (3, 3, 3, False),  # ends are hardly seen, either
        (100, 3, 0, False),  # now and then another user takes it
        (300, 30, 0, False),  # one in ten: not surely more
        (11, 11, 0, True),  # of 1 % each
    ],
)
def test_memory_that_never_comes_back_is_lost_if_ends_bring_it_back(
    leaves: int, unclear: int, missed: int, loses: bool
) -> None:
    assert is_lost(FallTally(leaves, held=0, unclear=unclear, ends=12, missed=missed)) is loses


@pytest.mark.parametrize(("leaves", "unclear", "ends", "missed"), [(3, 3, 12, 2), (40, 9, 15, 1)])
def test_leaves_are_compared_with_ends_exactly(
    leaves: int, unclear: int, ends: int, missed: int
) -> None:
    table = np.array([[unclear, leaves - unclear], [missed, ends - missed]])
    p = stats.fisher_exact(table, alternative="greater").pvalue
    tally = FallTally(leaves, held=0, unclear=unclear, ends=ends, missed=missed)
    assert tally.loses(p * 1.001)
    assert not tally.loses(p * 0.999)
