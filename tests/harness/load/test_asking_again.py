"""Users who ask the same once more, canaries and storms, in the load process itself."""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby
from statistics import median
from typing import TYPE_CHECKING

import pytest

from harness.records import Outcome, RequestRow, Role
from harness.workload.load import CancelStormLoad
from tests.harness.load.asking import engine
from tests.harness.load.load_process import LoadProcess
from tests.harness.workload.mixes import abandoning

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.harness.load.conftest import Exchange, Script, ScriptedServer

    Serve = Callable[[Script], ScriptedServer]

pytestmark = pytest.mark.e2e

MS = 1_000_000


def test_who_has_left_asks_the_very_same_once_more(serve: Serve, tmp_path: Path) -> None:
    server = serve(engine)
    load = abandoning(tokens=[1, 3], stay_share=0.5, stop_after=20)
    load = load.model_copy(update={"ask_again_after": [Outcome.ABANDONED]})
    rows = _ended(LoadProcess(tmp_path, server.url, load, users=3).result())

    prompts = {x.request_id: x.body["prompt"] for x in server.exchanges.values()}
    by_id = {row.request_id: row for row in rows}
    repeats = [row for row in rows if row.repeats is not None]
    assert len(repeats) >= 15
    for row in repeats:
        assert row.repeats is not None
        assert prompts[row.request_id] == prompts[row.repeats]
        assert by_id[row.repeats].outcome is Outcome.ABANDONED
        assert by_id[row.repeats].user == row.user
    firsts = [prompts[row.request_id] for row in rows if row.repeats is None]
    assert len(set(firsts)) == len(firsts)


@pytest.mark.slow
def test_who_has_lost_patience_asks_again_at_once(serve: Serve, tmp_path: Path) -> None:
    answered: defaultdict[str, int] = defaultdict(int)

    def slow_at_first(x: Exchange) -> None:
        answered[x.body["prompt"]] += 1
        if answered[x.body["prompt"]] == 1:
            x.client_left_within(None)
        else:
            engine(x)

    server = serve(slow_at_first)
    load = abandoning(tokens=[1], stay_share=0.0, stop_after=4)
    load = load.model_copy(update={"ask_again_after": [Outcome.TIMED_OUT], "retry_pause_s": 0.0})
    rows = LoadProcess(tmp_path, server.url, load, users=1, timeout_s=1.0).result()
    timed_out = {row.request_id: row for row in rows if row.outcome is Outcome.TIMED_OUT}
    again = [row for row in rows if row.repeats in timed_out]
    assert len(again) >= 4
    for row in again:
        assert row.repeats is not None
        assert row.outcome is not Outcome.TIMED_OUT
    pauses_ns = [row.sent_ns - timed_out[row.repeats].ended_ns for row in again if row.repeats]
    assert median(pauses_ns) < 450 * MS, "otherwise each is 500"


@pytest.mark.slow
def test_canaries_ask_alone_first_and_then_the_same_all_along(serve: Serve, tmp_path: Path) -> None:
    server = serve(engine)
    load = abandoning(tokens=[0, 2], stay_share=0.3, stop_after=20)
    load = load.model_copy(update={"canaries": 2, "canary_tokens": 4})
    rows = _ended(LoadProcess(tmp_path, server.url, load, users=5).result())

    canaries = [row for row in rows if row.role is Role.CANARY]
    others = [row for row in rows if row.role is Role.USER]
    assert {row.user for row in canaries} == {0, 1}
    assert {row.user for row in others} == {2, 3, 4}
    bodies = {x.request_id: x.body for x in server.exchanges.values()}
    for user in (0, 1):
        mine = [bodies[row.request_id] for row in canaries if row.user == user]
        assert len({body["prompt"] for body in mine}) == 1
        assert {body["temperature"] for body in mine} == {0.0}
        assert {body["max_tokens"] for body in mine} == {4}
    assert all("temperature" not in bodies[row.request_id] for row in others)
    alone = [min((row for row in canaries if row.user == user), key=_sent) for user in (0, 1)]
    assert alone[0].ended_ns <= alone[1].sent_ns
    assert alone[1].ended_ns <= min(map(_sent, others))
    assert all(row.answer for row in canaries)


def _ended(rows: list[RequestRow]) -> list[RequestRow]:
    """Without those whom the end of the load caught, perhaps before they were sent."""
    return [row for row in rows if row.outcome is not Outcome.CUT_OFF]


def _sent(row: RequestRow) -> int:
    return row.sent_ns


def test_a_storm_is_left_at_one_moment_and_comes_again(serve: Serve, tmp_path: Path) -> None:
    server = serve(engine)
    load = CancelStormLoad(
        kind="cancel_storm",
        streams=4,
        stayers=1,
        storms=3,
        abandon_after_tokens=3,
        prompt_tokens=[10, 20],
        answer_tokens=5000,
        stay_tokens=20,
    )
    rows = LoadProcess(tmp_path, server.url, load, users=1).result()
    left = sorted((row for row in rows if row.trial is not None), key=lambda row: row.trial or 0)
    assert {row.outcome for row in left} == {Outcome.ABANDONED}
    for _, wave in groupby(left, key=lambda row: row.trial):
        times = [row.abandoned_ns or 0 for row in wave]
        assert len(times) == 4
        assert max(times) - min(times) < 50 * MS
    assert all(row.tokens_read >= 3 for row in left)
    stayers = [row for row in rows if row.trial is None]
    assert {row.outcome for row in stayers} <= {Outcome.COMPLETED, Outcome.CUT_OFF}
    assert stayers
