"""Token times: millions of them are counted as a few are, worked out by hand or the plain way."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.analysis import token_times
from harness.analysis.token_times import read_by, sorted_times, token_gaps

Lists = Sequence[Sequence[int]]


def frame(times: Lists, tokens: Lists | None = None) -> pd.DataFrame:
    tokens = [[1] * len(of_one) for of_one in times] if tokens is None else tokens
    columns = {"token_times_ns": times, "event_tokens": tokens}
    return pd.DataFrame(
        {
            name: pd.Series(pd.arrays.ArrowExtensionArray(pa.array(lists, pa.list_(pa.int64()))))
            for name, lists in columns.items()
        }
    )


def test_gaps_are_within_a_request() -> None:
    gaps, owners = token_gaps(frame([[10, 30, 60], [], [5], [100, 101]]))
    assert gaps.tolist() == [20e-9, 30e-9, 1e-9]
    assert owners.tolist() == [0, 0, 3]


def test_gaps_of_some_requests() -> None:
    requests = frame([[10, 30], [5, 9], [100, 101]])
    gaps, owners = token_gaps(requests, np.array([False, True, True]))
    assert gaps.tolist() == [4e-9, 1e-9]
    assert owners.tolist() == [0, 1]


def test_gaps_are_of_one_of_several_answers() -> None:
    requests = frame([[5, 9], [10, 11, 30, 32, 60], [7], [1, 2, 4]]).assign(n=[1, 2, 2, 3])
    gaps, owners = token_gaps(requests)
    assert gaps.tolist() == pytest.approx([4e-9, 20e-9, 21e-9, 30e-9])
    assert owners.tolist() == [0, 1, 1, 1]
    gaps, owners = token_gaps(requests, np.array([False, True, True, False]))
    assert gaps.tolist() == pytest.approx([20e-9, 21e-9, 30e-9])
    assert owners.tolist() == [0, 0, 0]


def test_tokens_are_counted_from_when_they_came() -> None:
    requests = frame([[10, 30], [20]], [[1, 4], [2]])
    assert read_by(requests, np.array([9, 10, 25, 30, 99])).tolist() == [0, 1, 3, 7, 7]
    assert read_by(requests, np.array([99, 10])).tolist() == [7, 1]


def test_a_run_without_a_token() -> None:
    nothing = frame([])
    assert token_gaps(nothing)[0].tolist() == []
    assert read_by(nothing, np.array([5])).tolist() == [0]
    assert sorted_times(nothing).tolist() == []


@given(st.lists(st.lists(st.integers(0, 50), max_size=6).map(sorted), max_size=20))
def test_parts_do_not_show(times: list[list[int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_times, "_ROWS_AT_ONCE", 3)
        gaps, owners = token_gaps(frame(times))
        counted = read_by(frame(times), np.arange(52))
    plain = [(b - a, number) for number, t in enumerate(times) for a, b in pairwise(t)]
    assert np.round(gaps * 1e9).tolist() == [gap for gap, _ in plain]
    assert owners.tolist() == [number for _, number in plain]
    flat = [t for of_one in times for t in of_one]
    assert counted.tolist() == [sum(t <= now for t in flat) for now in range(52)]
    assert sorted_times(frame(times)).tolist() == sorted(flat)


def test_lists_may_be_python_objects_too() -> None:
    plain = pd.DataFrame({"token_times_ns": [[1, 3], [5]], "event_tokens": [[1, 1], [1]]})
    assert token_gaps(plain)[0].tolist() == [2e-9]
