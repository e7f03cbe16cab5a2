"""`/openapi.json`: all routes, with the types of their bodies and answers.

The engine does not start if a route is not described here.
"""

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import msgspec
from starlette.routing import Route

from reference_engine.api import schemas as shapes
from reference_engine.api.bodies import (
    MAX_PAGE,
    NEUTRAL,
    REQUEST_ID_PATTERN,
    ChatBody,
    CompletionBody,
)
from reference_engine.api.schemas import ErrorBody, LifecycleEntry
from reference_engine.faults import Faults
from reference_engine.metrics.exposition import CONTENT_TYPE
from reference_engine.protocol import StepRecord

_JSON: Final = "application/json"
_NDJSON: Final = "application/x-ndjson"
_EVENTS: Final = "text/event-stream"
_REF: Final = "#/components/schemas/{name}"


class Lines(NamedTuple):
    kind: Any


class Events(NamedTuple):
    """Server-sent events, each with JSON in it, or an error, or after the last `[DONE]`."""

    kind: Any


class Operation(NamedTuple):
    """`answers`: the body of a 200, by content type; None is text. `errors`: other statuses."""

    text: str
    answers: dict[str, Any]
    body: Any = None
    errors: tuple[int, ...] = ()
    is_paged: bool = False


_GENERATE_ERRORS: Final = (400, 404, 408, 413, 429, 503)
_OPERATIONS: Final = {
    "POST /v1/completions": Operation(
        "Generate; as server-sent events with `stream`.",
        {_JSON: shapes.Completion, _EVENTS: Events(shapes.CompletionChunk)},
        CompletionBody,
        _GENERATE_ERRORS,
    ),
    "POST /v1/chat/completions": Operation(
        "Answer a conversation; as server-sent events with `stream`.",
        {_JSON: shapes.ChatCompletion, _EVENTS: Events(shapes.ChatChunk)},
        ChatBody,
        _GENERATE_ERRORS,
    ),
    "GET /v1/requests/{name}": Operation(
        "The state of a request.", {_JSON: shapes.RequestShown}, errors=(404,)
    ),
    "POST /v1/requests/{name}/cancel": Operation(
        "Cancel all requests with that name.", {_JSON: shapes.CancelAnswer}, errors=(404,)
    ),
    "POST /v1/requests/{name}/ping": Operation(
        "Report that the client of these requests is still there.",
        {_JSON: shapes.PingAnswer},
        errors=(404,),
    ),
    "GET /v1/models": Operation("The one model served.", {_JSON: shapes.ModelList}),
    "GET /v1/models/{model}": Operation(
        "The model served.", {_JSON: shapes.ModelCard}, errors=(404,)
    ),
    "GET /health": Operation("200, or 503 while the engine stops.", {}, errors=(503,)),
    "GET /metrics": Operation("Prometheus metrics.", {CONTENT_TYPE: None}),
    "GET /openapi.json": Operation("This document.", {_JSON: dict[str, Any]}),
    "GET /walkaway/lifecycle": Operation(
        "Lifecycle events, one a line.",
        {_NDJSON: Lines(LifecycleEntry)},
        errors=(400,),
        is_paged=True,
    ),
    "GET /walkaway/steps": Operation(
        "Steps, one a line.", {_NDJSON: Lines(StepRecord)}, errors=(400,), is_paged=True
    ),
    "GET /walkaway/config": Operation("The engine's settings.", {_JSON: dict[str, Any]}),
    "GET /walkaway/clock": Operation("The engine's clock.", {_JSON: shapes.ClockAnswer}),
    "GET /walkaway/faults": Operation(
        "The faults in force, with --allow-faults.", {_JSON: Faults}, errors=(404,)
    ),
    "PUT /walkaway/faults": Operation(
        "Set the faults, with --allow-faults.", {_JSON: Faults}, Faults, (400, 404, 408, 413)
    ),
}


