"""Who had little left to run, by plan or by chance, and what can be done about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from tests.harness.told import summary_of

if TYPE_CHECKING:
    from tests.made_up.run import RunBuilder

    MakeRun = Callable[[], RunBuilder]


def texts(run: RunBuilder, word: str) -> list[str]:
    return [one["text"] for one in summary_of(run.frames())["validity"] if word in one["text"]]


def leave(run: RunBuilder, name: str, t0: float = 33, reason: str = "abort", **more: Any) -> None:
    """Left in the step from 30 to 40, at whose end its third token is sampled."""
    run.abandon(name, t0=t0, tokens=[21, 31], **more)
    run.events(name, arrived=1, admitted=10.1, first_token=20)
    if reason == "abort":
        run.events(name, disconnected=34, abort_received=35.5, generated=2)
    run.events(name, reason, removed=40.1, blocks_freed=40.2, finished=40.3, generated=3)


def steps(run: RunBuilder, *names: str) -> None:
    run.step(10, 20, sampled=names, **dict.fromkeys(names, 5))
    run.steps(2, 3, *names)
    run.steps(4, 5, "other")


@pytest.mark.parametrize(
    ("config", "remedy"),
    [
        ({"max_model_len": 4096}, "raise `answer_tokens`, or lower `settle.seconds`"),
        ({"max_model_len": 399}, "a whole context of 399 tokens takes 3.99 s: lower `settle.secon"),
        ({}, "raise `answer_tokens` if the model's context allows it"),
    ],
)
def test_advice_is_what_can_be_followed(
    make_run: MakeRun, config: dict[str, int], remedy: str
) -> None:
    run = make_run()
    assert run.manifest.target is not None
    run.manifest.target.config = {"max_num_seqs": 2, "block_size": 4, **config}
    leave(run, "a", max_tokens=300)
    steps(run, "a")
    (text,) = texts(run, "less than twice the settle time")
    assert text.startswith("1 of 1 abandoned requests")
    assert remedy in text


def test_a_race_is_told_by_how_it_ended_and_is_no_lack_of_time(make_run: MakeRun) -> None:
    run = make_run()
    race: dict[str, Any] = {"plan": "last_token", "max_tokens": 4}
    leave(run, "won", **race)
    leave(run, "lost", t0=35, reason="length", **race)
    leave(run, "late", t0=41, reason="length", **race)
    run.request(
        "read", sent=0, tokens=[21, 31, 41], outcome="completed", end=42,
        planned_abandon=2, completion_tokens=3, **race,
    )  # fmt: skip
    steps(run, "won", "lost", "late", "read")
    assert texts(run, "less than twice") == []
    assert texts(run, "found the answer over") == []
    (text,) = texts(run, "raced for the last token")
    assert text == (
        "of 4 who raced for the last token, 1 were cancelled, 1 left before the server had "
        "finished and were not (the last token was being made), 1 left after it had finished, and "
        "1 had read the whole answer"
    )
    run.another_engine()
    (text,) = texts(run, "raced for the last token")
    assert "of 4 who raced for the last token, 1 had read the whole answer; of the 3" in text


def test_a_race_that_the_server_won_makes_no_ghost(make_run: MakeRun) -> None:
    run = make_run()
    for name, plan in (("races", "last_token"), ("leaves", "tokens:2")):
        run.abandon(name, t0=33, tokens=[21, 31], plan=plan, max_tokens=5)
        run.events(name, arrived=1, admitted=10.1, first_token=20)
        run.events(name, "length", removed=60.1, blocks_freed=60.2, finished=60.3, generated=5)
    steps(run, "races", "leaves")
    ghosts = summary_of(run.frames())["metrics"]["ghost_rate"]
    assert (ghosts["n"], ghosts["mean"]) == (1, 1.0)


def test_nobody_raced(make_run: MakeRun) -> None:
    run = make_run()
    leave(run, "a")
    steps(run, "a")
    assert texts(run, "raced") == []
