"""Requests that come after another: repeats, and turns of a session."""

from typing import Any

import pytest

from harness.analysis.figure import NotMeasurable
from harness.analysis.next_requests import (
    asking_again_figures,
    cached_again_figures,
    recomputed_history_figures,
    session_remarks,
    turn_figures,
)
from harness.analysis.run_facts import run_facts
from harness.records import Outcome
from tests.harness.told import metric, ms
from tests.made_up.run import RunBuilder

STOPPED, WHOLE = Outcome.ABANDONED, Outcome.COMPLETED


def test_repetitions_without_an_answer_or_a_log_say_so(run: RunBuilder) -> None:
    run.abandon("a", t0=25, tokens=[20])
    run.abandon("b", t0=45, tokens=[40], repeats="a")
    frames = run.frames()
    found = asking_again_figures(frames.requests)
    assert found["attempts_per_answer"] == NotMeasurable("no answer was completed")
    cached = cached_again_figures(frames, run_facts(frames))["cached_again"]
    assert isinstance(cached, NotMeasurable)


def turn(
    run: RunBuilder, name: str, sent: float, follows: Outcome | None, prompt: int, **more: Any
) -> None:
    """Its first token comes after 10 ms and two more for each 100 tokens of its prompt."""
    first = sent + 10 + prompt / 50
    run.request(
        name,
        sent=sent,
        tokens=[first],
        outcome="completed",
        end=first + 1,
        follows=follows,
        prompt_tokens=prompt,
        **more,
    )


def session(run: RunBuilder, *, says_cached: bool) -> None:
    """After a stop 30 tokens of the history are computed again, after an answer 2."""
    cached = {"b": 80, "c": 140, "d": 150} if says_cached else {}
    turn(run, "a", 0, None, 100)
    turn(run, "b", 100, STOPPED, 120, history_tokens=110, cached_tokens=cached.get("b"))
    turn(run, "c", 200, WHOLE, 150, history_tokens=142, cached_tokens=cached.get("c"))
    cut = {"history_tokens": 60, "history_cut": 90}
    turn(run, "d", 300, WHOLE, 70, **cut, cached_tokens=cached.get("d"))


def test_turns_are_told_apart_by_how_the_turn_before_ended(run: RunBuilder) -> None:
    session(run, says_cached=False)
    found = turn_figures(run.frames().requests)
    assert {name: (metric(one).n, metric(one).mean) for name, one in found.items()} == {
        "ttft_after_stop_s": (1, ms(12.4)),
        "ttft_after_answer_s": (1, ms(13)),  # a cut history is left out
    }


def test_cut_and_forgotten_sessions_are_named(run: RunBuilder) -> None:
    session(run, says_cached=False)
    turn(run, "e", 400, WHOLE, 90, history_tokens=80, repeats="d")
    cut, forgotten = session_remarks(run.frames().requests)
    assert cut.startswith("turns that did not fit into the longest of `load.prompt_tokens`: 1; 90 ")
    assert forgotten.startswith("turns that named a response which the server no longer had: 1; ")


@pytest.mark.parametrize("method", ["exact", "client"])
def test_what_is_computed_again_is_in_the_log_or_told_by_the_server(
    run: RunBuilder, method: str
) -> None:
    session(run, says_cached=method == "client")
    if method == "exact":
        for name, computed, at in (("b", 40, 100), ("c", 10, 200), ("d", 70, 300)):
            run.events(name, arrived=at)
            run.step(at, at + 5, sampled=(), **{name: computed - 4})
            run.step(at + 5, at + 10, sampled=(name,), **{name: 4})
            run.step(at + 10, at + 15, sampled=(name,), **{name: 1})
    frames = run.frames()
    found = recomputed_history_figures(frames, run_facts(frames))
    stop, answer = (metric(found[f"recomputed_after_{what}"]) for what in ("stop", "answer"))
    assert (stop.mean, stop.n, stop.method) == (30, 1, method)
    assert (answer.mean, answer.n, answer.method) == (2, 1, method)


def test_a_server_that_says_nothing_of_its_cache_is_not_taken_for_one_without(
    run: RunBuilder,
) -> None:
    session(run, says_cached=False)
    frames = run.frames()
    found = recomputed_history_figures(frames, run_facts(frames))
    why = found["recomputed_after_stop"]
    assert isinstance(why, NotMeasurable)
    assert "does not say how much of a prompt was cached" in why.reason
