"""A user's turns: each prompt is the whole context so far, and what the turn adds."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from harness.records import Outcome, RequestRow
from harness.workload.abandon import RequestSpec, TokensPlan
from harness.workload.load import AbandonLoad
from harness.workload.observed_latency import ObservedLatency
from harness.workload.session import SessionSettings, Turn
from harness.workload.session_user import SessionUser
from harness.workload.workload import load_workload
from tests.harness.workload.mixes import load_of, tokens
from tests.made_up.rows import request_row

TRACES = os.environ.get("WALKAWAY_TRACES")
THINK_S = (3.0, 4.0)
LENGTHS: dict[str, Any] = {
    "turns": [2],
    "first_tokens": [100],
    "turn_tokens": [10],
    "correction_tokens": [7],
    "answer_tokens": [20],
    "think_s": list(THINK_S),
}
SEEN = ObservedLatency()


def session_load(plan: TokensPlan | None = None, **session: Any) -> AbandonLoad:
    settings = SessionSettings(**LENGTHS | session)
    return load_of(plan or tokens(3), prompt_tokens=[50, 200], session=settings)


def ended(spec: RequestSpec, outcome: Outcome, read: int, **more: Any) -> RequestRow:
    times = list(range(read))
    return request_row("r", sent_ns=0, ended_ns=99, outcome=outcome, token_times_ns=times, **more)


def turn_of(spec: RequestSpec) -> Turn:
    assert spec.turn is not None
    return spec.turn


def test_a_stopped_turn_is_corrected_at_once_and_a_whole_one_thought_about() -> None:
    user = SessionUser(session_load(), seed=1, user=4)
    first = user.next_turn(SEEN)
    assert (first.prompt_tokens, first.planned_abandon, turn_of(first).follows) == (100, 3, None)
    assert user.over(ended(first, Outcome.ABANDONED, 3)) == 0

    second = user.next_turn(SEEN)
    assert second.prompt_tokens == 100 + 3 + 7
    assert turn_of(second).follows is Outcome.ABANDONED
    assert turn_of(second).history_tokens == 103
    assert THINK_S[0] <= user.over(ended(second, Outcome.COMPLETED, 20)) <= THINK_S[1]

    third = user.next_turn(SEEN)
    assert third.prompt_tokens == 110 + 20 + 10
    assert [(one.n, one.by, one.tokens) for one in turn_of(third).earlier] == [
        *((0, "user", 100), (0, "assistant", 3), (1, "user", 7), (1, "assistant", 20))
    ]
    user.over(ended(third, Outcome.COMPLETED, 20))
    assert user.next_turn(SEEN).turn == Turn(3, 100)  # two whole answers: another session


def test_the_server_counts_better_than_the_client() -> None:
    user = SessionUser(session_load(), seed=1, user=4)
    user.over(ended(user.next_turn(SEEN), Outcome.ABANDONED, 3, prompt_tokens=117))
    assert user.next_turn(SEEN).prompt_tokens == 117 + 3 + 7


def test_a_full_context_loses_its_oldest_turns_or_is_sent_as_it_is() -> None:
    for when_full, cut_at in (("cut", [4, 8]), ("send", [])):
        load = session_load(turns=[9], when_full=when_full)
        user = SessionUser(load, seed=1, user=4)
        cuts = []
        for n in range(9):
            spec = user.next_turn(SEEN)
            turn, longest = turn_of(spec), load.prompt_tokens[1]
            assert spec.prompt_tokens == turn.history_tokens + turn.own_tokens
            if turn.cut_tokens:
                cuts.append(n)
                assert [one.n for one in turn.earlier] == [0]  # the first prompt stays, alone
                assert turn.history_tokens == 100
            assert when_full == "send" or spec.prompt_tokens <= longest
            user.over(ended(spec, Outcome.COMPLETED, 20))
        assert cuts == cut_at


def test_a_turn_that_failed_ends_its_session() -> None:
    user = SessionUser(session_load(), seed=1, user=4)
    user.over(ended(user.next_turn(SEEN), Outcome.ABANDONED, 3))
    assert user.over(ended(user.next_turn(SEEN), Outcome.FAILED, 0)) > 0
    assert user.next_turn(SEEN).turn == Turn(2, 100)


def tenths(lengths: Iterable[int]) -> list[int]:
    """The middle of each tenth of the sorted lengths."""
    found = sorted(lengths)
    return [found[round((2 * n + 1) / 20 * (len(found) - 1))] for n in range(10)]


@pytest.mark.skipif(TRACES is None, reason="WALKAWAY_TRACES names no folder of traces")
def test_the_lengths_of_the_workload_are_those_of_the_trace() -> None:
    """As docs/workloads.md says."""
    file = Path(TRACES or "") / "mooncake_conversation_trace_head3000.jsonl"
    if not file.exists():
        pytest.skip(f"{file} is not there")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    before: dict[int, int] = {}
    newest: dict[tuple[int, ...], int] = {}
    for at, row in enumerate(rows):
        pages = row["hash_ids"]
        for end in range(len(pages), 1, -1):
            earlier = newest.get(tuple(pages[:end]))
            if earlier is not None and rows[earlier]["input_length"] < row["input_length"]:
                before[at] = earlier
                break
        if len(full := pages[:-1]) > 1:
            newest[tuple(full)] = at
    first = set(before.values()) - before.keys()
    added = [
        rows[at]["input_length"] - rows[of]["input_length"] - rows[of]["output_length"]
        for at, of in before.items()
    ]
    load = load_workload("agent_stop").load
    assert isinstance(load, AbandonLoad)
    assert (session := load.session) is not None
    assert (len(before), len(first)) == (805, 487)
    assert session.first_tokens == tenths(rows[at]["input_length"] for at in first)[:-1]
    assert session.turn_tokens == tenths(one for one in added if one > 0)[:-1]
    assert session.correction_tokens == session.turn_tokens
    assert session.answer_tokens == tenths(row["output_length"] for row in rows)
