"""The check before the load: what a strict server refuses is left out, and events are counted."""

import json
import time
from collections.abc import Callable, Collection
from typing import Any

import httpx
import pytest

from harness.client.dialect import dialect_of, limit_key_of, request_body, route
from harness.errors import TargetError
from harness.records import Delivery
from harness.run.first_answers import (
    FirstAnswers,
    check_not_refused,
    check_requests,
    fit_requests,
    without_refused,
)
from harness.run.settle import Asker, RefusedAnswerError, SilentServerError
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
    asker, said, counted, error = fit_requests(asking(server, EVERYTHING))
    assert error is None
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
    assert fit_requests(asker)[:3] == (asker, [], [])


def refusing(say: Callable[[dict[str, Any]], str | None], *, status: int = 400) -> Any:
    """A server that refuses a body with these words, and keeps all bodies; None: it answers."""
    bodies: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        bodies.append(body)
        said = say(body)
        if said is None:
            return httpx.Response(200, content=events(["a"] * 24, 24))
        return httpx.Response(status, json={"error": {"message": said}})

    return answer, bodies


def test_a_server_that_sends_us_round_in_a_circle_changes_nothing() -> None:
    """A name that was refused never comes back."""

    def other(body: dict[str, Any]) -> str:
        keys = ("max_completion_tokens", "max_tokens")
        mine, yours = keys if keys[0] in body else keys[::-1]
        return f"{mine} is not supported, use {yours} instead"

    answer, bodies = refusing(other)
    given = asking(answer, EVERYTHING)
    asker, said, counted, error = fit_requests(given)
    assert (asker, said, counted) == (given, [], [])
    assert [key for body in bodies for key in body if key.startswith("max_")] == [
        "max_tokens",
        "max_completion_tokens",
    ]
    assert isinstance(error, RefusedAnswerError)


HIGHER = (
    "Could not finish the message because max_tokens or model output limit was reached. Please try "
    "again with higher max_tokens."
)


def test_openais_newer_models_are_asked_by_the_new_name_and_for_more() -> None:
    def newer(body: dict[str, Any]) -> str | None:
        if "max_tokens" in body:
            return "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
        return HIGHER if body["max_completion_tokens"] < 100 else None

    answer, bodies = refusing(newer)
    asker, said, counted, error = fit_requests(asking(answer, EVERYTHING))
    assert limit_key_of(asker.target) == "max_completion_tokens"
    assert (len(said), counted, error) == (1, [(24, 24)], None)
    assert [body.get("max_completion_tokens") for body in bodies] == [None, 24, 512]
    asker.ask("Hello", 1, longest_s=9)
    assert bodies[-1]["max_completion_tokens"] == 512  # so that later checks are answered too


def test_a_model_that_only_reasons_at_first_is_asked_for_more() -> None:
    asked = []

    def thinking(request: httpx.Request) -> httpx.Response:
        asked.append(tokens := json.loads(request.content)["max_tokens"])
        return httpx.Response(200, content=events(["a"] * 9 if tokens > 99 else [], tokens))

    _, _, counted, error = fit_requests(asking(thinking, EVERYTHING))
    assert asked == [24, 512, 512]
    assert (counted, error) == ([(512, 9)] * 2, None)


def test_longer_answers_that_show_nothing_either_are_asked_for_once() -> None:
    asked = []

    def hidden(request: httpx.Request) -> httpx.Response:
        asked.append(tokens := json.loads(request.content)["max_tokens"])
        return httpx.Response(200, content=events([], tokens))

    found = fit_requests(asking(hidden, EVERYTHING))
    assert (asked, found.asker.fewest_tokens) == ([24, 512], 1)
    assert "the server counts 512 tokens" in str(found.error)


def test_a_minimum_is_kept_to() -> None:
    def least(body: dict[str, Any]) -> str | None:
        return None if body["max_tokens"] >= 32 else "max_tokens must be at least 32"

    answer, bodies = refusing(least)
    found = fit_requests(asking(answer, EVERYTHING))
    assert [body["max_tokens"] for body in bodies] == [24, 32]
    assert (found.asker.fewest_tokens, found.counted, found.said) == (32, [(24, 24)], [])


