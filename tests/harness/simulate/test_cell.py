"""A cell with constant lags, so that each moment can be said exactly.

A step takes 10 ms and 1 ms lies between two. A request that is sent at 0 is there at 1 ms, has its
first token at 11 ms, which is read at 12 ms, and its n-th at 11 n.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import pytest

from harness.errors import ConfigError
from harness.records import Delivery, RequestRow, Way
from harness.simulate.agenda import Agenda, Kind
from harness.simulate.cell import START_NS, Cell
from harness.simulate.machine import Growth, Lags
from harness.simulate.rows import CellFacts
from reference_engine.protocol import RequestEvent, StepRecord
from tests.harness.simulate.made_plans import Made, MadeUp, made, made_plan

MS = 1_000_000
LAGS = Lags(
    send_s=[0.001, 0.001],
    deliver_s=[0.001, 0.001],
    detect_s={"fin": [0.002, 0.002], "cancel": [0.002, 0.002]},
    signal_s=[0.0005, 0.0005],
    step_s=[0.0, 0.0],
    between_s=[0.001, 0.001],
    schedule_s=[0.0, 0.0],
    rest_s=[0.0, 0.0],
)
LEAVES: dict[str, Any] = {
    "way": Way.FIN,
    "plan": "tokens:5",
    "planned_abandon": 5,
    "think_fraction": 0.0,
}


class Played:
    """A cell, run to its end; stamps are in ms since its beginning. `is_open`: requests come by
    their offsets. `plan`: of `made_plan`; without `requests` its load is drawn."""

    def __init__(
        self,
        *requests: Made,
        is_open: bool = True,
        faults: Iterable[str] = (),
        max_streams: int = 1000,
        **plan: Any,
    ):
        self.rows: list[RequestRow] = []
        self.log: list[tuple[str, float, str]] = []
        self.why: list[tuple[str, str | None]] = []
        self.steps: list[StepRecord] = []
        wanted = {"lags": LAGS, **plan}
        wanted["engine"] = {**wanted.get("engine", {}), "faults": list(faults)}
        if is_open:
            wanted["arrivals"] = {"max_streams": max_streams}
        made_up = MadeUp(requests) if requests else None
        self.cell = Cell(made_plan(**wanted), 0, self, made_up)
        self.cell.run(lambda *_: None)

    def request(self, row: RequestRow) -> None:
        self.rows.append(row)

    def events(
        self, events: Iterable[RequestEvent], worker: str, client_ids: Mapping[str, str]
    ) -> None:
        assert all(one.request_id in client_ids for one in events)
        self.log += [(one.request_id, since(one.t_ns), one.event) for one in events]
        self.why += [(one.event, one.reason) for one in events]

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def close(self, facts: CellFacts) -> None:
        self.facts = facts

    def life(self, name: str = "req-0-1") -> dict[str, float]:
        return {event: t_ms for request, t_ms, event in self.log if request == name}


def grown(growth: Growth) -> Lags:
    return LAGS.model_copy(update={"growth": growth})


def since(t_ns: int) -> float:
    return (t_ns - START_NS) / MS


def test_a_request_is_read_token_by_token() -> None:
    played = Played(made(0, offset_s=0.0, max_tokens=3))
    [row] = played.rows
    assert [since(t_ns) for t_ns in row.token_times_ns] == [12, 23, 34]
    assert (row.outcome, row.tokens_read, row.completion_tokens) == ("completed", 3, 3)
    assert (since(row.sent_ns), since(row.ended_ns)) == (0, 34)
    assert played.life()["admitted"] == 1
    assert played.life()["blocks_freed"] == 33


def test_a_token_takes_longer_to_its_client_beside_others() -> None:
    lags = grown(Growth(deliver_token=0.5))
    both = Played(made(0, offset_s=0.0, max_tokens=3), made(1, offset_s=0.012), lags=lags)
    row = min(both.rows, key=lambda row: row.sent_ns)
    assert [since(t_ns) for t_ns in row.token_times_ns] == [12.5, 23.5, 35]


def test_a_cancel_takes_its_way_and_waits_for_the_boundary() -> None:
    played = Played(made(0, offset_s=0.0, **LEAVES))
    [row], life = played.rows, played.life()
    assert row.abandoned_ns is not None
    assert (row.outcome, row.tokens_read, row.wire_close) == ("abandoned", 5, "fin")
    assert since(row.abandoned_ns) == 56  # the fifth token is made at 55 and read at 56
    assert (life["disconnected"], life["abort_received"]) == (58, 58.5)
    assert life["removed"] == life["blocks_freed"] == 67  # the sixth step goes from 56 to 66


def test_a_leave_is_seen_later_beside_others() -> None:
    lags = grown(Growth(detect_request=0.5, up_to=2))
    others = [made(number, offset_s=0.0) for number in (1, 2)]
    played = Played(made(0, offset_s=0.0, **LEAVES), *others, lags=lags)
    assert played.life()["disconnected"] == 56 + 2 * (1 + 0.5 * 2)


@pytest.mark.parametrize("way", [Way.CANCEL, Way.HALF_CLOSE])
def test_a_request_that_was_left_on_its_way_to_nobody_is_over(way: Way) -> None:
    """All replicas are dead when it arrives; its user has asked to cancel, or reads on."""
    detect_s = {name: [0.002, 0.002] for name in ("fin", "cancel", "half_close")}
    lags = LAGS.model_copy(update={"send_s": [0.1, 0.1], "detect_s": detect_s})
    gone = {"at_s": 0.05, "kind": "die", "share": 1.0}
    leaves: dict[str, Any] = {"planned_abandon": 0, "pause": 60 * MS, "way": way}
    [row] = Played(
        made(0, offset_s=0.0, plan="time", **leaves), lags=lags, cluster={"outages": [gone]}
    ).rows
    assert (row.outcome, since(row.ended_ns)) == ("abandoned", 60)


@pytest.mark.parametrize(
    ("pause", "t0_ms"), [("think", 56 + 0.5 * 11), ("race", 56 + 1.5 * 11), (7 * MS, 56 + 7)]
)
def test_users_pause_before_they_leave(pause: str | int, t0_ms: float) -> None:
    leaves = {**LEAVES, "pause": pause, "think_fraction": 0.5}
    [row] = Played(made(0, offset_s=0.0, **leaves)).rows
    assert since(row.ended_ns) == t0_ms
    assert row.tokens_read == sum(11 * n + 1 <= t0_ms for n in range(1, 20))


def test_a_request_left_before_its_first_token() -> None:
    leaves = {**LEAVES, "planned_abandon": 0, "pause": 5 * MS}
    played = Played(made(0, offset_s=0.0, **leaves))
    [row] = played.rows
    assert (row.outcome, row.tokens_read, since(row.ended_ns)) == ("abandoned", 0, 5)
    assert played.life()["removed"] == 12


def test_a_request_left_on_its_way_is_seen_first() -> None:
    leaves = {**LEAVES, "planned_abandon": 0, "pause": 0}
    lags = LAGS.model_copy(update={"send_s": [0.1, 0.1]})
    life = Played(made(0, offset_s=0.0, **leaves), lags=lags).life()
    assert life["arrived"] == 100
    assert life["disconnected"] == pytest.approx(100, abs=1e-5)
    assert life["blocks_freed"] < 120


def test_whoever_leaves_as_the_answer_ends_has_it_all() -> None:
    """At one instant completion comes before the leave."""
    leaves = {**LEAVES, "planned_abandon": 2, "pause": 11 * MS}
    for max_tokens, outcome in ((3, "completed"), (4, "abandoned")):
        [row] = Played(made(0, offset_s=0.0, max_tokens=max_tokens, **leaves)).rows
        assert (row.outcome, since(row.ended_ns), row.tokens_read) == (outcome, 34, 3)


def test_a_command_at_the_instant_of_a_boundary_is_applied_at_it() -> None:
    played = Played(made(0, offset_s=0.0), made(1, offset_s=0.011))
    assert played.life("req-0-2")["arrived"] == played.life("req-0-2")["admitted"] == 12


def test_equal_instants_have_an_order() -> None:
    done, agenda = list[str](), Agenda()

    def note(name: str, _: int) -> None:
        done.append(name)

    for kind in reversed(Kind):
        for number in (1, 2):
            agenda.put(5, kind, partial(note, f"{kind.name} {number}"))
    while agenda.do_next(5) is not None:
        pass
    assert done == [f"{kind.name} {number}" for kind in Kind for number in (1, 2)]
    assert [kind.name for kind in Kind][:2] == ["COMPLETION", "LEAVE"]


def test_the_cancel_endpoint_is_asked_and_the_answer_read_on() -> None:
    [row] = Played(made(0, offset_s=0.0, **{**LEAVES, "way": Way.CANCEL})).rows
    assert (row.outcome, since(row.ended_ns), row.tokens_read) == ("abandoned", 56, 5)
    assert (row.tokens_after_leaving, row.finish_reason, row.wire_close) == (1, "abort", "nothing")
    assert row.server_ended_ns is not None
    assert since(row.server_ended_ns) == 67


def test_impatient_users_time_out() -> None:
    first, second = Played(
        made(0, offset_s=0.0, max_tokens=30),
        made(1, offset_s=0.0, max_tokens=30),
        engine={"max_num_seqs": 1},
        run={"first_token_timeout_s": 0.1},
    ).rows
    assert (first.outcome, since(first.ended_ns)) == ("timed_out", 100)
    assert first.error == "no token came 0.1 s after the sending"
    assert second.outcome == "completed"
    [row] = Played(made(0, offset_s=0.0), run={"total_timeout_s": 0.1}).rows
    assert (row.outcome, row.tokens_read) == ("timed_out", 9)


def test_the_end_of_the_load_cuts_off_and_frees() -> None:
    played = Played(made(0, offset_s=0.0, max_tokens=400), load_s=0.1)
    [row] = played.rows
    assert (row.outcome, row.tokens_read, since(row.ended_ns)) == ("cut_off", 9, 100)
    assert played.facts.before == played.facts.after
    assert since(played.facts.reached_ns) == 1100


def test_a_user_of_a_closed_loop_asks_one_after_the_other() -> None:
    played = Played(made(0, user=0, max_tokens=2), is_open=False)
    assert [since(row.sent_ns) for row in played.rows[:3]] == [0, 23, 46]


def test_asking_again() -> None:
    again = {"ask_again_after": ["abandoned"]}
    closed = Played(
        made(0, user=0, **LEAVES), is_open=False, load={**again, "retry_pause_s": 9.0}
    ).rows
    assert closed[1].repeats == closed[0].request_id
    assert closed[1].sent_ns == closed[0].ended_ns  # a user that left pauses no longer, as live
    rows = Played(made(0, offset_s=0.0, **LEAVES), load={**again, "retry_pause_s": 0.1}).rows
    assert [row.repeats for row in rows] == [None, *(row.request_id for row in rows[:-1])]
    assert len(rows) == 4
    assert since(rows[1].sent_ns) == 156
    assert rows[1].first_token_ns is not None


def test_a_full_open_loop_waits() -> None:
    requests = [made(n, offset_s=0.0, max_tokens=2) for n in range(2)]
    first, second = Played(*requests, max_streams=1).rows
    assert since(second.intended_start_ns) == 0
    assert second.sent_ns == first.ended_ns


def test_requests_that_a_full_loop_never_sent_were_planned_too() -> None:
    """One fills the loop for 2.2 s; the third is due only after the load's end."""
    requests = [made(n, offset_s=at_s, max_tokens=200) for n, at_s in enumerate((0.0, 0.1, 1.5))]
    facts = Played(*requests, max_streams=1, load_s=1.0).facts
    assert (facts.planned, facts.sent) == (2, 1)


