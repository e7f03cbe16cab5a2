"""Remarks: warnings, too little time left to run, plans to leave while queued."""

from typing import Any

import pytest

from harness.analysis.recovery import about_void_trials
from harness.records import Delivery, TokenCounting, VoidTrial
from harness.run.pipeline import find_void
from tests.harness.analysis.scenes import accounts
from tests.harness.told import MakeRun, summary_of, warnings
from tests.made_up.run import RunBuilder

OK: dict[str, Any] = {"sent": 0, "tokens": [1], "outcome": "completed", "end": 4}
EMPTY = OK | {"tokens": []}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [OK | {"tokens": [1, 2, 3], "max_tokens": 2}],
            ["1 of 1 answers were longer than their `max_tokens`"],
        ),
        ([EMPTY, OK], ["1 of 2 completed answers held no token"]),
        (
            [EMPTY | {"outcome": "failed", "error": f"HTTP 500: block {i}"} for i in range(3)]
            + [EMPTY | {"outcome": "rejected", "error": "HTTP 429: full"}],
            [
                "3 of 4 requests ended with: HTTP 500: block 0",
                "1 of 4 requests ended with: HTTP 429: full",
            ],
        ),
        ([OK, OK | {"resent": True}], ["1 of 2 requests were sent once more"]),
        (
            [OK | {"tokens": [1, 2], "planned_abandon": 5}],
            [
                "1 of 1 requests that were to be abandoned were answered before",
                "does the target know `ignore_eos`?",
                "Planned to be abandoned: 1; they ended as: 1 completed",
            ],
        ),
    ],
)
def test_strange_answers_are_warned_of(
    make_run: MakeRun, rows: list[dict[str, Any]], said: list[str]
) -> None:
    run, plain = make_run(), make_run()
    for number, row in enumerate(rows):
        run.request(f"{number}", **row)
        plain.request(f"{number}", **OK)
    for words in said:
        assert len([text for text in warnings(run) if words in text]) == 1
        assert not any(words in text for text in warnings(plain))


def test_methods_that_nothing_explains_are_a_warning(run: RunBuilder) -> None:
    run.metrics(running="exact", waiting="exact")
    for i in range(30):
        t0 = 20.0 + 30 * i
        run.abandon(f"{i}", t0=t0, tokens=[t0 - 5])
        run.requests[-1].sent_ns += round((t0 - 10) * 1e6)
        run.events(f"{i}", arrived=t0 - 10, admitted=t0 - 9, removed=t0 + 1, finished=t0 + 2)
        run.events(f"{i}", blocks_freed=t0 + 2)
    for t in range(0, 1000, 5):
        run.scrape(t, "its_running", 3)  # whatever is held: three of nobody
        run.scrape(t, "its_waiting", t % 2)
    run.idle({"running": 0, "waiting": 0}, {"running": 0, "waiting": 0})
    run.scrape(1001, "its_running", 0)
    run.scrape(1001, "its_waiting", 0)
    summary = summary_of(run.frames())
    (pair,) = [
        one
        for one in summary["agreement"]
        if (one["metric"], one["method"]) == ("cancel_latency_s", "gauge")
    ]
    assert pair["exact"] == pytest.approx(0.002)
    assert not pair["agrees"]
    assert any("more apart than interval and refresh rule explain" in t for t in warnings(run))


def test_what_was_read_is_said_to_be_counted_by_events_only_if_any_was(make_run: MakeRun) -> None:
    run = accounts(make_run())
    assert texts(run, "asked for an answer in one piece") == []
    run.requests[-1].delivery = Delivery.UNARY
    assert len(texts(run, "asked for an answer in one piece")) == 1
    run = make_run()
    run.abandon("a", t0=50, tokens=[], token_counting=TokenCounting.EVENTS)
    assert texts(run, "counted as events") == []


