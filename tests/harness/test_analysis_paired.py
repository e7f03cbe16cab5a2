"""One arm against another, against scipy and by hand."""

import numpy as np
import pytest
from scipy import stats

from harness.analysis.paired import compare, is_certain

MINE: list[float | None] = [10.0, 30.0, 22.0, 15.0]
THEIRS: list[float | None] = [21.0, 55.0, 40.0, 36.0]


def test_the_intervals_are_those_of_scipy() -> None:
    mine, theirs = np.array(MINE, dtype=float), np.array(THEIRS, dtype=float)
    found = compare("on", "off", MINE, THEIRS)
    expected = stats.ttest_1samp(mine - theirs, 0).confidence_interval(0.95)
    assert found.difference == pytest.approx(float((mine - theirs).mean()))
    assert found.difference_ci95 == pytest.approx((expected.low, expected.high))
    logs = np.log(mine / theirs)
    expected = stats.ttest_1samp(logs, 0).confidence_interval(0.95)
    assert found.ratio == pytest.approx(stats.gmean(mine / theirs))
    assert found.ratio_ci95 == pytest.approx((np.exp(expected.low), np.exp(expected.high)))
    assert (found.arm, found.reference, found.n, found.note) == ("on", "off", 4, None)


def test_rounds_are_paired_and_half_pairs_left_out() -> None:
    drifting = compare("on", "off", [1.0, 10.0, 100.0, 7.0], [2.0, 20.0, 200.0, None])
    assert drifting.n == 3
    assert drifting.ratio == pytest.approx(0.5)
    assert drifting.ratio_ci95 == pytest.approx((0.5, 0.5))  # what differs between rounds drops out
    assert drifting.note == "1 of 4 rounds have no value of both arms"


def test_two_rounds_have_no_interval() -> None:
    found = compare("on", "off", [1.0, 2.0], [2.0, 5.0])
    assert (found.difference, found.difference_ci95, found.ratio_ci95) == (-2.0, None, None)
    assert found.ratio == pytest.approx(np.sqrt(0.2))
    assert found.note == "not enough data for an interval: 2 of at least 3 rounds"
    assert not is_certain(found)


def test_a_zero_has_no_ratio_but_a_difference() -> None:
    found = compare("on", "off", [0.0, 0.0, 0.0], [3.0, 4.0, 5.0])
    assert (found.ratio, found.ratio_ci95, found.difference) == (None, None, -4.0)
    assert found.note == "not enough data for a ratio: a round has a value of zero, or below"
    assert is_certain(found)


def test_no_pair_at_all() -> None:
    found = compare("on", "off", [None, 1.0], [1.0, None])
    assert (found.n, found.difference, found.ratio) == (0, None, None)
    assert found.note == "no round has a value of both arms"


def test_certain_is_what_the_interval_leaves_out() -> None:
    assert is_certain(compare("on", "off", MINE, THEIRS))
    assert not is_certain(compare("on", "off", [1.0, 2.0, 3.0], [1.1, 1.9, 3.0]))