def openapi_document(routes: Iterable[Route], model: str) -> dict[str, Any]:
    """Raises KeyError for a route without a description."""
    kinds: list[Any] = [ErrorBody]
    for operation in _OPERATIONS.values():
        kinds += [_kind(answer) for answer in (operation.body, *operation.answers.values())]
    kinds = [kind for kind in kinds if kind is not None]
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    refs = dict(zip(kinds, schemas, strict=True))
    for body in (CompletionBody, ChatBody):
        _narrow(components[body.__name__]["properties"], model)
    paths: dict[str, Any] = {}
    for route in routes:
        for method in sorted((route.methods or set()) - {"HEAD"}):
            operation = _OPERATIONS[f"{method} {route.path_format}"]
            written = _written(operation, route, refs)
            paths.setdefault(route.path_format, {})[method.lower()] = written
    return {
        "openapi": "3.2.0",
        "info": {"title": "walkaway reference engine", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def described() -> set[str]:
    return set(_OPERATIONS)


def _narrow(properties: dict[str, Any], model: str) -> None:
    """State the model's name, and the values allowed for fields that are not implemented."""
    properties["model"] = {"const": model}
    for name, values in NEUTRAL.items():
        properties[name] = {"enum": [*values, None], "default": None}


def _written(operation: Operation, route: Route, refs: dict[Any, Any]) -> dict[str, Any]:
    content = {name: _content(answer, refs) for name, answer in operation.answers.items()}
    answers: dict[str, Any] = {"200": {"description": "Success."}}
    if content:
        answers["200"]["content"] = content
    if operation.is_paged:
        answers["200"]["headers"] = {
            f"x-walkaway-{name}": {"required": True, "schema": {"type": "integer"}}
            for name in ("first", "last", "next-after", "dropped")
        }
    for status in (*operation.errors, 401):
        answers[str(status)] = _error(status, has_body=bool(content), schema=refs[ErrorBody])
    written: dict[str, Any] = {
        "summary": operation.text,
        "parameters": _parameters(operation, route),
        "responses": answers,
    }
    if operation.body is not None:
        body = {_JSON: {"schema": refs[operation.body]}}
        written["requestBody"] = {"required": True, "content": body}
    return written


def _kind(answer: Any) -> Any:
    return answer.kind if isinstance(answer, Lines | Events) else answer


def _content(answer: Any, refs: dict[Any, Any]) -> dict[str, Any]:
    match answer:
        case None:
            return {"schema": {"type": "string"}}
        case Lines(kind=kind):
            return {"itemSchema": refs[kind]}
        case Events(kind=kind):
            either = {"anyOf": [refs[kind], refs[ErrorBody]]}
            json = {"type": "string", "contentMediaType": _JSON, "contentSchema": either}
            data = {"anyOf": [{"const": "[DONE]"}, json]}
            properties = {"data": data}
            return {"itemSchema": {"type": "object", "properties": properties}}
        case kind:
            return {"schema": refs[kind]}


def _error(status: int, *, has_body: bool, schema: Any) -> dict[str, Any]:
    error: dict[str, Any] = {"description": "An error, and what to do about it."}
    if has_body:
        error["content"] = {_JSON: {"schema": schema}}
    if status == 429:
        seconds = {"type": "integer", "minimum": 1}
        error["headers"] = {"retry-after": {"required": True, "schema": seconds}}
    return error


def _parameters(operation: Operation, route: Route) -> list[dict[str, Any]]:
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in route.param_convertors
    ]
    if operation.is_paged:
        number = {"type": "integer", "minimum": 0, "maximum": 10**15 - 1}
        parameters += [
            {"name": "after", "in": "query", "schema": {**number, "default": 0}},
            {"name": "limit", "in": "query", "schema": {**number, "default": MAX_PAGE}},
        ]
    if operation.body in (CompletionBody, ChatBody):
        schema = {"type": "string", "pattern": REQUEST_ID_PATTERN}
        parameters.append({"name": "x-request-id", "in": "header", "schema": schema})
    return parameters
