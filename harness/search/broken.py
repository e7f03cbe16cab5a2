"""Which invariant is broken, and what was seen of it."""

from enum import StrEnum
from typing import Any, NamedTuple

import msgspec


class Broken(StrEnum):
    """The worst first."""

    DEAD = "dead"
    WEDGED = "wedged"
    LOST = "lost"  # slots, or requests by a gauge, after every answer must have ended
    HELD = "held"  # the same after the settle time
    CUT = "cut"  # an answer whose client stays
    HUNG = "hung"
    TEXT = "text"
    LENGTH = "length"
    MEMORY = "memory"  # for KV: fewer contexts fit
    GAUGES = "gauges"
    COUNTERS = "counters"
    LOG = "log"
    HANDLES = "handles"
    GROWS = "grows"  # the memory of the process
    SLOW = "slow"


# Of the evidence: how it was seen what is held, and how long a gauge was waited for.
WAY, WAITED_S = "way", "waited_s"

# Looked at after many schedules: each takes long, or says nothing after one.
ADDS_UP = (Broken.MEMORY, Broken.GROWS)


class Violation(msgspec.Struct, frozen=True, kw_only=True):
    broken: Broken
    said: str
    evidence: dict[str, Any] = {}


class Added(NamedTuple):
    """What was seen of one invariant when schedules were played in a row, and after which of them,
    counted from 1."""

    seen: Violation | None
    after: int
