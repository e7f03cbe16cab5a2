"""The moment at which a pace comes back, and the share of the streams that it shows."""

import random

import numpy as np
import pytest

from harness.experiments.outcome import CannotDecideError
from harness.experiments.pace import back_after_s, find_change, gaps_of
from harness.experiments.pace_share import follow_slowness, share_left, still_computed

MS = 1_000_000
SLOW_S, FAST_S = 0.05, 0.02
SEEDS = 60


def tokens(rng: np.random.Generator, slow: int, fast: int, noise: float = 0.15) -> list[int]:
    """When tokens came, ns: `slow` at the slow pace, then `fast` at the fast one."""
    paces = np.array([SLOW_S] * slow + [FAST_S] * fast)
    stalls = np.where(rng.random(len(paces)) < 0.05, 0.04, 0)
    gaps = paces * rng.lognormal(0, noise, len(paces)) + stalls
    return [int(at_s * 1e9) for at_s in np.concatenate([[0], gaps.cumsum()])]


@pytest.mark.parametrize("slow_after", [0, 1, 4, 12])
def test_the_pace_comes_back_where_it_did_whatever_single_gaps_do(slow_after: int) -> None:
    """Eight slow steps before the leave, some after it; one gap in twenty has a stall."""
    errors = []
    for seed in range(SEEDS):
        times = tokens(np.random.default_rng(seed), 8 + slow_after, 30)
        t0_ns = times[8] + 3 * MS
        back_s = back_after_s(times, t0_ns, slow_s=SLOW_S, fast_s=FAST_S)
        assert back_s is not None
        true_s = max(0.0, (times[8 + slow_after] - t0_ns) / 1e9)
        errors.append(abs(back_s - true_s))
    assert np.median(errors) <= 0.001
    assert np.mean([error <= SLOW_S for error in errors]) >= 0.85


def test_a_pace_that_never_comes_back_is_not_found() -> None:
    for seed in range(SEEDS):
        times = tokens(np.random.default_rng(seed), 40, 0)
        assert back_after_s(times, times[8], slow_s=SLOW_S, fast_s=FAST_S) is None


def test_a_few_quick_tokens_at_the_end_are_no_change() -> None:
    times = tokens(np.random.default_rng(1), 20, 3, noise=0.0)
    assert find_change(gaps_of(times), SLOW_S, FAST_S) is None


def test_tokens_that_were_read_together_share_their_gap() -> None:
    times = [0, 40 * MS, 40 * MS + 100_000, 60 * MS]
    assert [gap.pace_s for gap in gaps_of(times, FAST_S)] == pytest.approx([0.02, 0.02])


@pytest.mark.parametrize("lost", [0.0, 0.5, 1.0])
def test_the_share_of_those_that_left_is_found_from_three_paces(lost: float) -> None:
    """Of 16 others 8 leave: a step takes 10 ms and 2.5 for each stream."""

    def paces(rng: np.random.Generator, streams: float) -> list[float]:
        return list((0.01 + 0.0025 * streams) * rng.lognormal(0, 0.1, 24))

    covered, found = [], []
    for seed in range(SEEDS):
        rng = np.random.default_rng(seed)
        full, after, fewer = (paces(rng, n) for n in (17, 9 + 8 * lost, 9))
        share, interval = share_left(full, after, fewer, random.Random(seed))
        found.append(share)
        covered.append(interval.low <= lost <= interval.high)
    assert np.mean(found) == pytest.approx(lost, abs=0.05)
    assert np.mean(covered) >= 0.9


ALONE_S = tuple(0.02 + 0.0001 * number for number in range(-4, 5))
BESIDE_S = tuple(2 * pace_s for pace_s in ALONE_S)


@pytest.mark.parametrize(
    ("slower", "until_s", "held"),
    [
        (2.0, 0.3, None),  # another load, for a moment
        (2.0, 7.0, None),
        (2.0, 10.0, 8),  # the answers end
        (2.0, 10.02, 8),  # within a measurement
        (2.2, 10.0, 8),  # never more than have left
        (2.0, 99.0, None),
        (1.2, 10.0, 2),
        (1.2, 99.0, None),
        (1.04, 99.0, 0),
    ],
)
def test_those_that_left_are_held_if_the_slowness_ends_when_their_answers_must(
    slower: float, until_s: float, held: int | None
) -> None:
    """Their natural ends are at 10 s. A pace takes 0.3 s to measure."""
    now_s = 0.0

    def paces() -> list[float]:
        nonlocal now_s
        found = []
        for pace_s in ALONE_S:
            found.append((slower if now_s < until_s else 1.0) * pace_s)
            now_s += 0.3 / len(ALONE_S)
        return found

    after_s = paces()
    late_s, ended_s = follow_slowness(
        ALONE_S, after_s, paces, lambda: now_s, near_s=8.0, end_s=20.0
    )

    def count() -> int:
        return still_computed(8, BESIDE_S, ALONE_S, after_s, late_s, ended_s, random.Random(1))

    if held is not None:
        assert count() == held
        return
    with pytest.raises(CannotDecideError, match="no longer near" if until_s < 8 else "still is"):
        count()
    assert (now_s >= 20) == (until_s > 20)  # it has waited before it says so
