"""Known texts in virtual time: the engine's own early stopping ends them.

A step takes 10 ms and 1 ms lies between two; a text of n words has n + 1 tokens, with its end.
"""

from typing import Any

import pytest

from reference_engine.core.early_stop import EarlyStopping, Task
from reference_engine.simulate.plan import PlanError, Text
from tests.reference_engine.simulate.made_plans import asked
from tests.reference_engine.simulate.test_cell import LEAVES, Played, since

WORDS = "one two three four five six seven"
LABELS = EarlyStopping(task=Task.CLASSIFICATION, labels=("four",))


def played(*requests: dict[str, Any], **conditions: Any) -> Played:
    text = Text(prompt="count", answer=WORDS, **conditions)
    rows = [asked(n, offset_s=0.0, **settings) for n, settings in enumerate(requests)]
    return Played(*rows, texts=[text])


@pytest.mark.parametrize(
    ("conditions", "num_tokens", "why"),
    [
        ({}, 8, "stop"),
        ({"stop": ("three",)}, 3, "stop"),
        ({"early_stop": LABELS}, 4, "early_stop"),
    ],
)
def test_a_text_ends_where_the_engine_ends_it(
    conditions: dict[str, Any], num_tokens: int, why: str
) -> None:
    run = played({"text": 0, "plan": "task:chat:0:0"}, **conditions)
    [row], life = run.rows, run.life()
    assert (row.outcome, row.finish_reason, row.plan) == ("completed", "stop", "task:chat:0:0")
    assert row.completion_tokens == num_tokens
    assert [since(t_ns) for t_ns in row.token_times_ns] == [11 * n + 12 for n in range(num_tokens)]
    assert life["blocks_freed"] == 11 * num_tokens
    assert len(run.steps) == num_tokens
    assert ("removed", why) in run.why


def test_users_leave_texts_and_others_have_none() -> None:
    run = played({"text": 0, **LEAVES}, {"max_tokens": 20})
    left, other = run.rows
    assert (left.outcome, left.tokens_read) == ("abandoned", 5)
    assert (other.outcome, other.completion_tokens) == ("completed", 20)


def test_a_text_must_be_in_the_plan() -> None:
    with pytest.raises(PlanError, match="request 0: the plan has no text 1"):
        played({"text": 1})
