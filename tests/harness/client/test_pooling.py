"""Requests that generate nothing: many documents to embed or to rank, read whole or left."""

import json
import time
from dataclasses import replace
from typing import Any

import httpx
import pytest

from harness.client.exchange import StreamClient
from harness.client.session import LoadSession
from harness.records import Delivery, Outcome
from harness.run.first_answers import fit_requests
from harness.run.settle import Asker, probe_service
from harness.workload.abandon import TimePlan
from harness.workload.observed_latency import ObservedLatency
from tests.harness.client.asking import MS, SPEC, Client, plan_of
from tests.harness.client.conftest import Exchange, Serve
from tests.harness.workload.mixes import load_of

PATHS = ("/v1/embeddings", "/v1/rerank")
TARGET: dict[str, Any] = {"extra_body": {}, "stream_options": None}
USAGE = {"prompt_tokens": 40, "total_tokens": 40}
EMBEDDED = {"object": "list", "data": [{"index": 0, "embedding": [0.5, -1e-3]}], "usage": USAGE}
RANKED = {"results": [{"index": 0, "relevance_score": 0.0}], "usage": USAGE}
LISTED = [{"index": 0, "score": 0.25}]  # as some rerankers do
FAILED = {"error": {"message": "no more than 2 documents"}}


def saying(*answers: Any) -> Any:
    """The next of these each time, then the last."""
    left = list(answers)

    def script(x: Exchange) -> None:
        body = json.dumps(left.pop(0) if len(left) > 1 else left[0]).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n"
        x.send(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))

    return script


@pytest.mark.parametrize("path", PATHS)
def test_documents_differ_and_no_field_is_of_a_text_that_is_generated(path: str) -> None:
    plan = TimePlan(plan="time", seconds=[1, 2], delivery=Delivery.UNARY, documents=5)
    load = load_of(plan, prompt_tokens=[30, 30])
    whole = plan_of("http://127.0.0.1:1", target={**TARGET, "path": path}, load=load)
    session = LoadSession(
        whole,
        api_key=None,
        tell=lambda _row: None,
        enough=lambda: None,
        give_up=lambda _why: None,
    )
    sent = []
    for n in range(2):
        spec = load.draw_request(seed=1, user=2, n=n, seen=ObservedLatency())
        others = session.other_documents(spec, n=n)
        client = session.client
        assert isinstance(client, StreamClient)
        issued = session.issue(replace(spec, messages=others))
        body = json.loads(client.message(issued, session.prompt(spec, n=n))[2])
        documents = body.pop("input", None) or body.pop("documents")
        assert body.keys() <= {"model", "query"}
        sent += documents
    assert len({*sent}) == len(sent) == 10
    assert {len(one) for one in sent} == {30}


@pytest.mark.parametrize(
    ("answer", "outcome", "prompt_tokens"),
    [
        (EMBEDDED, Outcome.COMPLETED, 40),
        (RANKED, Outcome.COMPLETED, 40),
        (LISTED, Outcome.COMPLETED, None),
        ({"embeddings": {"float": [[0.5]]}}, Outcome.COMPLETED, None),  # as Cohere's, Ollama's
        (FAILED, Outcome.FAILED, None),
        ({"data": []}, Outcome.FAILED, None),
    ],
    ids=["embedded", "ranked", "listed", "embeddings", "failed", "empty"],
)
def test_an_answer_is_whole_if_it_has_a_result(
    serve: Serve, answer: Any, outcome: Outcome, prompt_tokens: int | None
) -> None:
    client = Client(serve(saying(answer)).url, target={**TARGET, "path": PATHS[0]})
    row = client.ask(delivery=Delivery.UNARY)
    assert (row.outcome, row.tokens_read, row.prompt_tokens) == (outcome, 0, prompt_tokens)


def test_a_request_of_many_documents_is_left_before_its_answer(serve: Serve) -> None:
    server = serve(lambda x: x.client_left_within(30))
    client = Client(server.url, target={**TARGET, "path": PATHS[1]})
    began_ns = time.perf_counter_ns()
    row = client.ask(
        lambda _read: 20 * MS, delivery=Delivery.UNARY, planned_abandon=0, pause=20 * MS
    )
    assert row.outcome is Outcome.ABANDONED
    assert (row.abandoned_ns or 0) - began_ns >= 20 * MS
    assert server.exchanges[SPEC.request_id].is_over.wait(30)
    assert server.exchanges[SPEC.request_id].closed_how == "fin"


@pytest.mark.parametrize("path", PATHS)
def test_the_checks_around_a_load_ask_for_one_document(serve: Serve, path: str) -> None:
    server = serve(saying(EMBEDDED if path == PATHS[0] else RANKED))
    target = plan_of(server.url, target={**TARGET, "path": path}).target
    with httpx.Client() as client:
        asker = Asker(
            client=client,
            url=server.url,
            target=target,
            model="m",
            clock_ns=time.perf_counter_ns,
        )
        first = fit_requests(asker)
        assert (first.said, first.counted, first.error) == ([], [], None)
        probing = probe_service(asker, longest_s=10)
    assert not probing.errors
    assert all(0 < wait_s < 10 for wait_s in probing.ttft_s)
