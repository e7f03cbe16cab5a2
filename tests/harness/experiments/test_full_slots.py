"""What one try behind full slots leaves for the next."""

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

from harness.client.live_stream import LiveStream
from harness.experiments.full_slots import FullSlots, SlotTry
from harness.experiments.holds import Leaver
from harness.experiments.idle_server import ServerFacts
from harness.experiments.patience import Patience
from harness.experiments.streams import Streams

STEP_S = 0.02


class Tried(FullSlots):
    """`stall_s`: of the next try."""

    stall_s = 0.0

    def time_probes(
        self,
        probes: Sequence[LiveStream],
        since: Callable[[], Sequence[int | None]],
        *,
        idle_s: float | None = None,
    ) -> list[SlotTry]:
        return [SlotTry(0.02, 0.04, 1, self.stall_s)]

    def steps_now(self, steps: int = 0) -> list[float]:
        return [STEP_S, STEP_S]

    def one_try(self, stall_s: float) -> None:
        self.stall_s = stall_s
        leaver: Any = SimpleNamespace(has_ended=False, row=None)
        way: Any = SimpleNamespace(leave=lambda _: None)
        self._leave_and_time(cast(Leaver, way), [leaver], [cast(LiveStream, _probe())])

    @property
    def waits_for_fillers(self) -> bool:
        joined: list[float] = []
        filler: Any = SimpleNamespace(has_ended=False, join=joined.append, leave=lambda: None)
        self._retire(filler)
        return bool(joined)


def _probe() -> SimpleNamespace:
    return SimpleNamespace(tokens=0)


def full_slots() -> Tried:
    streams: Any = SimpleNamespace(
        slots=4,
        step_s=STEP_S,
        facts=ServerFacts(4, STEP_S, STEP_S, None),
        patience=Patience(2.0, 200, 2.0, 2.1),
        tokens_left=lambda _: 50,
    )
    return Tried(cast(Streams, streams), random.Random(0))


def test_a_single_hiccup_does_not_make_the_streams_that_stay_wait_for_their_ends() -> None:
    slots = full_slots()
    for stall_s in (0.9, 0.9):
        slots.one_try(stall_s)
        assert slots.waits_for_fillers
    slots.one_try(0.0)
    assert not slots.waits_for_fillers
    slots.one_try(0.9)
    slots.begin_case()
    assert not slots.waits_for_fillers
