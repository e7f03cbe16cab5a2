"""What one try behind full slots leaves for the next."""

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.client.live_stream import LiveStream
from harness.experiments.filling import Filling
from harness.experiments.full_slots import FullSlots, SlotTry
from harness.experiments.holds import Leaver
from harness.experiments.idle_server import ServerFacts
from harness.experiments.patience import Patience
from harness.experiments.streams import Streams

STEP_S = 0.02


class Showing(Filling):
    def steps_now(self, steps: int = 0) -> list[float]:
        return [STEP_S, STEP_S]


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

    def one_try(self, stall_s: float) -> None:
        self.stall_s = stall_s
        leaver: Any = SimpleNamespace(has_ended=False, row=None)
        way: Any = SimpleNamespace(leave=lambda _: None)
        self._leave_and_time(cast(Leaver, way), [leaver], [cast(LiveStream, _probe())])

    @property
    def waits_for_fillers(self) -> bool:
        joined: list[float] = []
        filler: Any = SimpleNamespace(has_ended=False, join=joined.append, leave=lambda: None)
        self._filling.retire(filler)
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
        ttft_s=STEP_S,
        together=lambda acts: [act() for act in acts],
        ghosts=lambda: 0,
    )
    return Tried(cast(Streams, streams), Showing(cast(Streams, streams)), random.Random(0))


def test_a_single_hiccup_does_not_make_the_streams_that_stay_wait_for_their_ends() -> None:
    slots = full_slots()
    for stall_s in (0.9, 0.9):
        slots.one_try(stall_s)
        assert slots.waits_for_fillers
    slots.one_try(0.0)
    assert not slots.waits_for_fillers
    slots.one_try(0.9)
    slots._filling.begin_case()
    assert not slots.waits_for_fillers


class Refilled(Filling):
    filled = 0

    def fill(self, streams: int | None = None) -> list[LiveStream]:
        self.filled = streams or 0
        return []

    def steps_now(self, steps: int = 0) -> list[float]:
        return [STEP_S, STEP_S]


@pytest.mark.parametrize(("has_ended", "filled"), [(True, 2), (False, 0)])
def test_steps_are_those_of_streams_that_still_run(*, has_ended: bool, filled: int) -> None:
    facts = ServerFacts(4, STEP_S, STEP_S, None)
    fillers = [SimpleNamespace(has_ended=False), SimpleNamespace(has_ended=has_ended)]
    streams: Any = SimpleNamespace(
        fillers=fillers, facts=facts, step_s=STEP_S, pause=lambda _: None
    )
    filling = Refilled(cast(Streams, streams))
    assert filling.steps_at_rest() == [STEP_S, STEP_S]
    assert filling.filled == filled


def waiting_probe(slots: Tried, *, served: bool, others: int) -> None:
    """It got no slot in the try; and, if `served`, one of those of the `others`."""
    left = [SimpleNamespace(has_ended=False, leave=lambda: None) for _ in range(others)]
    slots._streams.fillers = cast(list[LiveStream], left)
    probe: Any = SimpleNamespace(tokens=0)

    def wait_tokens(_tokens: int, _longest_s: float) -> None:
        probe.tokens = int(served)

    probe.wait_tokens = wait_tokens
    slots._waiting = [probe]


def test_a_probe_that_gets_no_slot_of_any_stream_meets_a_server_that_does_not_stop() -> None:
    slots = full_slots()
    waiting_probe(slots, served=False, others=3)
    after = slots.others_leave()
    assert after is not None
    assert after[0] == 3
    assert not slots._streams.fillers
    waiting_probe(slots, served=True, others=3)
    assert slots.others_leave() is None


def test_slots_are_one_pool_when_each_of_six_served_what_queued() -> None:
    slots, facts = full_slots(), ServerFacts(4, STEP_S, STEP_S, None)
    seen = []
    for is_lost in (*[False] * 6, True, True):
        slots._note_hand_over(is_lost=is_lost)
        seen.append((slots.are_one_pool, slots.can_judge(facts) is None))
    assert seen == [(False, True)] * 5 + [(True, True), (False, True), (False, False)]


def test_two_of_a_hundred_hand_overs_that_are_lost_do_not_end_the_judging_by_full_slots() -> None:
    slots, facts = full_slots(), ServerFacts(4, STEP_S, STEP_S, None)
    for is_lost in (*[False] * 98, True, True):
        slots._note_hand_over(is_lost=is_lost)
    assert slots.can_judge(facts) is None
