"""How much a load may ask of the machine that it runs on: what is beyond is a slip of the finger.

Who means it raises the cap, and is told what that costs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from harness.workload.arrivals import AnyArrivals, ClosedArrivals, OpenArrivals, RateSettings
from harness.workload.load import (
    AbandonSettings,
    CancelStormSettings,
    ChunkFrontierSettings,
    LoadSettings,
    SlotRecoverySettings,
)

USUAL_STREAMS: Final = 10_000
USUAL_RATE: Final = 10_000.0
_STREAM_COSTS: Final = (
    "each takes a file handle and some 20 KiB of memory in its load process, and 25 bytes for each "
    "token of its answer"
)
_RATE_COSTS: Final = "each takes a port of this host, which may be free again only a minute after"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """At most so many streams at once, and so many arrivals a second."""

    most_streams: int
    most_rate: float


def caps_problem(
    caps: Caps, load: LoadSettings, arrivals: AnyArrivals, *, users: int
) -> str | None:
    """Which cap this load does not keep to, what raises it, and what that costs; None: it does."""
    for keys, streams in _streams_at_once(load, arrivals, users).items():
        if streams > caps.most_streams:
            return (
                f"{keys} come to {streams:,} streams at once, more than `run.most_streams`, "
                f"{caps.most_streams:,}; --set run.most_streams={streams} raises it: "
                f"{_STREAM_COSTS}"
            )
    if isinstance(arrivals, RateSettings) and arrivals.highest_rate > caps.most_rate:
        return rate_problem(arrivals.highest_rate, caps.most_rate)
    return None


def streams_of_each(
    load: LoadSettings, arrivals: AnyArrivals, *, users: int, processes: int
) -> int:
    """How many streams a load process may have open at once; 0 where that is not known yet."""
    (streams,) = _streams_at_once(load, arrivals, users).values()
    return -(-streams // processes)


def rate_problem(rate: float, most_rate: float) -> str:
    """The words for so many arrivals a second, which are too many."""
    return (
        f"`arrivals` bring up to {rate:,.0f} requests a second, more than `run.most_rate`, "
        f"{most_rate:,.0f}; --set run.most_rate={rate:.0f} raises it: {_RATE_COSTS}"
    )


def _streams_at_once(load: LoadSettings, arrivals: AnyArrivals, users: int) -> Mapping[str, int]:
    """How many streams may be open at the same time, by the keys that say it."""
    if isinstance(arrivals, OpenArrivals):
        return {"`arrivals.max_streams`": arrivals.max_streams}
    assert isinstance(arrivals, ClosedArrivals)
    match load:
        case AbandonSettings():
            return {"`run.users`": users}
        case CancelStormSettings(streams=streams, stayers=stayers):
            return {"`load.streams` + `load.stayers`": streams + stayers}
        case ChunkFrontierSettings(bystanders=bystanders):
            return {"`load.bystanders`": bystanders}
        case SlotRecoverySettings(slots=slots):
            return {"`load.slots`": slots or 0}