@pytest.mark.parametrize("as_event", [False, True])
def test_a_refusal_with_status_200_is_one(as_event: bool) -> None:
    def lax(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        if "ignore_eos" not in body:
            return httpx.Response(200, content=events(["a"] * 24, 24))
        said = json.dumps({"error": {"message": "Unsupported parameter: 'ignore_eos'"}})
        return httpx.Response(200, text=f"data: {said}\n\n" if as_event else said)

    asker, said, counted, error = fit_requests(asking(lax, EVERYTHING))
    assert asker.target.extra_body == {"seed": 1}
    assert (counted, error) == ([(24, 24)], None)
    assert said == [
        "the server refuses `ignore_eos`, so it is left out; answers may end before the length "
        "asked for: Unsupported parameter: 'ignore_eos'"
    ]


@pytest.mark.parametrize(
    ("said", "begin"),
    [
        ("unknown fields: ignore_eos, seed", "`ignore_eos` and `seed`, so they are left out; answ"),
        ("stream_options is not supported", "`stream_options`, so it is left out; the server may"),
        ("unknown field include_usage", "`include_usage`, so it is left out; the server may not"),
        ("unknown field continuous_usage_stats", "`continuous_usage_stats`, so it is left out; t"),
        ("unknown field seed", "`seed`, so it is left out"),
    ],
)
def test_what_is_left_out_and_what_that_costs_is_said(said: str, begin: str) -> None:
    found = without_refused(EVERYTHING, 400, said.encode())
    assert found is not None
    assert found[1].startswith(f"the server refuses {begin}")


def test_without_counts_in_events_none_are_waited_for() -> None:
    target = EVERYTHING.model_copy(update={"continuous_usage": True})
    found = without_refused(target, 400, b"stream_options is not supported")
    assert found is not None
    assert (found[0].stream_options, found[0].continuous_usage) == (None, False)


@pytest.mark.parametrize(
    "said", ["seed must be between 2 and 9", "temperature out of range", "unknown model m"]
)
def test_what_is_no_field_too_many_ends_with_the_servers_words(said: str) -> None:
    answer, bodies = refusing(lambda _: said)
    found = fit_requests(asking(answer, EVERYTHING))
    assert (len(bodies), found.asker.target) == (1, EVERYTHING)
    words = pytest.raises(
        TargetError, match=rf"POST http://s/v1/chat/completions\): HTTP 400: {said}"
    )
    with words:
        check_not_refused(found)


@pytest.mark.parametrize("status", [401, 404, 429, 500, 503])
def test_other_statuses_are_left_for_the_load_to_show(status: int) -> None:
    answer, _ = refusing(lambda _: "no", status=status)
    check_not_refused(fit_requests(asking(answer, EVERYTHING)))


def test_a_silent_server_is_named(begin: Begin) -> None:
    def silent(_: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("nothing came")

    found = check_requests(begin(engine="vllm"), asking(silent, EVERYTHING))
    assert isinstance(found.silent, SilentServerError)
    assert FirstAnswers(found.asker, [], []).silent is None


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

    found = fit_requests(asking(flushing, EVERYTHING))
    assert (seen, found.said, found.counted) == (asked, [], counted)


def test_a_run_goes_on_with_what_the_server_takes(begin: Begin) -> None:
    run = begin(engine="vllm")
    server = Strict({"max_tokens", "stream_options", *OPTIONS}, of_openai)
    asker = check_requests(run, asking(server, run.target)).asker
    assert run.target == asker.target
    assert "ignore_eos" not in run.target.extra_body
    (note,) = run.notes.texts()
    assert note.startswith("the server refuses `ignore_eos`, so it is left out; answers may end ")


@pytest.mark.parametrize("pieces", [1, 24])
def test_answers_in_one_piece_are_a_warning(begin: Begin, pieces: int) -> None:
    run = begin(engine="vllm")
    whole = events(["a" * 24] if pieces == 1 else ["a"] * 24, 24)
    check_requests(run, asking(lambda _: httpx.Response(200, content=whole), run.target))
    said = [text for text in run.notes.warnings() if "each answer in one piece: nobody" in text]
    assert len(said) == (pieces == 1)


def test_our_own_engine_takes_what_we_send(begin: Begin) -> None:
    ours = begin(engine="reference")
    silent = asking(lambda _: pytest.fail("our own engine is not asked"), ours.target)
    assert check_requests(ours, silent) == (silent, [], [], None)


@pytest.mark.parametrize(
    ("path", "dialect", "limit"),
    [
        ("/v1/completions", "completions", "max_tokens"),
        ("/openai/deployments/m/chat/completions?api-version=1", "chat", "max_tokens"),
        ("/v1/Chat/Completions", "chat", "max_tokens"),
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
