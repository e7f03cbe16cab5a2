"""What single requests of a run took, to be compared with those of another."""

from typing import Final

import pandas as pd

from harness.analysis.cancel_figures import latency_sample
from harness.analysis.latency import ttft_sample
from harness.analysis.stats import Floats
from harness.analysis.token_times import without_tokens
from harness.analysis.two_samples import ranked
from harness.records import Outcome

OF_EACH: Final = ("ttft_s", "e2e_s", "cancel_latency_s")


def of_each_request(requests: pd.DataFrame, cancels: pd.DataFrame) -> dict[str, Floats]:
    """By metric (those of `OF_EACH`), the values in seconds; infinite where they are censored: a
    ghost, or a user whose first token never came. E2E is of those that were completed."""
    stayed = without_tokens(requests)[requests["planned_abandon"].isna()]
    completed = stayed[stayed["outcome"] == Outcome.COMPLETED]
    took = (completed["last_token_ns"] - completed["sent_ns"]).dropna()
    return {
        "ttft_s": ranked(ttft_sample(stayed)),
        "e2e_s": took.to_numpy(dtype=float) / 1e9,
        "cancel_latency_s": ranked(latency_sample(cancels)),
    }
