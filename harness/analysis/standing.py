"""Which of two runs does better at a figure: the candidate, the baseline, or nobody for certain.

Judged is what the server does, not how fast its machine is: a time is judged in steps of each
engine where they are known. What ought to be nothing and is counted, not sampled, is certain.
"""

from enum import StrEnum
from typing import Final

from harness.analysis.figure_pairs import Pair


class Standing(StrEnum):
    """The candidate against the baseline."""

    BETTER = "better"
    WORSE = "worse"
    UNSURE = "no sure difference"
    NOT_COMPARED = "not compared"
    NOT_JUDGED = "not judged"


MORE_IS_BETTER: Final = frozenset(
    {
        "removed_at_first_boundary",
        "refilled_next_schedule",
        "throughput_tps",
        "goodput_rps",
        "cached_again",
    }
)
# More of it is neither: slots are also full of ghosts, and a control waits for whom it waits for.
NEITHER: Final = frozenset({"slot_utilisation", "probe_ttft_control_s", "attempts_per_answer"})
COUNTED: Final = frozenset({"leaked_slots", "leaked_blocks"})


def standing(pair: Pair) -> Standing:
    """Where the interval leaves out "no difference", the direction of the figure decides."""
    if pair.note is not None or pair.difference is None:
        return Standing.NOT_COMPARED
    if pair.metric in NEITHER:
        return Standing.NOT_JUDGED
    change = _sure_change(pair, pair.difference)
    if not change:
        return Standing.UNSURE
    is_better = (change > 0) == (pair.metric in MORE_IS_BETTER)
    return Standing.BETTER if is_better else Standing.WORSE


def _sure_change(pair: Pair, difference: float) -> float:
    """Above 0: the candidate surely has more; below 0: less; 0: nobody knows."""
    if pair.metric in COUNTED:
        return difference
    limits, even = pair.difference_ci95, 0.0
    if pair.ratio_in_steps_ci95 is not None:
        limits, even = pair.ratio_in_steps_ci95, 1.0
    if limits is None or limits[0] <= even <= limits[1]:
        return 0.0
    return limits[0] - even
