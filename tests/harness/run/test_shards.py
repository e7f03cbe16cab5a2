"""The rows of a load: was any request answered, and which of a schedule were never sent?"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from harness.client.shards import ShardWriter
from harness.records import Outcome, RequestRow
from harness.run.shards import LoadTally, find_hopeless, find_missed_arrivals
from harness.store.manifest import IdleReading, LoadProcessRecord, MissedArrivals
from harness.store.parquet import Sent
from harness.workload.abandon import AbandonPlan, PrefillPlan
from harness.workload.arrivals import ConstantArrivals
from tests.harness.client.asking import plan_of
from tests.harness.workload.mixes import STAY, load_of, tokens
from tests.made_up.rows import made_up_manifest, request_row

S = 1_000_000_000


@pytest.mark.parametrize(
    ("outcomes", "tokens_read", "said"),
    [
        ({}, 1, "made no request"),
        ({"failed": 3}, 1, "all 3 requests failed, and none was answered; 2 of them: HTTP 404"),
        ({"timed_out": 1, "cut_off": 1}, 1, "1 of 2 requests failed"),
        ({"rejected": 3}, 1, "all 3 requests were refused, and none was answered; 2 of them: HTTP"),
        ({"failed": 1, "abandoned": 1}, 1, None),
        ({"failed": 9, "completed": 1}, 1, None),
        ({"cut_off": 3}, 1, "all 3 requests were still being answered when the load ended"),
        ({"abandoned": 1, "cut_off": 1}, 0, None),  # left before the first token
        ({"cut_off": 3}, 0, "all 3 requests were waiting for their first token when the load"),
    ],
)
def test_a_load_without_an_answer_is_a_failure(
    tmp_path: Path, outcomes: dict[str, int], tokens_read: int, said: str | None
) -> None:
    tally = LoadTally(tmp_path)
    tally.outcomes = Counter({Outcome(name): n for name, n in outcomes.items()})
    tally.tokens_read = tokens_read
    for text in ("the connection broke", "HTTP 404: no model 1", "HTTP 404: no model 2"):
        tally.note_error(text)
    error = find_hopeless(tally, [])
    assert (error is None) == (said is None)
    assert (said or "") in str(error)


@pytest.mark.parametrize(
    ("planned", "is_hopeless"),
    [((0, None, 5), True), ((0, 0, None), True), ((0, 0, 0), False), ((5, 0, 0), False)],
)
def test_who_left_before_the_first_token_saw_no_answer(
    tmp_path: Path, planned: tuple[int | None, ...], is_hopeless: bool
) -> None:
    """The first has left, after what it was to read; all others failed."""
    boom = {"outcome": Outcome.FAILED, "error": "HTTP 500: boom"}
    left = {"outcome": Outcome.ABANDONED, "token_times_ns": [5] * (planned[0] or 0)}
    with ShardWriter(tmp_path, RequestRow, pid=1) as writer:
        for number, tokens in enumerate(planned):
            more: dict[str, Any] = boom if number else left
            name = str(number)
            writer.write(request_row(name, sent_ns=1, ended_ns=9, planned_abandon=tokens, **more))
    tally = LoadTally(tmp_path)
    assert len(list(tally.requests())) == 3
    why = "2 of 3 requests failed, and none was answered; 2 of them: HTTP 500: boom"
    error = find_hopeless(tally, [])
    assert (error and str(error)) == (why if is_hopeless else None)


def test_a_load_whose_processes_all_died_is_a_failure(tmp_path: Path) -> None:
    tally = LoadTally(tmp_path)
    tally.outcomes, tally.tokens_read = Counter({Outcome.ABANDONED: 5}), 9
    dead, alive = (
        LoadProcessRecord(
            worker=0,
            host="here",
            pid=1,
            clock="boot",
            began_ns=1,
            ended_ns=ended_ns,
            last_seen_ns=5,
            requests=3,
            open_streams=2,
        )
        for ended_ns in (None, 9)
    )
    assert "every load process died" in str(find_hopeless(tally, [dead, dead]))
    assert find_hopeless(tally, [dead, alive]) is None


def unsent(*sent: Sent, leave: AbandonPlan = STAY, loops_ended_s: list[int]) -> MissedArrivals:
    """Ten arrivals were due in each loop, one a second."""
    manifest = made_up_manifest(seed=7)
    manifest.idle.loops = [IdleReading(t_ns=t * S, values={}) for t in loops_ended_s]
    arrivals = ConstantArrivals(kind="constant", rate=1, seconds=10, max_streams=2)
    seed = 7 + max(0, len(loops_ended_s) - 1)  # the last loop's
    plan = plan_of("http://127.0.0.1:1", load=load_of(leave), arrivals=arrivals, seed=seed)
    return find_missed_arrivals(plan, manifest, sent)


def sent(number: int, *, begins_s: float, end_s: float) -> Sent:
    return Sent(number, int((begins_s + number) * S), int(end_s * S))


def test_a_missed_arrival_waited_until_the_last_request_ended() -> None:
    seen = [sent(n, begins_s=100, end_s=107.5) for n in (0, 1, 3)]
    found = unsent(*seen, loops_ended_s=[])
    assert found.to_stay_s == pytest.approx([5.5, 3.5, 2.5, 1.5, 0.5])  # 8 and 9 were not due yet
    assert found.to_leave_s == []
    nothing = unsent(loops_ended_s=[])
    assert nothing.to_stay_s == nothing.to_leave_s == [], "nothing says when it began"


@pytest.mark.parametrize("leave", [tokens(1), PrefillPlan(plan="prefill", share=[0.1, 0.2])])
def test_missed_users_that_would_have_left_are_counted_apart(leave: AbandonPlan) -> None:
    found = unsent(sent(0, begins_s=0, end_s=2.5), leave=leave, loops_ended_s=[])
    assert not found.to_stay_s
    assert found.to_leave_s == pytest.approx([1.5, 0.5])


def test_each_loop_has_a_schedule_of_its_own() -> None:
    seen = [sent(n, begins_s=100, end_s=109) for n in range(10)]
    seen += [sent(0, begins_s=200, end_s=201.5)]
    assert unsent(*seen, loops_ended_s=[150, 250]).to_stay_s == pytest.approx([0.5])
