"""The document against the engine: a fuzzer reads the one and asks the other."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks, positive_data_acceptance
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from reference_engine.api.openapi import described, openapi_document
from tests.reference_engine.fake_worker import Served
from tests.reference_engine.running_engine import RunningEngine, running

CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
COMPLETION = ("/v1/completions", {"prompt": "hi"})

load_all_checks()


def test_the_document_describes_all_routes_and_no_others() -> None:
    routes = Served().frontend.routes()
    paths = openapi_document(routes, "tiny")["paths"]
    written = {f"{method.upper()} {path}" for path in paths for method in paths[path]}
    assert written == described()
    for operation in (operation for path in paths.values() for operation in path.values()):
        assert operation["summary"].endswith(".")
    assert "retry-after" in paths["/v1/completions"]["post"]["responses"]["429"]["headers"]
    names = {f"x-walkaway-{name}" for name in ("first", "last", "next-after", "dropped")}
    assert set(paths["/walkaway/steps"]["get"]["responses"]["200"]["headers"]) == names


def test_a_route_that_is_not_described_is_an_error() -> None:
    async def nothing(request: Request) -> Response:
        return Response()

    with pytest.raises(KeyError, match="GET /forgotten"):
        openapi_document([Route("/forgotten", nothing)], "tiny")


@pytest.fixture(scope="module")
def engine() -> Iterator[RunningEngine]:
    sizes = ["--max-model-len", "64", "--max-num-batched-tokens", "64"]
    flags = ["--runner", "simulated", "--sim-fixed-ms", "1", "--allow-faults", *sizes]
    with running(*flags) as started:
        yield started


@pytest.fixture(scope="module")
def api(engine: RunningEngine) -> Any:
    return schemathesis.openapi.from_url(f"{engine.url}/openapi.json")


def ask(api: Any, operation: str, mode: GenerationMode) -> None:
    """Make requests from the document and hold the answers to it. Never a 5xx."""
    method, path = operation.split()

    @seed(1)
    @settings(
        max_examples=60, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(case=api[path][method].as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        # Some limits are not in the types: the context's, and that 1.0 is not taken for 1.
        case.call_and_validate(excluded_checks=[positive_data_acceptance])

    check()


# Setting faults as the document allows would break the engine on purpose.
@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("operation", sorted(described() - {"PUT /walkaway/faults"}))
def test_requests_that_the_document_allows_break_nothing(api: Any, operation: str) -> None:
    ask(api, operation, GenerationMode.POSITIVE)


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize(
    "operation",
    [
        "POST /v1/completions",
        "POST /v1/chat/completions",
        "GET /walkaway/lifecycle",
        "GET /walkaway/steps",
        "PUT /walkaway/faults",
    ],
)
def test_requests_that_the_document_forbids_are_refused(api: Any, operation: str) -> None:
    ask(api, operation, GenerationMode.NEGATIVE)


@pytest.mark.e2e
@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
def test_an_answer_is_as_described_event_by_event_and_so_is_the_request_after_it(
    api: Any, chat: bool, stream: bool
) -> None:
    path, prompt = CHAT if chat else COMPLETION
    name = f"{stream}{path}"  # a name may have slashes in it
    fields: dict[str, Any] = {
        **prompt,
        "model": "tiny",
        "n": 2,
        "max_tokens": 5,
        "ignore_eos": True,
    }
    if stream:
        options = {"include_usage": True, "continuous_usage_stats": True}
        fields |= {"stream": True, "stream_options": options}
    case = api[path]["POST"].Case(body=fields, headers={"x-request-id": name})
    answer = case.call_and_validate()
    assert answer.status_code == 200
    if stream:
        assert answer.text.count("data: ") > 10
    else:
        assert len(answer.json()["choices"]) == 2
    shown = validated(api, "GET", "/v1/requests/{name}", name)
    assert shown["id"] in answer.text


def validated(api: Any, method: str, path: str, name: str) -> Any:
    answer = api[path][method].Case(path_parameters={"name": name}).call_and_validate()
    assert answer.status_code == 200, answer.text
    return answer.json()