def test_an_open_loop_that_enough_have_left_is_planned_up_to_then() -> None:
    requests = [made(n, offset_s=0.1 * n, **LEAVES) for n in range(20)]
    facts = Played(*requests, load={"stop_after_abandons": 2}).facts
    assert (facts.planned, facts.sent) == (2, 2)


def test_a_share_of_the_first_tokens_time_needs_one() -> None:
    load = {
        "abandon_after_tokens": [],
        "mix": [{"plan": "prefill", "share": 0.5}],
        "stay_share": 0.0,
        "stay_tokens": 4,
        "prompt_tokens": [20, 20],
    }
    first, second, *_ = Played(is_open=False, run={"users": 1}, load=load).rows
    assert (first.outcome, first.max_tokens, first.plan) == ("completed", 4, "never")
    assert (second.outcome, second.ended_ns - second.sent_ns) == ("abandoned", 6 * MS)


@pytest.mark.parametrize(
    ("fault", "late_ms"),
    [("delay-abort=0.1", 99), ("hold-blocks=0.05", 50), ("ignore-disconnect", 264)],
)
def test_faults_of_a_cancel_show_as_set(fault: str, late_ms: float) -> None:
    """Its own end would come at 330 ms. A delay is rounded up to the next boundary."""
    whole = Played(made(0, offset_s=0.0, **LEAVES)).life()["blocks_freed"]
    late = Played(made(0, offset_s=0.0, **LEAVES), faults=[fault])
    assert late.life()["blocks_freed"] - whole == pytest.approx(late_ms, abs=1)


