"""The scripted server keeps to its script: what the harness is measured by is measured first."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from tests.e2e.running import scripted_server
from tools.truth.scripted_engine import Script, ScriptedEngine, Shown, Work

STEP_NS = 10


class Played:
    def __init__(self, **script: Any) -> None:
        self.now_ns = 1000
        self.engine = ScriptedEngine(Script(step_s=STEP_NS / 1e9, **script), self._clock_ns)
        self.shown = Shown(self.engine, self._clock_ns)

    def _clock_ns(self) -> int:
        return self.now_ns

    def ask(self, *, max_tokens: int = 100, prompt_tokens: int = 4) -> Work:
        return self.engine.submit("client", prompt_tokens, max_tokens, lambda _work: None)

    def steps(self, number: int = 1) -> None:
        for _ in range(number):
            step = self.engine.boundary()
            self.now_ns += STEP_NS
            if step is not None:
                self.engine.end_step(step)
                self.shown.step_ended()

    def leave(self, *works: Work) -> None:
        for work in works:
            self.engine.left(work)

    def running_after_each_step(self, number: int) -> list[int]:
        seen = []
        for _ in range(number):
            self.steps()
            seen.append(self.shown.gauges().running)
        return seen


def test_each_step_brings_everybody_in_the_batch_one_token() -> None:
    played = Played(slots=2)
    works = [played.ask(max_tokens=3) for _ in range(3)]
    played.steps(2)
    assert [len(work.token_times_ns) for work in works] == [2, 2, 0]
    played.steps()
    assert [work.finish_reason for work in works] == ["length", "length", None]
    played.steps()
    assert len(works[2].token_times_ns) == 1
    assert works[2].slot_from == "client"
    assert played.engine.steps[3].scheduled == {works[2].name: 4}
    late = played.ask()
    played.steps()
    assert late.admitted_ns is not None
    assert late.slot_from is None, "it came when the slot was free"


def test_the_first_slots_given_back_by_an_abort_are_lost() -> None:
    played = Played(slots=3, leak_slots=2)
    works = [played.ask() for _ in range(3)]
    played.steps()
    played.leave(*works)
    played.steps()
    assert [work.has_leaked_slot for work in works] == [True, True, False]
    assert played.shown.gauges().running == played.engine.slots_held == 2
    late = [played.ask(max_tokens=1) for _ in range(2)]
    played.steps()
    assert [work.admitted_ns is not None for work in late] == [True, False]


def test_a_wedged_engine_goes_on_with_those_it_has_and_admits_nobody() -> None:
    played = Played(slots=3, wedge_after=1)
    stays, leaves = played.ask(), played.ask()
    played.steps()
    played.leave(leaves)
    late = played.ask()
    played.steps(3)
    assert (len(stays.token_times_ns), late.admitted_ns) == (4, None)
    assert played.shown.gauges().waiting == 1


@pytest.mark.parametrize(
    ("script", "max_tokens", "seen"),
    [
        ({"gauge_every_steps": 3}, 4, [0, 0, 1, 0]),  # the last: there is nothing to do
        ({"gauge_every_s": 2.5 * STEP_NS / 1e9}, 3, [0, 0, 0, 0]),
        ({"gauge_every_s": 2.5 * STEP_NS / 1e9}, 100, [0, 0, 1, 1]),
    ],
)
def test_gauges_move_as_seldom_as_they_should(
    script: dict[str, Any], max_tokens: int, seen: list[int]
) -> None:
    played = Played(**script)
    played.ask(max_tokens=max_tokens)
    assert played.running_after_each_step(4) == seen


@pytest.mark.parametrize(
    ("error", "shown"),
    [("exact", [2, 2, 2]), ("stuck", [0, 0, 0]), ("double", [4, 4, 4]), ("late", [0, 0, 2])],
)
def test_the_counter_of_aborts_is_as_wrong_as_it_should_be(error: str, shown: list[int]) -> None:
    played = Played(aborted_counter=error, counter_late_s=2.5 * STEP_NS / 1e9)
    works = [played.ask(), played.ask()]
    played.steps()
    played.leave(*works)
    seen = []
    for _ in shown:
        played.steps()
        seen.append(played.shown.aborted())
    assert seen == shown
    assert f'finished_reason="abort"}} {shown[-1]}\n' in played.shown.page()


@contextmanager
def streaming(url: str, request_id: str, max_tokens: int) -> Iterator[Iterator[dict[str, Any]]]:
    headers = {"x-request-id": request_id}
    body = {"prompt": "abc", "max_tokens": max_tokens, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as response:
        lines = (line[6:] for line in response.iter_lines() if line.startswith("data: {"))
        yield (json.loads(line) for line in lines)


@pytest.mark.e2e
def test_over_http_it_sees_who_leaves_and_tells_the_truth() -> None:
    with scripted_server(slots=2, step_s=0.005) as server:
        with streaming(server.url, "stays", 3) as events:
            assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3]
        with streaming(server.url, "leaves", 1000) as events:
            next(events)
        with streaming(server.url, "last", 5) as events:
            assert len(list(events)) == 5
        stays, leaves, last = server.truth()["requests"]
        page = {"after": 0, "limit": 3}
        log = httpx.get(f"{server.url}/walkaway/lifecycle", params=page, trust_env=False)
    assert [work["client_id"] for work in (stays, leaves, last)] == ["stays", "leaves", "last"]
    assert stays["finish_reason"] == last["finish_reason"] == "length"
    assert leaves["finish_reason"] == "abort"
    assert leaves["closed_ns"] <= leaves["removed_ns"] <= leaves["freed_ns"]
    assert (log.headers["x-walkaway-next-after"], len(log.text.splitlines())) == ("3", 3)


def asked(url: str, **headers: str) -> httpx.Response:
    body = {"model": "another", "prompt": "abcd", "max_tokens": 3, "stream": True}
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, trust_env=False)


@pytest.mark.parametrize(
    ("manners", "status", "tokens"),
    [
        ({"status": 503}, 503, 0),
        ({"status": 429, "status_from": 2}, 200, 3),
        ({"only_model": True}, 404, 0),
        ({"key": "sesame"}, 401, 0),
        ({"at_once": True}, 200, 3),
        ({"length": 7}, 200, 7),
    ],
    ids=str,
)
def test_a_bad_server_keeps_to_its_manners(
    manners: dict[str, Any], status: int, tokens: int
) -> None:
    with scripted_server(step_s=0.001, **manners) as server:
        answer = asked(server.url)
    assert answer.status_code == status
    assert answer.text.count('"text": " w"') == tokens


def test_a_bad_server_dies_in_the_middle_of_an_answer() -> None:
    with (
        scripted_server(step_s=0.001, dies_after_tokens=2) as server,
        pytest.raises(httpx.RemoteProtocolError),
    ):
        asked(server.url)


def test_a_bad_server_hides_its_metrics_and_shows_a_certificate_of_its_own(tmp_path: Path) -> None:
    certificate = trustme.CA().issue_cert("127.0.0.1")
    file = tmp_path / "server.pem"
    file.write_bytes(certificate.private_key_and_cert_chain_pem.bytes())
    with scripted_server(certificate=str(file), metrics_key="sesame") as server:
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            asked(server.url)
        pages = [
            httpx.get(f"{server.url}/metrics", headers=headers, verify=False, trust_env=False)
            for headers in ({}, {"authorization": "Bearer sesame"})
        ]
    assert [page.status_code for page in pages] == [401, 200]
