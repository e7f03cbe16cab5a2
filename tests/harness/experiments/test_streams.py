"""Slots are kept full by streams that last, and by no others."""

from harness.client.live_stream import LiveStream
from harness.experiments.streams import refill
from harness.records import Way


class Filler(LiveStream):
    """`lasts_for`: tokens it has to go. `served`: it gets its first token when waited for."""

    def __init__(self, lasts_for: int = 100, *, served: bool = True, ended: bool = False) -> None:
        self.lasts_for, self.served, self.ended = lasts_for, served, ended
        self.has_left = False

    @property
    def has_ended(self) -> bool:
        return self.ended

    @property
    def tokens(self) -> int:
        return int(self.served)

    def wait_tokens(self, tokens: int, timeout_s: float | None) -> bool:
        return self.served

    def leave(self, way: Way | None = None) -> None:
        self.has_left = True


def test_streams_that_last_stay_and_all_others_are_replaced() -> None:
    lasting, near_end, ended = Filler(50), Filler(5), Filler(50, ended=True)
    new = [Filler(), Filler(served=False)]
    to_come = iter(new)
    running, waiting = refill(
        [lasting, near_end, ended],
        3,
        start=lambda: next(to_come),
        lasts=lambda one: isinstance(one, Filler) and one.lasts_for > 10,
        longest_s=1.0,
    )
    assert running == [lasting, new[0]]
    assert waiting == [new[1]]
    assert [one.has_left for one in (lasting, near_end, *new)] == [False, True, False, True]


def test_more_streams_than_wanted_are_left_to_the_caller() -> None:
    fillers = [Filler(), Filler()]
    running, waiting = refill(fillers, 1, start=Filler, lasts=lambda _: True, longest_s=1.0)
    assert (running, waiting) == (fillers, [])
    assert not any(one.has_left for one in fillers)


def test_where_a_leave_stops_the_server_an_answer_that_nears_its_end_is_not_left() -> None:
    near_end, ended = Filler(5), list[LiveStream]()
    refill([near_end], 1, start=Filler, lasts=lambda _: False, longest_s=1.0, retire=ended.append)
    assert (ended, near_end.has_left) == ([near_end], False)


def test_a_stream_that_nears_its_end_while_others_are_retired_is_replaced_too() -> None:
    near_end, lasting, ended = Filler(5), Filler(50), list[LiveStream]()

    def retire(one: LiveStream) -> None:
        ended.append(one)
        lasting.lasts_for = 5

    running, _ = refill(
        [near_end, lasting],
        2,
        start=Filler,
        lasts=lambda one: isinstance(one, Filler) and one.lasts_for > 10,
        longest_s=1.0,
        retire=retire,
    )
    assert ended == [near_end, lasting]
    assert len(running) == 2
    assert lasting not in running
