"""Known texts in virtual time: the engine's own early stopping ends them.

A step takes 10 ms and 1 ms lies between two.
"""

from typing import Any

import pytest

from harness.workload.tasks import TaskText, WorkloadTask
from tests.harness.simulate.made_plans import made
from tests.harness.simulate.test_cell import LEAVES, Played, since

NUMBER, AFTER = 4, 0.5
MIX = [
    {"plan": "task", "task": list(WorkloadTask), "after_answer": AFTER, "early_stop": early}
    for early in (True, False)
]
LOAD = {"abandon_after_tokens": [], "mix": MIX, "stay_tokens": 800, "answer_tokens": 800}


def played(*requests: dict[str, Any]) -> Played:
    rows = [made(n, offset_s=0.0, **settings) for n, settings in enumerate(requests)]
    engine = {"max_model_len": 1024, "num_blocks": 256, "max_num_batched_tokens": 512}
    return Played(*rows, load=LOAD, engine=engine)


@pytest.mark.parametrize(
    ("text", "num_tokens", "why"),
    [
        (
            whole := TaskText(WorkloadTask.CHAT, NUMBER, AFTER, stops_early=False),
            whole.num_tokens,
            "stop",
        ),
        (code := TaskText(WorkloadTask.CODE, NUMBER, AFTER), code.num_answer, "stop"),
        (json := TaskText(WorkloadTask.EXTRACTION, NUMBER, AFTER), json.num_answer, "early_stop"),
    ],
    ids=lambda value: value.plan if isinstance(value, TaskText) else str(value),
)
def test_a_text_ends_where_the_engine_ends_it(text: TaskText, num_tokens: int, why: str) -> None:
    run = played({"text": text, "plan": text.plan, "max_tokens": 800})
    [row], life = run.rows, run.life()
    assert (row.outcome, row.finish_reason, row.plan) == ("completed", "stop", text.plan)
    assert row.completion_tokens == num_tokens
    assert [since(t_ns) for t_ns in row.token_times_ns] == [11 * n + 12 for n in range(num_tokens)]
    assert life["blocks_freed"] == 11 * num_tokens
    assert len(run.steps) == num_tokens
    assert ("removed", why) in run.why


def test_users_leave_texts_and_others_have_none() -> None:
    text = TaskText(WorkloadTask.CHAT, NUMBER, AFTER)
    left, other = played({"text": text, **LEAVES}, {"max_tokens": 20}).rows
    assert (left.outcome, left.tokens_read) == ("abandoned", 5)
    assert (other.outcome, other.completion_tokens) == ("completed", 20)
