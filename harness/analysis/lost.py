"""Who of the load was lost: processes that died, and workers whose rows nobody brought together.

Their part of an open loop's schedule is missing from the rows, which is then no sign of slowness.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.analysis.facts import Facts


def losses(manifest: Mapping[str, Any], facts: Facts) -> Iterator[str]:
    """A sentence for each process that began and did not end in good order, and one for all workers
    of whom nothing is there."""
    for one in _died(manifest):
        died_s = (one["last_seen_ns"] - facts.load_started_ns) / 1e9
        yield (
            f"{_named(one)} died {died_s:.1f} s into the load: the {one['requests']} requests that "
            f"it had written are kept, the {one['open_streams']} that it had in flight are in no "
            "figure"
        )
    if absent := _absent(manifest):
        yield (
            f"workers that had connected to the master and left nothing in the folders that were "
            f"collected: {', '.join(absent)}; what their users saw is in no figure: collect again "
            "with their folders, too (one that never began says so in its log)"
        )


def why_unsent(manifest: Mapping[str, Any]) -> str | None:
    """Who was to send what is missing from a schedule; None where nobody was lost."""
    if died := _died(manifest):
        names = ", ".join(_named(one) for one in died)
        return f"{names} died, and nobody else sends its part of the schedule: its log may tell why"
    if absent := _absent(manifest):
        return f"or their rows are in a folder that was not collected ({', '.join(absent)})"
    return None


def _died(manifest: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return [one for one in manifest.get("load_processes") or [] if one["ended_ns"] is None]


def _absent(manifest: Mapping[str, Any]) -> Sequence[str]:
    return manifest.get("absent_workers") or []


def _named(one: Mapping[str, Any]) -> str:
    return f"load process {one['worker']} (pid {one['pid']} on {one['host']})"
