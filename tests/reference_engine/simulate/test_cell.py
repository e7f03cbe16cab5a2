"""A cell with constant lags, so that each moment can be said exactly.

A step takes 10 ms and 1 ms lies between two. A request that is sent at 0 is there at 1 ms, has its
first token at 11 ms, which is read at 12 ms, and its n-th at 11 n.
"""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import msgspec
import pytest

from reference_engine.protocol import Event, StepRecord
from reference_engine.simulate.agenda import Agenda, Kind
from reference_engine.simulate.cell import START_NS, Cell
from reference_engine.simulate.plan import (
    CellPlan,
    Growth,
    Lags,
    Outage,
    PlanError,
    PlannedRequest,
    Retry,
    Router,
    Simulation,
    engine_settings,
)
from reference_engine.simulate.rows import CellFacts, RequestRow
from tests.reference_engine.simulate.made_plans import FLAGS, asked

MS = 1_000_000
LAGS = Lags(
    name="constant",
    send_s=[0.001, 0.001],
    deliver_s=[0.001, 0.001],
    detect_s={"fin": [0.002, 0.002], "cancel": [0.002, 0.002]},
    signal_s=[0.0005, 0.0005],
    step_s=[0.0, 0.0],
    between_s=[0.001, 0.001],
    rest_s=[0.0, 0.0],
)
LEAVES = {"way": "fin", "plan": "tokens:5", "leave_after_tokens": 5, "think_fraction": 0.0}


class Played:
    """A cell, run to its end; stamps are told in ms since its beginning."""

    keeps_tokens = True

    def __init__(
        self,
        *requests: PlannedRequest,
        flags: Iterable[str] = (),
        replicas: int = 1,
        router: Router = "least_loaded",
        **settings: Any,
    ):
        self.rows: list[RequestRow] = []
        self.log: list[tuple[str, float, str]] = []
        self.why: list[tuple[str, str | None]] = []
        self.steps: list[StepRecord] = []
        fields = {"seed": 1, "load_s": 4.0, "settle_s": 1.0, "lags": LAGS, **settings}
        cell = CellPlan(replicas=replicas, simulated=replicas, router=router)
        plan = Simulation(engine_flags=[*FLAGS, *flags], cells=[cell], **fields)
        self.cell = Cell(plan, 0, engine_settings(plan, {}), iter(requests), self)
        self.cell.run(lambda *_: None)

    def request(self, row: RequestRow) -> None:
        self.rows.append(row)

    def events(self, events: Iterable[Event], worker: str, client_ids: Mapping[str, str]) -> None:
        assert all(one.request_id in client_ids for one in events)
        self.log += [(one.request_id, since(one.t_ns), one.event) for one in events]
        self.why += [(one.event, one.reason) for one in events]

    def step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def close(self, facts: CellFacts) -> None:
        self.facts = facts

    def life(self, name: str = "req-0-1") -> dict[str, float]:
        return {event: t_ms for request, t_ms, event in self.log if request == name}


def since(t_ns: int) -> float:
    return (t_ns - START_NS) / MS


def test_a_request_is_read_token_by_token() -> None:
    played = Played(asked(0, offset_s=0.0, max_tokens=3))
    [row] = played.rows
    assert [since(t_ns) for t_ns in row.token_times_ns] == [12, 23, 34]
    assert (row.outcome, row.tokens_read, row.completion_tokens) == ("completed", 3, 3)
    assert (since(row.sent_ns), since(row.ended_ns)) == (0, 34)
    assert played.life()["admitted"] == 1
    assert played.life()["blocks_freed"] == 33


def test_a_token_takes_longer_to_its_client_beside_others() -> None:
    lags = msgspec.structs.replace(LAGS, growth=Growth(deliver_token=0.5))
    both = Played(asked(0, offset_s=0.0, max_tokens=3), asked(1, offset_s=0.012), lags=lags)
    row = min(both.rows, key=lambda row: row.sent_ns)
    assert [since(t_ns) for t_ns in row.token_times_ns] == [12.5, 23.5, 35]


def test_a_cancel_takes_its_way_and_waits_for_the_boundary() -> None:
    played = Played(asked(0, offset_s=0.0, **LEAVES))
    [row], life = played.rows, played.life()
    assert row.abandoned_ns is not None
    assert (row.outcome, row.tokens_read, row.wire_close) == ("abandoned", 5, "fin")
    assert since(row.abandoned_ns) == 56  # the fifth token is made at 55 and read at 56
    assert (life["disconnected"], life["abort_received"]) == (58, 58.5)
    assert life["removed"] == life["blocks_freed"] == 67  # the sixth step goes from 56 to 66


def test_a_leave_is_seen_later_beside_others() -> None:
    lags = msgspec.structs.replace(LAGS, growth=Growth(detect_request=0.5, up_to=2))
    others = [asked(number, offset_s=0.0) for number in (1, 2)]
    played = Played(asked(0, offset_s=0.0, **LEAVES), *others, lags=lags)
    assert played.life()["disconnected"] == 56 + 2 * (1 + 0.5 * 2)