@pytest.mark.parametrize(
    ("fault", "settings", "is_aborted"),
    [
        ("ignore-disconnect-unary", {"delivery": Delivery.UNARY, "planned_abandon": 0}, False),
        ("ignore-disconnect-unary", {}, True),
        ("ignore-disconnect-while-waiting", {"planned_abandon": 0}, False),
        ("ignore-disconnect-while-waiting", {}, True),
        ("lose-abort=1", {}, False),
    ],
)
def test_faults_that_lose_a_cancel(fault: str, settings: dict[str, Any], is_aborted: bool) -> None:
    pause = {"pause": 2 * MS}
    request = made(0, offset_s=0.0, **{**LEAVES, **pause, **settings})
    played = Played(request, faults=[fault])
    assert (played.life()["finished"] < 100) is is_aborted


def test_leaked_blocks_are_missing_at_the_end() -> None:
    played = Played(made(0, offset_s=0.0, **LEAVES), faults=["leak-blocks=1"])
    [before], [after] = played.facts.before, played.facts.after
    assert before.free_blocks - after.free_blocks == 1


def test_a_replica_that_dies_of_a_cancel_is_gone() -> None:
    played = Played(
        made(0, offset_s=0.0, max_tokens=400),
        made(1, offset_s=0.0, **LEAVES),
        made(2, offset_s=1.0),
        faults=["die-on-abort"],
    )
    assert sorted(row.outcome for row in played.rows) == ["abandoned", "failed", "rejected"]
    assert played.facts.after == []


def test_a_request_that_is_too_long_is_refused() -> None:
    with pytest.raises(ConfigError, match="request 0: prompt and answer have 5020 tokens, more"):
        Played(made(0, offset_s=0.0, max_tokens=5000))
