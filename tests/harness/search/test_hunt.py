"""What the hunt makes of a schedule that breaks something: its rate, its control, its size."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import msgspec
import pytest

from harness.experiments.outcome import CannotDecideError
from harness.records import Way
from harness.search.broken import Added, Broken, Violation
from harness.search.grammar import Offered
from harness.search.hunt import Hunt
from harness.search.schedule import Schedule
from harness.store.search_result import SearchFinding

OFFERED = Offered(
    slots=4,
    chunks=(64,),
    long_prompt=128,
    longest_prompt=128,
    long_answer=100,
    features=frozenset(),
    ways=(Way.FIN,),
    fan_out=2,
)
Wrong = Callable[[Schedule], bool]


class MadeUpServer:
    """It holds a slot after a schedule that is `wrong`, and has grown when as many clients as
    `grows_after` have left since its start. A schedule takes `play_s` seconds."""

    is_fresh = True

    def __init__(self, wrong: Wrong, grows_after: float = inf, play_s: float = 1) -> None:
        self.wrong, self.grows_after, self.play_s = wrong, grows_after, play_s
        self.left = 0
        self.now_s = 0.0
        self.starts = 0
        self.taken = Schedule(seed=0, visits=())

    def clock_s(self) -> float:
        return self.now_s

    def broken_by(self, schedule: Schedule) -> list[Violation]:
        self.now_s += self.play_s
        self.left += len(schedule.leaves)
        held = Violation(broken=Broken.HELD, said="1 of 4 slots is still held")
        return [held] if self.wrong(schedule) else []

    def breach_of(self, broken: Broken, schedule: Schedule) -> Violation | None:
        self.refresh()
        return next((one for one in self.broken_by(schedule) if one.broken is broken), None)

    def added_up(self) -> list[Violation]:
        self.now_s += 1
        grows = Violation(broken=Broken.GROWS, said="the server's process has 40 MB more")
        return [grows] if self.left >= self.grows_after else []

    def added_by(
        self,
        broken: Broken,
        schedules: Sequence[Schedule],
        doing: Callable[[str], object],
        until_s: float,
    ) -> Added | None:
        self.refresh()
        for number, schedule in enumerate(schedules, start=1):
            if self.now_s >= until_s:
                return None
            found = self.broken_by(schedule)
            if found and found[0].broken is broken:
                return Added(found[0], number)
        added = (one for one in self.added_up() if one.broken is broken)
        return Added(next(added, None), len(schedules))

    def refresh(self) -> None:
        self.starts += 1
        self.left = 0

    def as_requests(self, schedule: Schedule, seen: Violation) -> dict[str, Any]:
        return {"requests": len(schedule.visits)}


def hunted(
    wrong: Wrong, seconds: float = 300, **server_is: float
) -> tuple[list[SearchFinding], MadeUpServer]:
    server, found = MadeUpServer(wrong, **server_is), dict[int, SearchFinding]()

    def note(finding: SearchFinding) -> None:
        found[finding.number] = finding

    hunt = Hunt(
        server,
        found=note,
        played=lambda _: None,
        doing=lambda _: None,
        clock_s=server.clock_s,
    )
    assert hunt.run(OFFERED, seed=1, seconds=seconds, themes=()) == "the time was up"
    return list(found.values()), server


def test_nothing_is_found_on_a_server_that_is_right() -> None:
    found, server = hunted(lambda _: False)
    assert not found
    assert not server.starts


def test_a_request_for_several_answers_that_is_left_is_all_that_stays() -> None:
    def wrong(schedule: Schedule) -> bool:
        return any(one.n > 1 and one.leave is not None for one in schedule.visits)

    (one, *more) = hunted(wrong, 1500)[0]
    assert one.is_sure
    assert all(other.is_repeat for other in more), "the same thing is found once"
    assert one.seen_again > 0
    assert (str(one.rate), str(one.control)) == ("6 of 6", "0 of 6")
    smallest = msgspec.convert(one.schedule, Schedule)
    assert [visit.n for visit in smallest.visits] == [2]
    assert one.wire == {"requests": 1}
    assert "asks for 2 answers" in one.sentence
    assert one.sentence.endswith("then: 1 of 4 slots is still held.")


def test_only_what_the_server_took_counts_as_played() -> None:
    server, played = MadeUpServer(lambda _: False), list[Schedule]()
    hunt = Hunt(
        server,
        found=lambda _: None,
        played=played.append,
        doing=lambda _: None,
        clock_s=server.clock_s,
    )
    hunt.run(OFFERED, seed=1, seconds=3, themes=())
    assert played == [server.taken] * 3


def test_what_breaks_without_any_leave_is_no_finding_about_leaving() -> None:
    found, _ = hunted(lambda schedule: len(schedule.visits) > 2, 60)
    assert found
    assert not any(one.is_sure for one in found)
    assert all(one.control.hits for one in found)


def test_what_breaks_whoever_leaves_is_followed_twice_and_hides_nothing_after_that() -> None:
    server, found = MadeUpServer(lambda one: len(one.leaves) > 2), dict[int, SearchFinding]()
    usual, held_by = Violation(broken=Broken.LOST, said="lost"), server.broken_by
    server.broken_by = lambda schedule: [usual, *held_by(schedule)]  # type: ignore[method-assign]
    hunt = Hunt(
        server,
        found=lambda one: found.update({one.number: one}),
        played=lambda _: None,
        doing=lambda _: None,
        clock_s=server.clock_s,
    )
    hunt.run(OFFERED, seed=1, seconds=300, themes=())
    broken = Counter((one.broken, one.is_sure) for one in found.values())
    assert (broken["lost", False], broken["held", True]) == (2, 1)


def test_a_schedule_whose_texts_change_in_two_of_three_controls_counts_once() -> None:
    """Of a server whose texts change in two of three tries, two schedules are followed."""
    server, found, tries = MadeUpServer(lambda _: False), dict[int, SearchFinding](), 0
    text = Violation(broken=Broken.TEXT, said="another text")

    def broken_by(schedule: Schedule) -> list[Violation]:
        nonlocal tries
        server.now_s += 1
        tries += not schedule.leaves
        return [text] if schedule.leaves or tries % 3 else []

    server.broken_by = broken_by  # type: ignore[method-assign]
    hunt = Hunt(
        server,
        found=lambda one: found.update({one.number: one}),
        played=lambda _: None,
        doing=lambda _: None,
        clock_s=server.clock_s,
    )
    hunt.run(OFFERED, seed=1, seconds=60, themes=())
    assert [str(one.control) for one in found.values()] == ["2 of 3", "2 of 3"]


def test_what_does_not_come_back_is_said_so() -> None:
    calls = 0

    def once(_: Schedule) -> bool:
        nonlocal calls
        calls += 1
        return calls == 1

    (one,) = hunted(once, 60)[0]
    assert not one.is_sure
    assert str(one.rate) == "0 of 3"


def test_chance_is_no_finding() -> None:
    """It breaks in one play of ten, whoever leaves."""
    rng = random.Random(5)
    found, _ = hunted(lambda _: rng.random() < 0.1, 3000)
    assert len(found) > 20
    assert sum(one.is_sure for one in found) <= 2


def test_what_is_known_is_kept_when_the_server_is_of_no_more_use() -> None:
    server, found = MadeUpServer(lambda one: bool(one.leaves)), dict[int, SearchFinding]()

    def refresh() -> None:
        server.starts += 1
        if server.starts == 5:
            raise CannotDecideError("it does not start any more")

    server.refresh = refresh  # type: ignore[method-assign]
    hunt = Hunt(
        server,
        found=lambda one: found.update({one.number: one}),
        played=lambda _: None,
        doing=lambda _: None,
        clock_s=server.clock_s,
    )
    with pytest.raises(CannotDecideError, match="does not start any more"):
        hunt.run(OFFERED, seed=1, seconds=300, themes=())
    assert [(str(one.rate), one.is_sure) for one in found.values()] == [("3 of 3", False)]


def test_what_adds_up_over_many_schedules_is_found_without_a_small_one() -> None:
    found, _ = hunted(lambda _: False, 30, grows_after=40)
    (one,) = found
    assert (one.broken, one.is_sure) == ("grows", True)
    assert (str(one.rate), str(one.control)) == ("3 of 3", "0 of 3")
    assert 1 < one.in_a_row <= 24
    assert not one.schedule
    assert "in a row" in one.sentence


def test_one_of_a_row_that_breaks_nothing_again_gives_way_to_the_whole_row() -> None:
    found, _ = hunted(lambda _: False, 30, grows_after=2)
    one = found[0]
    assert (str(one.rate), str(one.control), one.is_sure) == ("3 of 3", "0 of 3", True)
    assert (one.in_a_row, one.schedule, one.wire) == (24, {}, {})
    assert one.sentence.startswith("24 schedules in a row")


def test_memory_that_is_lost_once_and_cannot_be_tried_again_is_no_sure_finding() -> None:
    server, found = MadeUpServer(lambda _: False), dict[int, SearchFinding]()
    server.is_fresh = False
    lost = Violation(broken=Broken.MEMORY, said="3 of 4 contexts fit")
    server.added_up = lambda: [lost]  # type: ignore[method-assign]
    hunt = Hunt(
        server,
        found=lambda one: found.update({one.number: one}),
        played=lambda _: None,
        doing=lambda _: None,
        clock_s=server.clock_s,
    )
    hunt.run(OFFERED, seed=1, seconds=5, themes=())
    (one,) = found.values()
    assert not one.is_sure
    assert one.sentence.endswith("It was seen once, and cannot be tried again without --restart.")


def test_what_grows_without_leaves_is_no_finding_and_one_try_of_each_shows_it() -> None:
    (one,) = hunted(lambda _: False, 30, grows_after=0)[0]
    assert not one.is_sure
    assert (str(one.rate), str(one.control)) == ("1 of 1", "1 of 1")


@pytest.mark.parametrize(
    ("play_s", "rates"),
    [
        (8, ("3 of 3", "0 of 3")),
        (20, ("2 of 2", "0 of 1")),
        (30, ("1 of 1", "0 of 1")),
        (50, ("0 of 0", "0 of 0")),
    ],
)
def test_a_row_that_is_not_played_to_its_end_is_no_try(
    play_s: float, rates: tuple[str, str]
) -> None:
    """Half an hour is left for six tries of 24 schedules, and 15 minutes for the first."""
    found, server = hunted(lambda _: False, 24 * play_s, grows_after=40, play_s=play_s)
    (one,) = found
    is_sure = rates[0] == "3 of 3"
    assert (str(one.rate), str(one.control), one.is_sure) == (*rates, is_sure)
    assert one.sentence.endswith("before it could be tried often enough.") is not is_sure
    assert server.now_s <= 24 * play_s + 1800 + play_s + 1


@pytest.mark.parametrize(
    ("play_s", "rates", "is_sure"),
    [
        (60, ("6 of 6", "0 of 6"), True),  # 18 tries, longer than 15 minutes
        (160, ("5 of 5", "0 of 0"), False),  # half an hour after the search's own time
        (220, ("3 of 3", "0 of 2"), False),  # 15 minutes for the first tries
    ],
)
def test_a_schedule_is_tried_as_long_as_there_is_time(
    play_s: float, rates: tuple[str, str], is_sure: bool
) -> None:
    found, server = hunted(lambda one: bool(one.leaves), 30, play_s=play_s)
    (one,) = found
    assert (str(one.rate), str(one.control), one.is_sure) == (*rates, is_sure)
    assert one.sentence.endswith("before it could be tried often enough.") is not is_sure
    assert server.now_s <= 30 + 1800 + play_s


def test_a_slot_in_twenty_leaves_is_found_though_no_schedule_alone_loses_one() -> None:
    """The schedule that met the twentieth leave breaks nothing on a fresh server."""
    server, found = MadeUpServer(lambda _: False), dict[int, SearchFinding]()
    server.wrong = lambda schedule: server.left // 20 > (server.left - len(schedule.leaves)) // 20
    hunt = Hunt(
        server,
        found=lambda one: found.update({one.number: one}),
        played=lambda _: None,
        doing=lambda _: None,
        clock_s=server.clock_s,
    )
    hunt.run(OFFERED, seed=1, seconds=200, themes=())
    sure = [one for one in found.values() if one.is_sure]
    assert sure
    assert any(one.in_a_row > 1 or len(one.schedule["visits"]) >= 20 for one in sure)


def test_what_is_made_too_small_by_chance_is_kept_as_it_was_drawn() -> None:
    """A single visit breaks it once, and no more."""
    seen = Counter[int]()

    def wrong(schedule: Schedule) -> bool:
        size = len(schedule.visits)
        seen[size] += bool(schedule.leaves)
        return bool(schedule.leaves) and (size > 3 or seen[size] == 1)

    found, _ = hunted(wrong, 150)
    assert [one for one in found if one.is_sure and len(one.schedule["visits"]) > 3]