@pytest.mark.parametrize("way", ["cancel", "half_close"])
def test_a_request_that_was_left_on_its_way_to_nobody_is_over(way: str) -> None:
    """All replicas are dead when it arrives; its user has asked to cancel, or reads on."""
    detect_s = {name: [0.002, 0.002] for name in ("fin", "cancel", "half_close")}
    lags = msgspec.structs.replace(LAGS, send_s=[0.1, 0.1], detect_s=detect_s)
    gone = Outage(at_s=0.05, kind="die", share=1.0)
    leaves = {"leave_after_tokens": 0, "pause": "ns", "pause_ns": 60 * MS, "way": way}
    [row] = Played(asked(0, offset_s=0.0, plan="time", **leaves), lags=lags, outages=[gone]).rows
    assert (row.outcome, since(row.ended_ns)) == ("abandoned", 60)


@pytest.mark.parametrize(
    ("pause", "t0_ms"), [("think", 56 + 0.5 * 11), ("race", 56 + 1.5 * 11), ("ns", 56 + 7)]
)
def test_users_pause_before_they_leave(pause: str, t0_ms: float) -> None:
    leaves = {**LEAVES, "pause": pause, "pause_ns": 7 * MS, "think_fraction": 0.5}
    [row] = Played(asked(0, offset_s=0.0, **leaves)).rows
    assert since(row.ended_ns) == t0_ms
    assert row.tokens_read == sum(11 * n + 1 <= t0_ms for n in range(1, 20))


def test_a_request_left_before_its_first_token() -> None:
    leaves = {**LEAVES, "leave_after_tokens": 0, "pause": "ns", "pause_ns": 5 * MS}
    played = Played(asked(0, offset_s=0.0, **leaves))
    [row] = played.rows
    assert (row.outcome, row.tokens_read, since(row.ended_ns)) == ("abandoned", 0, 5)
    assert played.life()["removed"] == 12


def test_a_request_left_on_its_way_is_seen_first() -> None:
    leaves = {**LEAVES, "leave_after_tokens": 0, "pause": "ns", "pause_ns": 0}
    lags = msgspec.structs.replace(LAGS, send_s=[0.1, 0.1])
    life = Played(asked(0, offset_s=0.0, **leaves), lags=lags).life()
    assert life["arrived"] == 100
    assert life["disconnected"] == pytest.approx(100, abs=1e-5)
    assert life["blocks_freed"] < 120


def test_whoever_leaves_as_the_answer_ends_has_it_all() -> None:
    """At one instant completion comes before the leave."""
    leaves = {**LEAVES, "leave_after_tokens": 2, "pause": "ns", "pause_ns": 11 * MS}
    for max_tokens, outcome in ((3, "completed"), (4, "abandoned")):
        [row] = Played(asked(0, offset_s=0.0, max_tokens=max_tokens, **leaves)).rows
        assert (row.outcome, since(row.ended_ns), row.tokens_read) == (outcome, 34, 3)


def test_a_command_at_the_instant_of_a_boundary_is_applied_at_it() -> None:
    played = Played(asked(0, offset_s=0.0), asked(1, offset_s=0.011))
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
    [row] = Played(asked(0, offset_s=0.0, **{**LEAVES, "way": "cancel"})).rows
    assert (row.outcome, since(row.ended_ns), row.tokens_read) == ("abandoned", 56, 5)
    assert (row.tokens_after_leaving, row.finish_reason, row.wire_close) == (1, "abort", "nothing")
    assert row.server_ended_ns is not None
    assert since(row.server_ended_ns) == 67


def test_a_deadline_ends_a_request_on_the_server() -> None:
    [row] = Played(asked(0, offset_s=0.0), flags=["--default-deadline-s", "0.05"]).rows
    assert row.outcome == "timed_out"
    assert row.error == "the server aborted the request: client_timeout"


def test_impatient_users_time_out() -> None:
    slots = ("--max-num-seqs", "1")
    first, second = Played(
        asked(0, offset_s=0.0, max_tokens=30),
        asked(1, offset_s=0.0, max_tokens=30),
        flags=slots,
        first_token_timeout_s=0.1,
    ).rows
    assert (first.outcome, since(first.ended_ns)) == ("timed_out", 100)
    assert first.error == "no token came 0.1 s after the sending"
    assert second.outcome == "completed"
    [row] = Played(asked(0, offset_s=0.0), request_timeout_s=0.1).rows
    assert (row.outcome, row.tokens_read) == ("timed_out", 9)


def test_the_end_of_the_load_cuts_off_and_frees() -> None:
    played = Played(asked(0, offset_s=0.0, max_tokens=400), load_s=0.1)
    [row] = played.rows
    assert (row.outcome, row.tokens_read, since(row.ended_ns)) == ("cut_off", 9, 100)
    assert played.facts.before == played.facts.after
    assert since(played.facts.reached_ns) == 1100


def test_a_user_of_a_closed_loop_asks_one_after_the_other() -> None:
    requests = [asked(n, user=0, offset_s=None, max_tokens=2) for n in range(3)]
    played = Played(*requests)
    assert [since(row.sent_ns) for row in played.rows] == [0, 23, 46]
    assert played.facts.ran_out == 1


