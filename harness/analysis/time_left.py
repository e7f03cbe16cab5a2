"""How much a request had left to run when its user left: who would soon have ended anyway tells
little about cancelling, and the run says so.
"""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from harness.analysis.facts import Facts
from harness.analysis.frames import RunFrames
from harness.analysis.held_open import RACE
from harness.analysis.scraped import typical_step_s
from harness.analysis.token_times import without_tokens
from harness.records import Outcome


def too_little_left(frames: RunFrames, cancels: pd.DataFrame, facts: Facts) -> Iterator[str]:
    """An abandoned request must have had twice the settle time left to run on its own; those who
    race for the last token have not, by their plan."""
    step_s = typical_step_s(frames)
    watched = cancels[cancels["plan"] != RACE]
    if watched.empty or step_s is None or not np.isfinite(facts.settle_s):
        return
    at_t0 = watched["generated_tokens"] - watched["wasted_after_close_tokens"]
    at_t0 = at_t0.astype(float).fillna(watched["tokens_read"])
    left_s = (watched["max_tokens"] - at_t0) * step_s
    short = int((left_s < 2 * facts.settle_s).sum())
    if short:
        yield (
            f"{short} of {len(watched)} abandoned requests had less than twice the settle time "
            f"({facts.settle_s:g} s) left to run: a ghost among them cannot be told from a natural "
            f"end; {_remedy(frames, step_s, facts.settle_s)}"
        )


def _remedy(frames: RunFrames, step_s: float, settle_s: float) -> str:
    """Longer answers, where the model's context holds any that are long enough."""
    config = (frames.manifest.get("target") or {}).get("config") or {}
    context = config.get("max_model_len")
    if context is None:
        return "raise `answer_tokens` if the model's context allows it, else lower `settle.seconds`"
    room_s = (context - frames.requests["prompt_tokens"].fillna(0).max()) * step_s
    if room_s >= 2 * settle_s:
        return "raise `answer_tokens`, or lower `settle.seconds`"
    return (
        f"longer answers do not help, since a whole context of {context} tokens takes "
        f"{context * step_s:.3g} s: lower `settle.seconds`, if the server lets go in less"
    )


def race_account(requests: pd.DataFrame, cancels: pd.DataFrame, facts: Facts) -> Iterator[str]:
    """How those fared who raced for the last token, if anybody did."""
    raced = without_tokens(requests)[requests["plan"] == RACE]
    late = int((raced["outcome"] == Outcome.COMPLETED).sum())
    left = cancels[cancels["plan"] == RACE]
    if not late and left.empty:
        return
    who = f"of {late + len(left)} who raced for the last token"
    if not facts.has_lifecycle or not facts.clocks_agree:
        yield (
            f"{who}, {late} had read the whole answer; of the {len(left)} who left this server "
            "does not tell which it had finished by then"
        )
        return
    is_cancelled = left["finish_reason"] == "abort"
    was_over = (left["removed_ns"] <= left["t0_ns"]).fillna(value=False).astype(bool)
    yield (
        f"{who}, {int(is_cancelled.sum())} were cancelled, "
        f"{int((~is_cancelled & ~was_over).sum())} left before the server had finished and were "
        f"not (the last token was being made), {int((~is_cancelled & was_over).sum())} left after "
        f"it had finished, and {late} had read the whole answer"
    )
