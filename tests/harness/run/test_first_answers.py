"""The check before the load: what a strict server refuses is left out, and events are counted."""

import json
import time
from collections.abc import Callable, Collection
from typing import Any

import httpx
import pytest

from harness.load.dialect import dialect_of, limit_key_of, request_body, route
from harness.records import Delivery
from harness.run.first_answers import MOST_REFUSALS, check_requests, fit_requests, without_refused
from harness.run.settle import Asker
from harness.workload.target import Target
from tests.harness.run.conftest import Begin

BASE = {"model", "messages", "prompt", "input", "stream"}
OPTIONS = {"include_usage": True, "continuous_usage_stats": True}
EVERYTHING = Target(
    name="t",
    description="d",
    settle_s=0.0,
    path="/v1/chat/completions",
    extra_body={"ignore_eos": True, "seed": 1},
    stream_options=OPTIONS,
)
Refusal = Callable[[str], Any]


def of_openai(field: str) -> Any:
    said = f"Unsupported parameter: '{field}' is not supported with this model."
    if field == "max_tokens":
        said += " Use 'max_completion_tokens' instead."
    return {"error": {"message": said, "type": "invalid_request_error", "param": field}}


def of_pydantic(field: str) -> Any:
    """Which repeats the whole request."""
    echo = {"seed": 1, "ignore_eos": True, "stream_options": OPTIONS, "max_tokens": 24}
    found = {"loc": ["body", field], "msg": "Extra inputs are not permitted", "input": echo}
    return {"detail": [{"type": "extra_forbidden", **found}]}


def in_a_sentence(field: str) -> Any:
    known = "expected one of `model`, `seed`, `ignore_eos`, `stream_options`, `max_tokens`"
    return {"object": "error", "message": f"unknown field `{field}`, {known}"}


def asking(answer: Callable[[httpx.Request], httpx.Response], target: Target) -> Asker:
    client = httpx.Client(transport=httpx.MockTransport(answer))
    return Asker(
        client=client, url="http://s", target=target, model="m", clock_ns=time.perf_counter_ns
    )


def events(texts: Collection[str], usage: int | None) -> bytes:
    chunks: list[Any] = [{"choices": [{"delta": {"content": text}}]} for text in texts]
    chunks.append({"choices": [{"delta": {}, "finish_reason": "length"}]})
    if usage is not None:
        chunks.append({"choices": [], "usage": {"completion_tokens": usage}})
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    return "".join([*lines, "data: [DONE]\n\n"]).encode()


class Strict:
    """Refuses a request for its first field that it does not know."""

    def __init__(self, knows: Collection[str], refuse: Refusal, status: int = 400) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._knows, self._refuse, self._status = {*BASE, *knows}, refuse, status

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.bodies.append(body)
        unknown = [key for key in body if key not in self._knows]
        unknown += [key for key in body.get("stream_options", ()) if key not in self._knows]
        if unknown:
            return httpx.Response(self._status, json=self._refuse(unknown[0]))
        return httpx.Response(200, content=events(["a"] * 24, 24))


@pytest.mark.parametrize("refuse", [of_openai, of_pydantic, in_a_sentence])
@pytest.mark.parametrize("status", [400, 422])
@pytest.mark.parametrize(
    ("knows", "extra", "options", "limit"),
    [
        ({"seed", "stream_options", *OPTIONS, "max_tokens"}, {"seed": 1}, OPTIONS, "max_tokens"),
        (
            {"ignore_eos", "seed", "max_tokens", "stream_options", "include_usage"},
            *(EVERYTHING.extra_body, {"include_usage": True}, "max_tokens"),
        ),
        ({"max_tokens"}, {}, None, "max_tokens"),
        (
            {"ignore_eos", "seed", "stream_options", *OPTIONS, "max_completion_tokens"},
            *(EVERYTHING.extra_body, OPTIONS, "max_completion_tokens"),
        ),
        (set(), {}, None, None),
    ],
)
def test_what_a_strict_server_refuses_is_left_out(
    refuse: Refusal,
    status: int,
    knows: set[str],
    extra: dict[str, Any],
    options: dict[str, bool] | None,
    limit: str | None,
) -> None:
    server = Strict(knows, refuse, status)
    asker, said, counted = fit_requests(asking(server, EVERYTHING))
    assert (asker.target.extra_body, asker.target.stream_options) == (extra, options)
    assert limit_key_of(asker.target) == limit
    assert len(said) == len(server.bodies) - 1  # each refusal is said once
    assert counted == [(24, 24)]


