"""How little a gentle watch loads, when its streams leave, and when it says what."""

import random
from typing import Any

import numpy as np
import pytest

from harness.experiments.averaged import Averaged, LeaveWindow, MeanEstimate, average
from harness.experiments.gentle_plan import (
    RISK,
    Gentle,
    GhostRate,
    StreamTurns,
    WantedPrecision,
    decide,
    drifts,
    is_due,
    is_look,
    is_seen,
    level_of,
    most_streams,
    shown_part,
)
from harness.experiments.outcome import CannotDecideError
from harness.intervals import Interval
from tests.harness.experiments.crowd import STEP_S, seeds, twin, watched

WINDOW = LeaveWindow.of(poll_s=0.02, step_s=STEP_S, after_s=1.0)
LOOKS = [8, 16, 32, 64]


def turns(**changes: Any) -> StreamTurns:
    fields = {"step_s": 0.02, "poll_s": 0.02, "settle_s": 2.0, "context": 4096}
    return StreamTurns.of(**{**fields, **changes})


@pytest.mark.parametrize(
    ("slots", "streams"), [(None, 2), (1, 2), (32, 2), (256, 2), (300, 3), (1024, 10)]
)
def test_never_more_than_two_streams_or_one_in_a_hundred(slots: int | None, streams: int) -> None:
    assert most_streams(slots) == streams


@pytest.mark.parametrize("step_s", [0.0005, 0.0016, 0.02, 0.5])
def test_a_stream_that_leaves_would_have_outlasted_its_window_even_on_a_faster_server(
    step_s: float,
) -> None:
    plan = turns(step_s=step_s, context=8192)
    rng = random.Random(1)
    for _ in range(200):
        dwell_s = plan.draw_s(rng)
        tokens = plan.tokens(dwell_s, step_s)
        assert tokens <= plan.most_tokens < 8192
        assert tokens * step_s / 1.25 - dwell_s >= plan.window.whole_after_s - 0.25 * dwell_s
        assert dwell_s > plan.window.before_s


def test_where_answers_cannot_be_that_long_less_is_looked_at_or_nothing() -> None:
    """1,500 tokens of 1 ms are gone in 1.5 s."""
    short = turns(step_s=0.001, context=2000)
    assert short.window.after_s < 2.0
    assert short.tokens(short.dwell_s.high, 0.001) <= 1500
    with pytest.raises(CannotDecideError, match="too soon to see a leave"):
        turns(step_s=0.0001, context=2000)
    with pytest.raises(CannotDecideError, match=r"readings 1\.1 s apart"):
        turns(poll_s=1.1, context=400)


def test_moments_of_leaving_are_spread_over_a_second() -> None:
    plan, rng = turns(), random.Random(1)
    drawn = [plan.draw_s(rng) for _ in range(500)]
    assert max(drawn) - min(drawn) > 0.9
    assert np.std(drawn) == pytest.approx(1 / 12**0.5, rel=0.1)


def test_the_next_streams_wait_until_those_that_left_would_have_ended() -> None:
    plan = turns()
    assert plan.next_after_s(300, 0.02, all_used=True) == pytest.approx(7.8)
    assert plan.next_after_s(300, 0.02, all_used=False) == plan.window.whole_after_s
    assert plan.next_after_s(1, 0.02, all_used=True) == plan.window.whole_after_s


def test_looks_are_few_and_their_risks_add_up() -> None:
    assert [n for n in range(1, 200) if is_look(n)] == [8, 16, 32, 64, 128]
    assert sum(1 - level_of(n) for n in range(40)) == pytest.approx(RISK)


