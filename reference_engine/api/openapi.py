"""`/openapi.json`: all routes, with the types of their bodies and answers.

The engine does not start if a route is not described here.
"""

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import msgspec
from starlette.routing import Route

from reference_engine.api import schemas
from reference_engine.api.bodies import (
    MAX_PAGE,
    NEUTRAL,
    REQUEST_ID_PATTERN,
    ChatBody,
    CompletionBody,
)
from reference_engine.faults import Faults
from reference_engine.metrics.exposition import CONTENT_TYPE
from reference_engine.protocol import StepRecord

_JSON: Final = "application/json"
_NDJSON: Final = "application/x-ndjson"
_EVENTS: Final = "text/event-stream"
_REF: Final = "#/components/schemas/{name}"


class Operation(NamedTuple):
    """`answers`: the type of a 200's body, by content type; None is text. `errors`: other statuses.

    NDJSON has one value of the type a line. Each event of a stream is one such value or an error,
    and `[DONE]` follows the last.
    """

    text: str
    answers: dict[str, Any]
    body: Any = None
    errors: tuple[int, ...] = ()


_GENERATE_ERRORS: Final = (400, 404, 408, 413, 429, 503)
_OPERATIONS: Final = {
    "POST /v1/completions": Operation(
        "Generate; as server-sent events with `stream`.",
        {_JSON: schemas.Completion, _EVENTS: schemas.CompletionChunk},
        CompletionBody,
        _GENERATE_ERRORS,
    ),
    "POST /v1/chat/completions": Operation(
        "Answer a conversation; as server-sent events with `stream`.",
        {_JSON: schemas.ChatCompletion, _EVENTS: schemas.ChatChunk},
        ChatBody,
        _GENERATE_ERRORS,
    ),
    "GET /v1/requests/{name}": Operation(
        "The state of a request.", {_JSON: schemas.RequestShown}, errors=(404,)
    ),
    "POST /v1/requests/{name}/cancel": Operation(
        "Cancel all requests with that name.", {_JSON: schemas.CancelAnswer}, errors=(404,)
    ),
    "POST /v1/requests/{name}/ping": Operation(
        "Report that the client of these requests is still there.",
        {_JSON: schemas.PingAnswer},
        errors=(404,),
    ),
    "GET /v1/models": Operation("The one model served.", {_JSON: schemas.ModelList}),
    "GET /v1/models/{model}": Operation(
        "The model served.", {_JSON: schemas.ModelCard}, errors=(404,)
    ),
    "GET /health": Operation("200, or 503 while the engine stops.", {}, errors=(503,)),
    "GET /metrics": Operation("Prometheus metrics.", {CONTENT_TYPE: None}),
    "GET /openapi.json": Operation("This document.", {_JSON: dict[str, Any]}),
    "GET /walkaway/lifecycle": Operation(
        "Lifecycle events, one a line.", {_NDJSON: schemas.LifecycleEntry}, errors=(400,)
    ),
    "GET /walkaway/steps": Operation("Steps, one a line.", {_NDJSON: StepRecord}, errors=(400,)),
    "GET /walkaway/integrity": Operation(
        "Whether the books of the repository's models agree.",
        {"text/plain; charset=utf-8": None},
        errors=(500,),
    ),
    "GET /walkaway/config": Operation("The engine's settings.", {_JSON: dict[str, Any]}),
    "GET /walkaway/clock": Operation("The engine's clock.", {_JSON: schemas.ClockAnswer}),
    "GET /walkaway/faults": Operation(
        "The faults in force, with --allow-faults.", {_JSON: Faults}, errors=(404,)
    ),
    "PUT /walkaway/faults": Operation(
        "Set the faults, with --allow-faults.", {_JSON: Faults}, Faults, (400, 404, 408, 413)
    ),
}


def openapi_document(routes: Iterable[Route], model: str) -> dict[str, Any]:
    kinds: list[Any] = [schemas.ErrorBody]
    for operation in _OPERATIONS.values():
        named = (operation.body, *operation.answers.values())
        kinds += [kind for kind in named if kind is not None]
    types, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    refs = dict(zip(kinds, types, strict=True))
    for body in NEUTRAL:
        properties = components[body.__name__]["properties"]
        properties["model"] = {"const": model}
        for name, values in NEUTRAL[body].items():
            properties[name] = {"enum": [*values, None], "default": None}
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


def _written(operation: Operation, route: Route, refs: dict[Any, Any]) -> dict[str, Any]:
    content = {name: _content(name, kind, refs) for name, kind in operation.answers.items()}
    answer: dict[str, Any] = {"description": "Success."}
    error: dict[str, Any] = {"description": "An error, and what to do about it."}
    if content:
        answer["content"] = content
        error["content"] = {_JSON: {"schema": refs[schemas.ErrorBody]}}
    if _NDJSON in content:
        names = ("first", "last", "next-after", "dropped")
        answer["headers"] = {f"x-walkaway-{name}": _number() for name in names}
    answers = {"200": answer, **{str(status): error for status in (*operation.errors, 401)}}
    if 429 in operation.errors:
        answers["429"] = {**error, "headers": {"retry-after": _number(minimum=1)}}
    written: dict[str, Any] = {
        "summary": operation.text,
        "parameters": _parameters(operation, route),
        "responses": answers,
    }
    if operation.body is not None:
        body = {_JSON: {"schema": refs[operation.body]}}
        written["requestBody"] = {"required": True, "content": body}
    return written


def _number(**limits: int) -> dict[str, Any]:
    return {"required": True, "schema": {"type": "integer", **limits}}


def _content(content_type: str, kind: Any, refs: dict[Any, Any]) -> dict[str, Any]:
    if kind is None:
        return {"schema": {"type": "string"}}
    if content_type == _NDJSON:
        return {"itemSchema": refs[kind]}
    if content_type == _EVENTS:
        either = {"anyOf": [refs[kind], refs[schemas.ErrorBody]]}
        json = {"type": "string", "contentMediaType": _JSON, "contentSchema": either}
        data = {"anyOf": [{"const": "[DONE]"}, json]}
        return {"itemSchema": {"type": "object", "properties": {"data": data}}}
    return {"schema": refs[kind]}


def _parameters(operation: Operation, route: Route) -> list[dict[str, Any]]:
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in route.param_convertors
    ]
    if _NDJSON in operation.answers:
        number = {"type": "integer", "minimum": 0, "maximum": 10**15 - 1}
        parameters += [
            {"name": "after", "in": "query", "schema": {**number, "default": 0}},
            {"name": "limit", "in": "query", "schema": {**number, "default": MAX_PAGE}},
        ]
    if operation.body in (CompletionBody, ChatBody):
        schema = {"type": "string", "pattern": REQUEST_ID_PATTERN}
        parameters.append({"name": "x-request-id", "in": "header", "schema": schema})
    return parameters
