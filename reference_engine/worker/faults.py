"""How an aborted request is let go: as it ought to be, or as the faults in force will have it."""

from collections.abc import Iterable
from random import Random

from reference_engine.core.accounting import Families
from reference_engine.core.request import FinishReason
from reference_engine.core.scheduler import CORRECT, Release
from reference_engine.faults import Faults


def release_for(reason: FinishReason, faults: Faults) -> Release:
    """What the scheduler is told about an ending; faults touch aborts only."""
    if reason is not FinishReason.ABORT:
        return CORRECT
    return Release(
        num_leaked=faults.leak_blocks,
        leaks_slot=faults.leak_slot,
        is_held_back=faults.hold_blocks > 0,
        drops_prefix=faults.drop_prefix_on_cancel,
        times=0 if faults.never_count else 2 if faults.double_count else 1,
    )


def abort_targets(name: str, live: Iterable[str], families: Families, faults: Faults) -> list[str]:
    """The ids of the requests that an abort of `name` ends, of those that are `live`."""
    targets = families.members(name)
    if faults.abort_parent_only:
        targets = targets[:1]
    if faults.abort_by_prefix:
        targets = [request_id for request_id in live if request_id.startswith(name)]
    return targets


def is_lost(faults: Faults, random: Random) -> bool:
    """Whether an abort is forgotten. Draws a number only where a fault says so."""
    return faults.lose_abort > 0 and random.random() < faults.lose_abort