def test_no_look_is_passed_over_or_taken_twice() -> None:
    """Some turns bring no further moment."""
    judged = [0]
    for moments in (n // 2 for n in range(1100)):
        if is_due(moments, judged[-1]):
            judged.append(moments)
    assert [n for n in judged if is_look(n)] == [8, 16, 32, 64, 128, 256, 512]


def averaged(freed: float, error: float) -> Averaged:
    return Averaged(
        leaves=30,
        streams=30,
        place_s=0.1,
        place_ci95=Interval(0.1, 0.1),
        seen_by_s=0.2,
        freed=MeanEstimate(freed, error, 30),
        at_once=MeanEstimate(freed, error, 30),
        at_last=MeanEstimate(freed, error, 30),
        control=None,
        seen=MeanEstimate(1.0, 0.05, 30),
    )


@pytest.mark.parametrize(
    ("rate", "error", "stops"),
    [
        (0.0, 0.05, True),
        (0.0, 0.4, None),
        (0.02, 0.01, True),  # decided by the rate and its interval
        (0.5, 0.05, False),
        (0.5, 0.3, None),
        (1.0, 0.1, False),
        (1.2, 0.2, False),
    ],
)
def test_a_server_stops_if_few_leaves_are_forgotten_and_not_if_many_are(
    rate: float, error: float, stops: bool | None
) -> None:
    assert decide(GhostRate.by_gauge(averaged(1 - rate, error)), 0.95) is stops


def test_by_pace_the_end_of_an_answer_is_the_measure() -> None:
    """A stream costs the twin 4 ms a token; the server lets go of half of the leaves."""
    half = GhostRate.by_pace(averaged(0.002, 0.0004), averaged(0.004, 0.0004))
    assert half.rate == pytest.approx(0.5)
    assert half.freed.error == pytest.approx(0.112, abs=0.001)


@pytest.mark.parametrize("ghosts", [0.0, 0.5, 1.0])
def test_beside_a_dozen_users_a_twins_pace_shows_the_share_of_ghosts(ghosts: float) -> None:
    """40 leaves and 40 natural ends; a stream costs the twin 1 ms of about 20."""
    window = LeaveWindow.of(poll_s=STEP_S, step_s=STEP_S, after_s=1.0, level_steps=10)
    found = []
    for rng in seeds(12):
        world = twin(rng, 40, ghosts=ghosts)
        read = (world.times_s, world.paces_s, window, rng)
        left, ended = average(world.leaves, *read), average(world.ends, *read)
        assert left is not None
        assert ended is not None
        assert ended.freed.mean == pytest.approx(0.001, abs=0.0006)
        found.append(GhostRate.by_pace(left, ended))
    assert np.median([one.rate for one in found]) == pytest.approx(ghosts, abs=0.15)
    covered = [one.interval().low <= ghosts <= one.interval().high for one in found]
    assert np.mean(covered) >= 0.85


def test_what_went_at_once_has_gone_but_what_did_not_may_have_gone_otherwise() -> None:
    """The sharper figure acquits, and never accuses."""
    surely_gone = averaged(0.9, 0.3)._replace(at_once=MeanEstimate(0.95, 0.05, 30))
    assert GhostRate.by_gauge(surely_gone).interval().high < 0.2
    some_later = averaged(1.0, 0.05)._replace(at_once=MeanEstimate(0.5, 0.02, 30))
    assert GhostRate.by_gauge(some_later).interval().low < 0
    assert decide(GhostRate.by_gauge(some_later), 0.95) is True


def test_leaves_that_are_let_go_of_later_than_most_are_not_forgotten() -> None:
    late = GhostRate.by_gauge(averaged(0.7, 0.02)._replace(at_last=MeanEstimate(1.0, 0.1, 30)))
    assert decide(late, 0.95) is True
    assert late.interval().low < 0
    never = averaged(0.7, 0.02)._replace(at_last=MeanEstimate(0.65, 0.05, 30))
    assert decide(GhostRate.by_gauge(never), 0.95) is False


@pytest.mark.parametrize(
    ("freed", "error", "stops"), [(0.5, 0.03, True), (0.5, 0.15, None), (0.1, 0.03, False)]
)
def test_a_page_of_one_of_two_replicas_accuses_by_the_beginnings_that_it_shows(
    freed: float, error: float, stops: bool | None
) -> None:
    """It shows half of our streams: all were let go of where half of the leaves are seen."""
    half = averaged(freed, error)._replace(seen=MeanEstimate(0.5, error, 30))
    assert decide(GhostRate.by_gauge(half), 0.95) is stops


def test_a_page_that_surely_shows_a_part_of_our_streams_is_named() -> None:
    whole = averaged(1.0, 0.05)
    assert shown_part(whole) is None
    assert shown_part(whole._replace(seen=None)) is None
    assert shown_part(whole._replace(seen=MeanEstimate(0.5, 0.3, 30))) is None
    assert shown_part(whole._replace(seen=MeanEstimate(0.5, 0.05, 30))) == 0.5


def test_enough_is_known_when_both_intervals_are_narrow() -> None:
    def is_met(latency: Interval, forgets: Interval) -> bool:
        return WantedPrecision().is_met(latency_s=0.2, latency=latency, ghosts=forgets, step_s=0.01)

    assert is_met(Interval(0.19, 0.22), Interval(-0.02, 0.05))
    assert not is_met(Interval(0.1, 0.3), Interval(-0.02, 0.05))
    assert not is_met(Interval(0.19, 0.22), Interval(-0.2, 0.2))


def play(ghosts: float, rng: Any, looks: list[int]) -> list[bool | None]:
    """The decisions at these looks, while a dozen users are served."""
    world = watched(rng, looks[-1], lambda: 0.013, ghosts=ghosts, streams=2, poll_s=WINDOW.poll_s)
    answers: list[bool | None] = []
    for look, moments in enumerate(looks):
        seen = average(world.leaves[:moments], world.times_s, world.values, WINDOW, rng)
        assert seen is not None
        level = level_of(look)
        is_clear = is_seen(seen, level) and not drifts(seen, level)
        answers.append(decide(GhostRate.by_gauge(seen), level) if is_clear else None)
    return answers


def test_no_good_server_is_accused_and_no_bad_one_acquitted() -> None:
    """Over 30 worlds of a dozen users: at the fourth look nearly all are decided, and rightly."""
    for ghosts, right in ((0.0, True), (1.0, False)):
        played = [play(ghosts, rng, LOOKS) for rng in seeds(30)]
        wrong = [answers for answers in played if (not right) in answers]
        assert len(wrong) <= 30 * 2 * RISK
        assert sum(answers[-1] is right for answers in played) >= 27
        assert sum(right in answers[:2] for answers in played) >= 24


def test_half_of_the_leaves_forgotten_is_found_in_a_hundred_or_two() -> None:
    """Whether they are late or forgotten shows only at the window's end, where others disturb."""
    played = [play(0.5, rng, [*LOOKS, 128]) for rng in seeds(12)]
    assert sum(False in answers[:4] for answers in played) >= 6  # by 128 leaves
    assert sum(answers[-1] is False for answers in played) >= 11  # by 256
    assert not any(True in answers for answers in played)


def test_a_gauge_that_does_not_show_that_ours_begin_accuses_nobody() -> None:
    assert is_seen(averaged(0.0, 0.05), 0.95)
    assert not is_seen(averaged(0.0, 0.05)._replace(seen=MeanEstimate(0.1, 0.2, 30)), 0.95)
    assert not is_seen(averaged(0.0, 0.05)._replace(seen=None), 0.95)


def test_others_that_come_and_go_at_our_moments_are_seen() -> None:
    seen = averaged(1.0, 0.05)
    assert not drifts(seen, 0.95)
    assert not drifts(seen._replace(control=MeanEstimate(0.01, 0.02, 20)), 0.95)
    assert drifts(seen._replace(control=MeanEstimate(0.3, 0.02, 20)), 0.95)


def test_what_is_known_is_a_sentence() -> None:
    known = Gentle(
        way="gauge",
        stops=True,
        why="",
        seconds=122.0,
        moments=41,
        leaves=82,
        latency_s=0.226,
        latency_ci95=Interval(0.221, 0.231),
        ghost_rate=-0.06,
        ghost_ci95=Interval(-0.25, 0.08),
        seen_by_s=0.33,
        share_of_load=0.06,
    )
    assert known.sentence == (
        "it stops; 82 leaves in 2.03 min alongside other users; a stream is held for 226 ms after "
        "its client left (221 ms to 231 ms); 0 % of the streams are still held after 330 ms "
        "(0 % to 8 %); 6 % of its load was ours"
    )
    below = known._replace(latency_s=0.002, floor_s=0.03)
    assert "; a stream is held for at most 30 ms, the least that can be seen;" in below.sentence
    by_memory = known._replace(share_of_memory=0.014)
    assert by_memory.sentence.endswith("6 % of its load was ours, and 1.4 % of its memory at most")
    part = known._replace(shown_part=0.5).sentence
    assert "; the page shows only 50 % of our streams: name the pages of all replicas; 6 %" in part
    unseen = known._replace(why_no_memory="by memory it cannot be seen: too little")
    assert unseen.sentence.endswith("of its load was ours; by memory it cannot be seen: too little")
    open_yet = Gentle(way="pace", stops=None, why="few leaves", seconds=9.0, moments=3, leaves=3)
    assert open_yet.sentence == (
        "not known yet whether it stops: few leaves; 3 leaves in 9 s alongside other users"
    )
