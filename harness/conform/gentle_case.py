"""The one case of `walkaway conform --gentle`; what watches is in gently.py."""

from typing import Final

from harness.conform.case import ABORT, Case, never_checked
from harness.store.conform_result import Level

GENTLE_ID: Final = "gentle/stops"
GENTLE_S: Final = 300.0  # where no time is named


def gentle_case(max_seconds: float) -> Case:
    """This case stands alone: it is not among the cases of a suite."""
    return Case(
        id=GENTLE_ID,
        level=Level.MUST,
        requirement="A server in use lets go of streams whose clients leave.",
        wire="One or two streams begin, run for a random time and leave, again and again. Never "
        "more than two, or 1 % of the slots, run at once.",
        passes="the memory that the server shows as held falls by what each leaving stream held; "
        "where that is not shown: averaged over the leaves, its gauge of requests (without one: "
        "another stream's pace) shows that they are gone; no more than 0.3 % of them are "
        "surely forgotten",
        methods="G",
        check=never_checked,
        needs=frozenset(),
        quick=False,
        caught=(),
        why="A server in use cannot be filled to find out; its users cancel out in the average.",
        limit_s=max_seconds,
        remedy=ABORT,
    )
