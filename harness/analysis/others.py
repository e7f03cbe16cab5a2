"""Was somebody else on the server while the load ran? Then its totals are not this run's alone.

A lifecycle log names every request. Without one, several counters that all tell more than is due
say it: a counter that counts wrongly does so alone.
"""

from collections.abc import Iterable
from typing import Final

from harness.analysis.frames import RunFrames

FEWEST_GROSS: Final = 2  # counters
_SO: Final = "gauges and counters are not this run's alone, and no counter is judged"


def foreign_requests(frames: RunFrames) -> int:
    """How many requests the lifecycle log tells of that no process of this load sent.

    An id is the process's tag, the user and a number: a request whose row was lost has its tag.
    """
    log = frames.lifecycle
    arrived = log.loc[log["event"] == "arrived", "client_request_id"]
    tags = set(frames.requests["request_id"].map(_tag))
    return int((~arrived.fillna("").map(_tag).isin(tags)).sum())


def somebody_else(frames: RunFrames, too_high: Iterable[str]) -> str | None:
    """What is to be said of other users; None where there is no sign of them. `too_high`: names of
    the counters that told more than is due."""
    if foreign := foreign_requests(frames):
        return f"somebody else used the server while the load ran (requests: {foreign}): {_SO}"
    names = list(too_high)
    if len(names) >= FEWEST_GROSS:
        return (
            f"{', '.join(names)} all told more than this run's clients caused: somebody else seems "
            f"to have used the server; {_SO}"
        )
    return None


def _tag(request_id: str) -> str:
    return request_id.rsplit("-", 2)[0]
