"""The scripted server keeps to its script: what the harness is measured by is measured first."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.e2e.running import scripted_server
from tests.truth.scripted_engine import Script, ScriptedEngine, Work

STEP_NS = 10


class Clock:
    """Stands still unless told to move."""

    def __init__(self) -> None:
        self.now_ns = 1000

    def __call__(self) -> int:
        return self.now_ns


class Played:
    """An engine played through step by step."""

    def __init__(self, **script: float) -> None:
        self.clock = Clock()
        self.engine = ScriptedEngine(Script(step_s=STEP_NS / 1e9, **script), self.clock)  # type: ignore[arg-type]

    def ask(self, *, max_tokens: int = 100, prompt_tokens: int = 4) -> Work:
        return self.engine.submit("client", prompt_tokens, max_tokens, lambda _work: None)

    def steps(self, number: int = 1) -> None:
        for _ in range(number):
            step = self.engine.boundary()
            self.clock.now_ns += STEP_NS
            if step is not None:
                self.engine.end_step(step)

    def events(self, work: Work) -> list[str]:
        mine = (e for e in self.engine.lifecycle if e["request_id"] == work.name)
        return [entry["event"] for entry in mine]


def test_each_step_brings_everybody_in_the_batch_one_token() -> None:
    played = Played(slots=2)
    works = [played.ask(max_tokens=3) for _ in range(3)]
    played.steps(2)
    assert [len(work.token_times_ns) for work in works] == [2, 2, 0]
    played.steps(1)
    assert [work.finish_reason for work in works] == ["length", "length", None]
    played.steps(1)
    assert len(works[2].token_times_ns) == 1
    assert played.engine.steps[3].scheduled == {works[2].name: 4}


@pytest.mark.parametrize("linger_steps", [0, 1, 3])
def test_it_goes_on_for_so_many_steps(linger_steps: int) -> None:
    played = Played(linger_steps=linger_steps)
    work = played.ask()
    played.steps(2)
    played.engine.left(work)
    played.steps(5)
    assert len(work.token_times_ns) == 2 + linger_steps
    assert len(work.sent_times_ns) == 2
    assert work.finish_reason == "abort"
    assert played.engine.free_blocks == played.engine.script.num_blocks


def test_slot_and_blocks_are_held_for_the_delay() -> None:
    played = Played(slots=1, free_delay_s=2.5 * STEP_NS / 1e9)
    first, second = played.ask(), played.ask()
    played.steps(1)
    played.engine.left(first)
    played.steps(3)
    assert first.removed_ns == 1000 + STEP_NS
    assert (first.freed_ns, second.admitted_ns) == (None, None)
    played.steps(1)
    assert first.freed_ns == second.admitted_ns == 1000 + 4 * STEP_NS
    assert second.slot_from == "client"


def test_every_so_many_are_never_stopped() -> None:
    played = Played(slots=6, ghost_every=3)
    works = [played.ask(max_tokens=5) for _ in range(6)]
    played.steps(1)
    for work in works:
        played.engine.left(work)
    played.steps(6)
    reasons = [work.finish_reason for work in works]
    assert reasons == ["abort", "abort", "length", "abort", "abort", "length"]
    assert "abort_received" not in played.events(works[2])


def test_an_aborted_request_leaves_blocks_behind_and_a_queued_one_does_not() -> None:
    played = Played(slots=1, leak_blocks=2, block_size=4)
    running, queued = played.ask(prompt_tokens=9), played.ask(prompt_tokens=9)
    played.steps(1)
    played.engine.left(running)
    played.engine.left(queued)
    played.steps(1)
    assert running.leaked_blocks == 2
    assert queued.leaked_blocks == 0
    assert queued.admitted_ns is None
    assert played.engine.free_blocks == played.engine.script.num_blocks - 2


def test_nobody_who_came_later_counts_as_having_waited() -> None:
    played = Played(slots=1)
    played.ask(max_tokens=1)
    played.steps(2)
    late = played.ask(max_tokens=1)
    played.steps(1)
    assert late.admitted_ns is not None
    assert late.slot_from is None


@contextmanager
def streaming(url: str, request_id: str, **body: Any) -> Iterator[Iterator[dict[str, Any]]]:
    headers = {"x-request-id": request_id}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as response:
        lines = (line[6:] for line in response.iter_lines() if line.startswith("data: {"))
        yield (json.loads(line) for line in lines)


@pytest.mark.e2e
def test_over_http_it_sees_who_leaves_and_tells_the_truth() -> None:
    with scripted_server(slots=2, step_s=0.005) as server:
        talk_to(server.url)


def talk_to(url: str) -> None:
    with streaming(url, "stays", prompt="abc", max_tokens=3) as events:
        counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == [1, 2, 3]
    with streaming(url, "leaves", prompt="abc", max_tokens=1000) as events:
        next(events)
    with streaming(url, "last", prompt="abc", max_tokens=5) as events:
        assert len(list(events)) == 5
    stays, leaves, last = httpx.get(f"{url}/truth").json()["requests"]
    assert [work["client_id"] for work in (stays, leaves, last)] == ["stays", "leaves", "last"]
    assert stays["finish_reason"] == last["finish_reason"] == "length"
    assert leaves["finish_reason"] == "abort"
    assert leaves["closed_ns"] <= leaves["removed_ns"] <= leaves["freed_ns"]
    lifecycle = httpx.get(f"{url}/walkaway/lifecycle", params={"after": 0, "limit": 3})
    assert lifecycle.headers["x-walkaway-next-after"] == "3"
    assert len(lifecycle.text.splitlines()) == 3