@pytest.mark.parametrize(
    ("said", "limit"),
    [
        ("Please use max_completion_tokens.", "max_completion_tokens"),
        ("max_tokens is deprecated", "max_completion_tokens"),
        ("Not supported parameters: max_tokens", "max_completion_tokens"),
        ("Extra inputs are not permitted: max_tokens; see max_output_tokens", "max_output_tokens"),
        ("max_tokens must be at most 16", "max_tokens"),
        ("max_tokens exceeds the context", "max_tokens"),
    ],
)
def test_the_limit_goes_by_another_name(said: str, limit: str) -> None:
    found = without_refused(EVERYTHING, 400, said.encode())
    assert limit_key_of(EVERYTHING if found is None else found[0]) == limit


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, b"max_tokens is too large: 24 > 16"),
        (400, b'{"error": "the model is not loaded"}'),
        (400, b'{"error": "no_seed_found"}'),
        (401, b"seed"),
        (404, b'{"error": {"message": "ignore_eos is unknown"}}'),
        (429, b"too many requests with seed"),
        (500, b"seed"),
        (400, b'{"detail": [{"loc": ["body", "messages"], "input": {"seed": 1}}]}'),
    ],
)
def test_other_refusals_change_nothing(status: int, body: bytes) -> None:
    assert without_refused(EVERYTHING, status, body) is None
    asker = asking(lambda _: httpx.Response(status, content=body), EVERYTHING)
    assert fit_requests(asker) == (asker, [], [])


def test_a_server_that_sends_us_round_in_a_circle_is_asked_no_more() -> None:
    def other(request: httpx.Request) -> httpx.Response:
        keys = ("max_completion_tokens", "max_tokens")
        mine, yours = keys if keys[0] in json.loads(request.content) else keys[::-1]
        return httpx.Response(400, text=f"{mine} is not supported, use {yours} instead")

    _, said, counted = fit_requests(asking(other, EVERYTHING))
    assert (len(said), counted) == (MOST_REFUSALS, [])


@pytest.mark.parametrize(
    ("per_event", "usage", "asked", "counted"),
    [
        (1, True, [24], [(24, 24)]),
        (4, True, [24, 13], [(24, 6), (13, 4)]),
        (4, False, [24], []),
    ],
)
def test_the_tokens_of_events_are_counted(
    per_event: int, usage: bool, asked: list[int], counted: list[tuple[int, int]]
) -> None:
    seen = []

    def flushing(request: httpx.Request) -> httpx.Response:
        tokens = json.loads(request.content)["max_tokens"]
        seen.append(tokens)
        texts = ["a"] * -(-tokens // per_event)
        return httpx.Response(200, content=events(texts, tokens if usage else None))

    _, said, found = fit_requests(asking(flushing, EVERYTHING))
    assert (seen, said, found) == (asked, [], counted)


def test_a_run_goes_on_with_what_the_server_takes(begin: Begin) -> None:
    run = begin(engine="vllm")
    server = Strict({"max_tokens", "stream_options", *OPTIONS}, of_openai)
    asker, _ = check_requests(run, asking(server, run.target))
    assert run.target == asker.target
    assert "ignore_eos" not in run.target.extra_body
    (note,) = run.notes.texts()
    assert note.startswith("the server refuses `ignore_eos`, so it is left out: HTTP 400: Unsuppor")


def test_our_own_engine_takes_what_we_send(begin: Begin) -> None:
    ours = begin(engine="reference")
    silent = asking(lambda _: pytest.fail("our own engine is not asked"), ours.target)
    assert check_requests(ours, silent) == (silent, [])


@pytest.mark.parametrize(
    ("path", "dialect", "limit"),
    [
        ("/v1/completions", "completions", "max_tokens"),
        ("/openai/deployments/m/chat/completions?api-version=1", "chat", "max_tokens"),
        ("/v1/chat/completions/", "chat", "max_tokens"),
        ("/v1/chat/completions/?x=/completions", "chat", "max_tokens"),
        ("/v1/responses?a=b", "responses", "max_output_tokens"),
        ("/v1/messages//", "messages", "max_tokens"),
        ("/generate", "completions", "max_tokens"),
    ],
)
def test_the_dialect_is_that_of_the_path_alone(path: str, dialect: str, limit: str) -> None:
    target = EVERYTHING.model_copy(update={"path": path})
    assert dialect_of(target).name == dialect
    body = request_body(target, "m", "Hi", max_tokens=7)
    assert body[limit] == 7
    assert ("stream_options" in body) is (dialect in ("chat", "completions"))
    prompt = {"chat": "messages", "messages": "messages", "responses": "input"}
    assert prompt.get(dialect, "prompt") in body
    named = target.model_copy(update={"dialect": "responses"})
    assert request_body(named, "m", "Hi", max_tokens=7)["input"] == "Hi"


def test_a_route_beside_another_keeps_its_query() -> None:
    assert route("/a/chat/completions/?v=1", "responses") == "/a/responses?v=1"
    assert route("/v1/completions", "chat/completions") == "/v1/chat/completions"


@pytest.mark.parametrize("key", ["max_completion_tokens", "n_predict", "none"])
def test_the_limit_has_the_name_that_the_target_gives(key: str) -> None:
    target = EVERYTHING.model_copy(update={"limit_key": key})
    body = request_body(target, "m", "Hi", max_tokens=7, delivery=Delivery.UNARY)
    assert body.get(key) == (None if key == "none" else 7)
    assert "max_tokens" not in body
