"""Ids among others."""

import pandas as pd

from harness.analysis.facts import is_among


def test_ids_are_found_whatever_they_are_kept_in() -> None:
    asked = ["a", "c", None, "b"]
    for dtype in (object, "string", "string[pyarrow]"):
        known = pd.Series(["b", "a", None], dtype=dtype)
        assert is_among(pd.Series(asked, dtype=dtype), known).tolist() == [True, False, False, True]
    assert is_among(pd.Series(asked), pd.Index(["c"])).tolist() == [False, True, False, False]


def test_nothing_is_among_nothing() -> None:
    assert is_among(pd.Series([], dtype=object), pd.Series([], dtype=object)).tolist() == []
    assert is_among(pd.Series(["a"]), pd.Series([], dtype=object)).tolist() == [False]
