"""A server that answers 503 is waited for, and no longer than it is said."""

from collections.abc import Callable, Iterator
from itertools import count

import httpx
import pytest

from harness.errors import InterruptedRunError, TargetError
from harness.run.loading import LOADING_S, unready_answer, unready_page, wait_while_loading
from harness.run.measurement import Measurement
from harness.run.progress import Progress
from harness.run.settle import Asker
from harness.workload.target import Target
from tests.harness.run.conftest import Begin

BODY = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
LOADING = httpx.Response(503, json=BODY)
SAID = "HTTP 503: Loading model"


class Told(Progress):
    def __init__(self) -> None:
        self.phases: list[str] = []

    def phase(self, text: str) -> None:
        self.phases.append(text)


@pytest.fixture
def run(begin: Begin) -> Measurement:
    run = begin()
    run.progress = Told()
    return run


def told(run: Measurement) -> list[str]:
    assert isinstance(run.progress, Told)
    return run.progress.phases


def test_it_is_asked_until_it_serves(run: Measurement) -> None:
    answers: Iterator[str | None] = iter(["busy", "busy", None])
    wait_while_loading(run, lambda: next(answers))
    assert list(answers) == []
    assert told(run) == [f"waiting at most {LOADING_S:g} s for the server to load its model: busy"]
    wait_while_loading(run, lambda: None)
    assert len(told(run)) == 1


def test_one_that_never_serves_is_a_failure_that_says_what_it_is(run: Measurement) -> None:
    seconds = count(0, 50)
    with pytest.raises(TargetError, match=r"still answers 503 after 120 s \(busy\): its model is"):
        wait_while_loading(run, lambda: "busy", clock_s=lambda: next(seconds))
    assert next(seconds) == 200
    run.interruption.requested = True
    with pytest.raises(InterruptedRunError):
        wait_while_loading(run, lambda: "busy")


def refuse(_: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


def test_the_servers_words_are_kept() -> None:
    page = httpx.MockTransport(lambda _: LOADING)
    with httpx.Client(transport=page) as client:
        assert unready_page(client, "http://s", "/v1/models") == f"GET /v1/models: {SAID}"
        target = Target(name="t", description="d", settle_s=0.0)
        asker = Asker(client=client, url="http://s", target=target, model="m", clock_ns=lambda: 0)
        assert unready_answer(asker, longest_s=9) == f"POST /v1/completions: {SAID}"
    for other in (lambda _: httpx.Response(404), refuse):
        with httpx.Client(transport=httpx.MockTransport(other)) as client:
            assert unready_page(client, "http://s", "/v1/models") is None
            asker = Asker(
                client=client, url="http://s", target=target, model="m", clock_ns=lambda: 0
            )
            assert unready_answer(asker, longest_s=9) is None


def test_a_server_that_takes_a_request_and_sends_nothing_is_named_at_once() -> None:
    def silent(_: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("nothing came")

    def asking(answer: Callable[[httpx.Request], httpx.Response]) -> Asker:
        client = httpx.Client(transport=httpx.MockTransport(answer))
        target = Target(name="t", description="d", settle_s=0.0)
        return Asker(client=client, url="http://s", target=target, model="m", clock_ns=lambda: 0)

    said = "takes requests and does not answer: POST http://s/v1/completions got nothing within 9"
    with pytest.raises(TargetError, match=said):
        unready_answer(asking(silent), longest_s=9)
    assert unready_answer(asking(refuse), longest_s=9) is None
    page = asking(silent).client
    with pytest.raises(TargetError, match=r"does not answer: GET http://s/v1/models got no answer"):
        unready_page(page, "http://s", "/v1/models")
