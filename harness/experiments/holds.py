"""The seam between the ways to see whether a server stops and the judge of their figures.

A way makes clients leave and finds out how long the server held what they had. It fills the slots
and sends a probe, is admitted where a request was refused, or watches a gauge, another stream's
pace, or the processor. Its controls do the same with answers that end by themselves. Tries and
controls take turns, so that a machine that becomes slower does so in both.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from harness.client.live_stream import LiveStream
from harness.experiments.idle_server import ServerFacts
from harness.experiments.outcome import CannotDecideError
from harness.store.conform_result import JudgingWay
from harness.workload.abandon import RequestSpec

_LEAST_AGAIN_S: Final = 0.5
_AGAIN: Final = 4  # times the slowest control


class Leaver(NamedTuple):
    """How a stream comes and goes. `begin` starts it. `ready` waits until it may leave, and gets
    the number of the try. `leave` is the act; the stream's `abandoned_ns` is t0. `is_early`: it
    may leave before its first token. `is_alone`: streams of its kind cannot leave by the dozen.
    `is_heavy`: other streams stand still for what it asks, whether it leaves or not."""

    spec: RequestSpec
    begin: Callable[[RequestSpec], LiveStream]
    ready: Callable[[LiveStream, int], object]
    leave: Callable[[LiveStream], object]
    is_early: bool = False
    is_alone: bool = False
    is_heavy: bool = False


class Holds(NamedTuple):
    """Figures of one way, in seconds.

    `tries_s`: from each leave until what the client had was free; None: not within `waited_s`.
    `controls_s`: the same for answers that ended by themselves. `floor_s`: what this way cannot
    see below. `natural_s`: how long the streams that left would have run on; None: not known.
    `stalls_s`, `control_stalls_s`: the longest gap of a stream that stayed, in each try and in each
    control; empty where no stream stayed. `cuts`, `control_cuts`: how streams that stayed were cut
    as others left, and as answers ended. `is_one_try`: what one leave should have freed never came
    free, and what other leaves should have freed did.
    """

    way: JudgingWay
    tries_s: Sequence[float | None]
    controls_s: Sequence[float]
    floor_s: float
    waited_s: float = 0.0
    natural_s: float | None = None
    stalls_s: Sequence[float] = ()
    control_stalls_s: Sequence[float] = ()
    cuts: Sequence[str] = ()
    control_cuts: Sequence[str] = ()
    is_one_try: bool = False


def wait_again_s(controls_s: Sequence[float], usual_s: float) -> float:
    """How long a second hold without an end is waited for, if the first one was for `usual_s`."""
    return min(usual_s, max(_LEAST_AGAIN_S, _AGAIN * max(controls_s, default=0.0)))


def has_no_end(tries_s: Sequence[float | None]) -> bool:
    """Whether the last two holds had no end, for ways that see another load, too: one alone may be
    that load's. Raises CannotDecideError if the last one had an end, and the one before had none.
    """
    if len(tries_s) < 2 or tries_s[-2] is not None:
        return False
    if tries_s[-1] is not None:
        raise CannotDecideError(
            "what one leave should have freed did not come free in time, and what the next one "
            "should have freed did: another load may have been there"
        )
    return True


class Watcher(Protocol):
    """One way to see whether a server stops.

    `can_judge`: why it cannot judge this server; None if it can. `holds` raises CannotDecideError
    where something got in its way.
    """

    @property
    def way(self) -> JudgingWay: ...

    def can_judge(self, facts: ServerFacts) -> str | None: ...

    def holds(self, leaver: Leaver, tries: int) -> Holds: ...
