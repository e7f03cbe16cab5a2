"""Ids of requests, by the million: pandas' own `isin` makes a Python object of each that is asked
for."""

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from harness.analysis.stats import Bools


def is_among(ids: pd.Series, known: pd.Series | pd.Index) -> Bools:
    """Whether each of the ids is one of the known; what is null is not."""
    values = pa.array(known, type=pa.string(), from_pandas=True)
    asked = pa.array(ids, type=pa.string(), from_pandas=True)
    found: Bools = pc.is_in(asked, value_set=values, skip_nulls=True).to_numpy(zero_copy_only=False)
    return found
