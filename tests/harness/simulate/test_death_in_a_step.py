"""A replica that dies in the midst of a step: nothing of the step is seen.

Two replicas take requests in turn. One of them dies at 6 ms, in the step that began at 1 ms and
would have ended at 11 ms; a request sent again elsewhere begins there at the next boundary.
"""

from typing import Any

import pytest

from tests.harness.simulate.made_plans import Made, made
from tests.harness.simulate.test_cell import LEAVES, Played, since


def played(*requests: Made, at_s: float, seed: int = 1) -> Played:
    dies = {"at_s": at_s, "kind": "die", "share": 0.5}
    cluster = {"replicas": 2, "router": "round_robin", "outages": [dies]}
    return Played(*requests, run={"seed": seed}, cluster=cluster)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    ("settings", "outcome"),
    [({"max_tokens": 1}, "completed"), ({"max_tokens": 10}, "completed"), (LEAVES, "abandoned")],
)
def test_a_prompt_is_computed_anew_elsewhere(
    seed: int, settings: dict[str, Any], outcome: str
) -> None:
    """After a warm-up, so that the steps of the two replicas are numbered alike."""
    warm = [made(n, offset_s=0.0, max_tokens=20) for n in range(2)]
    late = [made(n, offset_s=1.0, **settings) for n in (2, 3)]
    run = played(*warm, *late, at_s=1.006, seed=seed)
    rows = {row.request_id.rpartition("-")[2]: row for row in run.rows}
    assert {row.outcome for row in run.rows} == {"completed", outcome}
    read = sorted([since(t) - 1000 for t in rows[name].token_times_ns] for name in ("3", "4"))
    num = 5 if settings is LEAVES else settings["max_tokens"]
    assert read == [[11 * n + 1 for n in range(first, first + num)] for first in (1, 2)]
    moved = next(name for name, _, event in run.log if event == "resubmitted")
    life = [event for name, _, event in run.log if name == moved]
    assert life.count("admitted") == life.count("first_token") == life.count("finished") == 1


def test_an_answer_under_way_fails_with_what_was_read() -> None:
    requests = [made(n, offset_s=0.0, max_tokens=3) for n in range(2)]
    run = played(*requests, at_s=0.03)  # in the third step, the last
    failed, completed = sorted(run.rows, key=lambda row: row.outcome == "completed")
    assert (failed.outcome, since(failed.ended_ns)) == ("failed", 30)
    assert [since(t) for t in failed.token_times_ns] == [12, 23]
    assert (completed.outcome, completed.tokens_read) == ("completed", 3)
    assert len(run.steps) == 3 + 2


def test_a_cancel_under_way_is_freed_by_the_death() -> None:
    """Its abort is applied at 67 ms, in whose step the replica dies: no one has heard of it."""
    requests = [
        made(0, offset_s=0.0, **LEAVES),
        made(1, offset_s=0.0),
        made(2, offset_s=0.0),
        made(3, offset_s=0.0),
    ]
    for seed in range(4):
        run = played(*requests, at_s=0.07, seed=seed)
        life = [(t_ms, event) for name, t_ms, event in run.log if name == "req-0-1"]
        freed = [t_ms for t_ms, event in life if event == "blocks_freed"]
        assert freed in ([67], [70])
        if freed == [70]:
            assert [event for _, event in life][-3:] == ["removed", "blocks_freed", "finished"]
            return
    pytest.fail("the replica of the one that leaves never died")
