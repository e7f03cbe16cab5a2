"""A try begins on a server as at the beginning; where that cannot be, it says why."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness.client.wire_log import WireLog
from harness.conform.bench import Bench
from harness.experiments.outcome import CannotDecideError
from harness.search.broken import Broken, Violation
from harness.search.invariants import Invariants
from harness.search.keeper import ServerKeeper
from harness.search.play import Played
from harness.search.schedule import Leave, Schedule, Visit
from harness.search.trial import BREACH_LOG, Trial
from harness.store.conform_result import Aftermath

SCHEDULE = Schedule(seed=1, visits=(Visit(leave=Leave()),))


class MadeUp:
    """A server with four slots, `running` of which are free at each look; what the invariants find
    after each play."""

    def __init__(self, folder: Path, *, can_start: bool = False, **more: Any) -> None:
        self.running: list[int] = more.get("running", [4])
        self.ghosts: int = more.get("ghosts", 1)
        self.serves: bool = more.get("serves", True)
        self.aftermath: tuple[Aftermath, str] = more.get("aftermath", (Aftermath.DEAD, ""))
        self.finds: list[Violation | None] = []
        self.adds: list[Violation] = []
        self.acts: list[str] = []
        self.now_s = 0.0
        cleaning: Any = SimpleNamespace(
            rest=self._rest, running=None, aftermath_of_refusals=lambda: self.aftermath
        )
        self._cleaning = cleaning
        bench: Any = SimpleNamespace(
            serves=lambda: self.serves,
            cleaning=cleaning,
            facts=SimpleNamespace(can_fill=more.get("can_fill", True)),
            wait_for_ghosts=lambda _: self.acts.append("wait"),
            slots=4,
            settle_s=10.0,
            pause=self._pause,
            ghosts=lambda: self.ghosts,
            forget=lambda: None,
            forget_ghosts=lambda: None,
        )
        keeper: Any = SimpleNamespace(can_start=can_start, start=lambda: self.acts.append("start"))
        invariants: Any = SimpleNamespace(
            begin=lambda: self.acts.append("begin"),
            before=lambda: None,
            broken_by=lambda _: [],
            end=lambda: None,
            breach_of=lambda *_: self.finds.pop(0) if self.finds else None,
            added_up=lambda: self.adds,
        )
        self.trial = PlayedNowhere(
            cast(Bench, bench),
            cast(Invariants, invariants),
            cast(ServerKeeper, keeper),
            WireLog({}),
            folder,
            clock_s=lambda: self.now_s,
        )

    def _rest(self) -> None:
        self._cleaning.running = self.running.pop(0) if len(self.running) > 1 else self.running[0]

    def _pause(self, seconds: float) -> None:
        self.now_s += seconds


class PlayedNowhere(Trial):
    """Its schedules leave an empty log."""

    def _play(self, schedule: Schedule) -> Played:
        (self._folder / "try.jsonl").write_bytes(b"")
        return Played(schedule, [], [])


def test_a_server_that_can_be_started_is_started_for_each_try(tmp_path: Path) -> None:
    made = MadeUp(tmp_path, can_start=True)
    made.trial.breach_of(Broken.HELD, SCHEDULE)
    made.trial.breach_of(Broken.HELD, SCHEDULE)
    assert made.acts == ["start", "begin", "start", "begin"]


def test_else_a_try_waits_until_all_slots_are_free(tmp_path: Path) -> None:
    made = MadeUp(tmp_path, running=[2, 3, 4])
    made.trial.refresh()
    assert made.now_s > 0
    assert made.acts == ["begin"]


def test_where_slots_cannot_be_counted_a_try_waits_until_no_answer_can_run(tmp_path: Path) -> None:
    made = MadeUp(tmp_path, can_fill=False)
    made.trial.refresh()
    assert made.acts == ["wait", "begin"]


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ({"running": [3]}, "of 4 slots only 3 came back"),
        ({"running": [3], "ghosts": 0}, "of 4 slots only 3 came back"),
        ({"serves": False}, "the server no longer serves: a command"),
        (
            {"serves": False, "aftermath": (Aftermath.REFUSING, "it may limit how much is asked")},
            "it may limit how much is asked",
        ),
    ],
)
def test_a_server_that_is_not_as_before_says_why(
    tmp_path: Path, server: dict[str, Any], said: str
) -> None:
    with pytest.raises(CannotDecideError, match=said):
        MadeUp(tmp_path, **server).trial.refresh()


def test_the_log_of_the_latest_try_that_broke_something_is_kept(tmp_path: Path) -> None:
    made = MadeUp(tmp_path, can_start=True)
    assert made.trial.breach_of(Broken.HELD, SCHEDULE) is None
    assert not (tmp_path / BREACH_LOG).exists()
    made.finds = [Violation(broken=Broken.HELD, said="held")]
    assert made.trial.breach_of(Broken.HELD, SCHEDULE) is not None
    assert (tmp_path / BREACH_LOG).exists()


def test_what_the_server_took_of_the_schedule_that_was_drawn_is_kept(tmp_path: Path) -> None:
    made = MadeUp(tmp_path, can_start=True)
    made.trial.broken_by(SCHEDULE)
    made.trial.breach_of(Broken.HELD, SCHEDULE.staying())
    assert made.trial.taken == SCHEDULE


def added(made: MadeUp, broken: Broken, schedules: Sequence[Schedule]) -> tuple[str | None, int]:
    found = made.trial.added_by(broken, schedules, lambda _: None, until_s=60.0)
    assert found is not None
    return (None if found.seen is None else found.seen.said), found.after


def test_what_adds_up_is_looked_at_after_the_last_and_all_else_after_each(tmp_path: Path) -> None:
    made = MadeUp(tmp_path, can_start=True)
    lost = Violation(broken=Broken.LOST, said="lost")
    made.finds = [None, lost]
    assert added(made, Broken.LOST, [SCHEDULE] * 3) == ("lost", 2)
    made.adds = [Violation(broken=Broken.GROWS, said="grows")]
    assert added(made, Broken.GROWS, [SCHEDULE] * 3) == ("grows", 3)
    assert added(made, Broken.MEMORY, [SCHEDULE] * 3) == (None, 3)


def test_no_schedule_of_a_row_is_played_when_the_time_is_up(tmp_path: Path) -> None:
    made, played = MadeUp(tmp_path, can_start=True), list[str]()

    def doing(what: str) -> None:
        played.append(what)
        made.now_s += 20.0

    made.adds = [Violation(broken=Broken.GROWS, said="grows")]
    assert made.trial.added_by(Broken.GROWS, [SCHEDULE] * 3, doing, until_s=40.0) is None
    assert played == ["schedule 1 of 3", "schedule 2 of 3"]
