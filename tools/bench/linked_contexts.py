"""How long after its frontend's stop a leaf hears, in a chain of three processes."""

from collections.abc import Iterable
from statistics import quantiles

from tools.bench.ratio import BenchRatio, share, within
from tools.side_by_side.dynamo_scenarios import cancels

MEDIAN_MS, P99_MS = 2.0, 5.0


def linked_contexts(*, quick: bool = False) -> Iterable[BenchRatio]:
    """The control does not pass its context on: its leaf hears a generator's close later, which is
    up to two items of 5 ms.
    """
    took = cancels("reference_engine.dynamo", quick=quick)
    linked, control = took["passes"], took["passes not"]
    yield within("a linked leaf hears: median", "ms", linked, MEDIAN_MS)
    yield within("a linked leaf hears: p99", "ms", quantiles(linked, n=100)[-1:], P99_MS)
    yield share("a leaf that is not linked", "ms", control, linked)
