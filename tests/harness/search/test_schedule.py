"""Schedules: drawn from a seed, kept as JSON, and made smaller."""

import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from harness.errors import ConfigError
from harness.records import Delivery, Way
from harness.search.grammar import THEMES, Offered, draw, habits_of
from harness.search.schedule import (
    Feature,
    Leave,
    Phase,
    Schedule,
    Visit,
    check_playable,
    read_schedule,
    seen_in,
    ways_of,
)
from harness.workload.workload import load_target

OFFERED = Offered(
    slots=8,
    chunks=(256, 2048),
    long_prompt=512,
    longest_prompt=2057,
    long_answer=400,
    features=frozenset({Feature.CHAT, Feature.SCHEMA}),
    ways=(Way.FIN, Way.RST),
    fan_out=4,
)
POOR = Offered(
    slots=None,
    chunks=(16,),
    long_prompt=32,
    longest_prompt=32,
    long_answer=100,
    features=frozenset(),
    ways=(Way.FIN,),
    fan_out=1,
)


@pytest.mark.parametrize("offered", [OFFERED, POOR])
def test_what_is_drawn_is_right_and_asks_for_nothing_that_is_not_offered(offered: Offered) -> None:
    for number in range(300):
        schedule = draw(7, number, offered)
        schedule.check()
        again = msgspec.json.decode(msgspec.json.encode(schedule), type=Schedule)
        assert again == schedule == draw(7, number, offered)
        for one in schedule.visits:
            assert set(one.features) <= offered.features
            assert one.n <= offered.fan_out
            assert one.leave is None or one.leave.way in offered.ways
            if one.delivery is Delivery.UNARY and one.leave is not None:
                assert one.leave.phase in (Phase.SENT, Phase.PREFILL), "it shows no token"


def test_each_theme_is_drawn_and_can_be_asked_for_alone() -> None:
    for name in THEMES:
        assert any(draw(1, number, OFFERED, [name]).leaves for number in range(3)), name
    alone = draw(1, 0, OFFERED, ["alone"])
    assert [one.after for one in alone.visits] == [None, 0]


@pytest.mark.parametrize(("slots", "running"), [(None, 16), (4, 4), (24, 24), (100, 40)])
def test_slots_are_filled_up_to_forty(slots: int | None, running: int) -> None:
    offered = replace(OFFERED, slots=slots)
    visits = THEMES["queued"](random.Random(1), offered)
    assert sum(one.at == 0.0 and one.after is None for one in visits) == running
    assert len(visits) > running
    counts = {len(THEMES["whole"](random.Random(seed), offered)) for seed in range(20)}
    assert max(counts) == running + 2, "some answers in one piece wait for a slot"
    for number in range(60):
        draw(1, number, offered).check()


def test_prompts_end_around_the_edge_of_each_chunk_and_are_left_around_it() -> None:
    """A token of a prompt takes a hundredth of a step: 2048 of them 20.48 steps."""
    offered = replace(OFFERED, token_steps=0.01)
    left = [THEMES["chunk-edge"](random.Random(seed), offered)[0] for seed in range(200)]
    sizes = {one.prompt for one in left}
    assert sizes >= {255, 256, 257, 511, 512, 2047, 2048, 2049, 2057}
    assert max(sizes) == offered.longest_prompt
    moments = [one.leave.at for one in left if one.leave is not None and one.prompt > 1000]
    assert any(abs(at - 20.48) < 20.48 * 0.3 for at in moments)
    assert max(moments) > 2 * 20


def test_each_theme_meets_each_habit_before_any_pair_comes_again() -> None:
    """A way to leave, and leaving as the last token is made."""
    count = len(THEMES) * len(habits_of(OFFERED))
    drawn = [draw(3, number, OFFERED) for number in range(count)]
    met = [
        one
        for schedule in drawn
        for one in schedule.leaves
        if one.way is Way.RST and one.phase is Phase.LAST
    ]
    assert met
    themes_alone = [draw(3, number, OFFERED, ["last-token"]) for number in range(count)]
    covered = {name for schedule in themes_alone for _, _, name in seen_in(schedule)}
    assert covered >= {"chat", "schema", "n", "shared"}