def test_asking_again() -> None:
    closed = [asked(n, user=0, offset_s=None, **LEAVES) for n in range(2)]
    first, second = Played(*closed, retry=Retry(after=["abandoned"], pause_s=9.0)).rows
    assert second.repeats == first.request_id
    assert second.sent_ns == first.ended_ns  # a user that left pauses no longer, as live
    rows = Played(
        asked(0, offset_s=0.0, **LEAVES), retry=Retry(after=["abandoned"], pause_s=0.1, most=2)
    ).rows
    assert [row.repeats for row in rows] == [None, rows[0].request_id, rows[1].request_id]
    assert since(rows[1].sent_ns) == 156
    assert rows[1].first_token_ns is not None


def test_a_full_open_loop_waits() -> None:
    requests = [asked(n, offset_s=0.0, max_tokens=2) for n in range(2)]
    first, second = Played(*requests, max_streams=1).rows
    assert since(second.intended_start_ns) == 0
    assert second.sent_ns == first.ended_ns


def test_requests_that_a_full_loop_never_sent_were_planned_too() -> None:
    """One fills the loop for 2.2 s; the third is due only after the load's end."""
    requests = [asked(n, offset_s=at_s, max_tokens=200) for n, at_s in enumerate((0.0, 0.1, 1.5))]
    facts = Played(*requests, max_streams=1, load_s=1.0).facts
    assert (facts.planned, facts.sent) == (2, 1)


def test_an_open_loop_that_enough_have_left_is_planned_up_to_then() -> None:
    requests = [asked(n, offset_s=0.1 * n, **LEAVES) for n in range(20)]
    facts = Played(*requests, stop_after_abandons=2).facts
    assert (facts.planned, facts.sent) == (2, 2)


def test_a_share_of_the_first_tokens_time_needs_one() -> None:
    plan = {"way": "fin", "plan": "prefill:0.50", "ttft_share": 0.5, "stay_tokens": 4}
    requests = [asked(n, user=0, offset_s=None, **plan) for n in range(2)]
    first, second = Played(*requests).rows
    assert (first.outcome, first.max_tokens, first.plan) == ("completed", 4, "never")
    assert (second.outcome, second.ended_ns - second.sent_ns) == ("abandoned", 6 * MS)


@pytest.mark.parametrize(
    ("fault", "late_ms"),
    [("delay-abort=0.1", 99), ("hold-blocks=0.05", 50), ("ignore-disconnect", 264)],
)
def test_faults_of_a_cancel_show_as_set(fault: str, late_ms: float) -> None:
    """Its own end would come at 330 ms. A delay is rounded up to the next boundary."""
    whole = Played(asked(0, offset_s=0.0, **LEAVES)).life()["blocks_freed"]
    late = Played(asked(0, offset_s=0.0, **LEAVES), flags=["--fault", fault])
    assert late.life()["blocks_freed"] - whole == pytest.approx(late_ms, abs=1)


@pytest.mark.parametrize(
    ("fault", "settings", "is_aborted"),
    [
        ("ignore-disconnect-unary", {"stream": False, "leave_after_tokens": 0}, False),
        ("ignore-disconnect-unary", {}, True),
        ("ignore-disconnect-while-waiting", {"leave_after_tokens": 0}, False),
        ("ignore-disconnect-while-waiting", {}, True),
        ("lose-abort=1", {}, False),
    ],
)
def test_faults_that_lose_a_cancel(fault: str, settings: dict[str, Any], is_aborted: bool) -> None:
    pause = {"pause": "ns", "pause_ns": 2 * MS}
    request = asked(0, offset_s=0.0, **{**LEAVES, **pause, **settings})
    played = Played(request, flags=["--fault", fault])
    assert (played.life()["finished"] < 100) is is_aborted


def test_leaked_blocks_are_missing_at_the_end() -> None:
    played = Played(asked(0, offset_s=0.0, **LEAVES), flags=["--fault", "leak-blocks=1"])
    [before], [after] = played.facts.before, played.facts.after
    assert before.free_blocks - after.free_blocks == 1


def test_a_replica_that_dies_of_a_cancel_is_gone() -> None:
    played = Played(
        asked(0, offset_s=0.0, max_tokens=400),
        asked(1, offset_s=0.0, **LEAVES),
        asked(2, offset_s=1.0),
        flags=["--fault", "die-on-abort"],
    )
    assert sorted(row.outcome for row in played.rows) == ["abandoned", "failed", "rejected"]
    assert played.facts.after == []


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"n": 2}, "request 0: a simulated request has one answer, n = 1"),
        ({**LEAVES, "way": "vanish"}, "lags constant: `detect_s` has no way 'vanish'"),
        ({"max_tokens": 5000}, "request 0: prompt and answer have 5020 tokens, more than"),
    ],
)
def test_what_cannot_be_simulated_is_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(PlanError, match=why):
        Played(asked(0, offset_s=0.0, **settings))
