"""Which of two runs does better at a figure: the candidate, the baseline, or nobody for certain.

Judged is what the server does, not how fast its machine is. Of a time a part waits for steps of the
engine and a part does not (a socket, a process that is told), and nobody knows how large each is.
Where they are as large in both runs and only the steps differ, the truth lies between the ratio as
measured and the ratio in steps: the first blames whose steps are longer, the second praises it, and
more so the less of the time waits for steps. So where the steps are known, a time is surely better
or worse only where it is so by both.

What ought to be nothing and is counted, not sampled, is certain.
"""

from enum import StrEnum
from typing import Final

from harness.analysis.figure_pairs import Limits, Pair


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
    signs = _signs(pair, pair.difference)
    if signs not in ({1}, {-1}):
        return Standing.UNSURE
    is_better = (signs == {1}) == (pair.metric in MORE_IS_BETTER)
    return Standing.BETTER if is_better else Standing.WORSE


def is_sure(pair: Pair) -> bool:
    """Does either of the two surely do better?"""
    return standing(pair) in (Standing.BETTER, Standing.WORSE)


def _signs(pair: Pair, difference: float) -> set[int]:
    """By each way to look at it: 1, the candidate surely has more; -1, less; 0, nobody knows."""
    if pair.metric in COUNTED:
        return {_sign((difference, difference), 0.0)}
    signs = {_sign(pair.difference_ci95, 0.0)}
    if pair.ratio_in_steps is not None:
        signs.add(_sign(pair.ratio_in_steps_ci95, 1.0))
    return signs


def _sign(limits: Limits | None, even: float) -> int:
    """On which side of even the whole interval lies; 0 where it holds it, or is not known."""
    if limits is None:
        return 0
    return (limits[0] > even) - (limits[1] < even)