@pytest.mark.parametrize(("every", "is_said"), [(20, False), (58, True)])
def test_a_page_that_is_read_more_seldom_than_asked_is_warned_of(
    run: RunBuilder, every: int, is_said: bool
) -> None:
    run = accounts(run)
    run.server_metrics.clear()
    run.manifest.scrape_interval_s = 0.02
    for t in range(5, 1000, every):
        run.scrape(t, "its_running", float(t < 500))
    assert any("was to be read every 0.02 s" in text for text in warnings(run)) is is_said


def test_void_trials_are_told_with_their_reasons(run: RunBuilder) -> None:
    run = accounts(run)
    run.manifest.workload = {"load": {"trials": 2}, "run": {}}
    void = [VoidTrial(trial=0, arm=arm, why="no slot") for arm in ("control", "abandon")]
    run.manifest.void_trials = void
    (said,) = about_void_trials(run.frames().manifest)
    assert (said.level, said.text) == ("warning", "void trials: 2, because no slot (2)")
    run.manifest.void_trials = [*void, VoidTrial(trial=1, arm="abandon", why="too short")]
    (said,) = about_void_trials(run.frames().manifest)
    assert said.level == "invalid"
    assert said.text == "void trials: 3, because no slot (2); too short (1)"
    failure = find_void(run.manifest)
    assert str(failure) == "every trial is void; the first, arm control: no slot"


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
    run: RunBuilder, config: dict[str, int], remedy: str
) -> None:
    assert run.manifest.target is not None
    run.manifest.target.config = {"max_num_seqs": 2, "block_size": 4, **config}
    leave(run, "a", max_tokens=300)
    steps(run, "a")
    (text,) = texts(run, "less than twice the settle time")
    assert text.startswith("1 of 1 abandoned requests")
    assert remedy in text


def test_a_race_is_told_by_how_it_ended_and_is_no_lack_of_time(run: RunBuilder) -> None:
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
    (text,) = texts(run, "races for the last token")
    assert text == (
        "of 4 races for the last token, 1 were cancelled, 1 left before the server had "
        "finished and were not (the last token was being made), 1 left after it had finished, and "
        "1 had read the whole answer"
    )
    run.another_engine()
    (text,) = texts(run, "races for the last token")
    assert "of 4 races for the last token, 1 read the whole answer; which of the other 3" in text


def test_a_race_that_the_server_won_makes_no_ghost(run: RunBuilder) -> None:
    for name, plan in (("races", "last_token"), ("leaves", "tokens:2")):
        run.abandon(name, t0=33, tokens=[21, 31], plan=plan, max_tokens=5)
        run.events(name, arrived=1, admitted=10.1, first_token=20)
        run.events(name, "length", removed=60.1, blocks_freed=60.2, finished=60.3, generated=5)
    steps(run, "races", "leaves")
    ghosts = summary_of(run.frames())["metrics"]["ghost_rate"]
    assert (ghosts["n"], ghosts["mean"]) == (1, 1.0)


@pytest.mark.parametrize(
    ("plan", "waiting", "said"),
    [
        ("queued", [0.0, 0.0, 0.0], "1 were to leave while queued, but its_waiting was 0"),
        ("queued", [0.0, 2.0, 0.0], None),
        ("queued", [], "1 were to leave while queued, but its_waiting was not scraped"),
        ("tokens:0", [0.0, 0.0, 0.0], None),
    ],
)
def test_a_queue_that_nobody_was_seen_in(
    run: RunBuilder, plan: str, waiting: list[float], said: str | None
) -> None:
    run.another_engine()
    run.metrics(waiting="exact")
    run.abandon("a", t0=500, tokens=[], plan=plan)
    for number, value in enumerate(waiting):
        run.scrape(100.0 * number, "its_waiting", value)
    run.idle({"waiting": 0.0}, {"waiting": 0.0})
    texts = [one["text"] for one in summary_of(run.frames())["validity"]]
    found = [text for text in texts if "to leave while queued" in text]
    assert [text.startswith(said or "?") for text in found] == ([True] if said else [])