SCHEDULE = Schedule(
    seed=1,
    visits=(
        Visit(leave=Leave(at=2)),
        Visit(after=0, repeats=0, same_id=True, features=(Feature.CHAT,)),
        Visit(after=1, n=2, leave=Leave(phase=Phase.SENT, way=Way.RST)),
    ),
)


def test_what_followed_a_visit_that_is_gone_stands_alone() -> None:
    smaller = SCHEDULE.without(frozenset({0}))
    assert smaller.visits == (
        Visit(features=(Feature.CHAT,)),
        Visit(after=0, n=2, leave=Leave(phase=Phase.SENT, way=Way.RST)),
    )


def test_two_requests_under_one_id_are_never_asked_at_once() -> None:
    again = Visit(after=1, repeats=0, same_id=True)
    schedule = Schedule(seed=1, visits=(Visit(), Visit(after=0), again))
    schedule.check()
    assert not schedule.without(frozenset({1})).visits[1].same_id


def test_nobody_leaves_the_control() -> None:
    assert SCHEDULE.staying().leaves == []
    assert len(SCHEDULE.staying().visits) == 3


def test_what_a_schedule_covers() -> None:
    assert list(seen_in(SCHEDULE)) == [("token", "fin", "plain"), ("sent", "rst", "n")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no schedule"),
        ('{"seed": 1, "visits": []}', "1 to 64 visits"),
        ('{"seed": 1, "visits": [{"after": 0}]}', "`after` is 0; it must be an earlier visit"),
        ('{"seed": 1, "visits": [{"same_id": true}]}', "needs `repeats`"),
        ('{"seed": 1, "visits": [{"way": "fin"}]}', "unknown field `way`"),
        ('{"seed": 1, "visits": [{"leave": {"at": -1}}]}', ">= 0"),
    ],
)
def test_a_file_that_is_no_schedule_is_refused_in_one_sentence(
    tmp_path: Path, text: str, said: str
) -> None:
    file = tmp_path / "schedule.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_schedule(file)


REFERENCE, OPENAI, TRITON = (load_target(name) for name in ("reference", "openai", "triton"))


def test_only_a_server_with_the_route_is_cancelled_by_it() -> None:
    assert Way.CANCEL in ways_of(REFERENCE)
    assert Way.CANCEL not in ways_of(OPENAI)
    assert ways_of(REFERENCE)[0] is Way.FIN


@pytest.mark.parametrize(
    ("visit", "said"),
    [
        (Visit(leave=Leave(way=Way.KILLED)), "visit 0 leaves by `killed`, and the ways of clients"),
        (Visit(leave=Leave(way=Way.CANCEL)), "of the kind openai are fin, rst, half_close, stop_r"),
        (Visit(features=(Feature.ADAPTER,)), "visit 0 asks for an adapter: name one"),
    ],
)
def test_a_schedule_that_no_client_of_this_kind_of_server_can_play_is_refused(
    visit: Visit, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_playable(Schedule(seed=1, visits=(visit,)), OPENAI, adapter=None)


def test_the_usual_way_over_http_is_the_usual_way_over_grpc_too() -> None:
    """Schedules are drawn with it, and can be played again from their files."""
    usual = Schedule(seed=1, visits=(Visit(leave=Leave(), features=(Feature.ADAPTER,)),))
    check_playable(usual, TRITON, adapter="one")
    reset = Schedule(seed=1, visits=(Visit(leave=Leave(way=Way.RST)),))
    with pytest.raises(ConfigError, match="the kind triton are cancel, half_close"):
        check_playable(reset, TRITON, adapter=None)
