"""The HTTP server: routes, and how each answers. No middleware, which could hide a disconnect."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from reference_engine.config import EngineConfig
from reference_engine.faults import FaultError, Faults
from reference_engine.frontend.answering import GenerationResponse
from reference_engine.frontend.errors import ApiError
from reference_engine.frontend.exposition import exposition, metrics_registry
from reference_engine.frontend.journal import LifecycleEntry, Page
from reference_engine.frontend.openai_api import (
    MAX_BODY_BYTES,
    Generation,
    check_model,
    read_chat,
    read_completion,
)
from reference_engine.frontend.worker_link import EngineStoppedError, WorkerLink
from reference_engine.model.tokenizer import Tokenizer
from reference_engine.protocol import Ready, StepRecord

_MAX_REQUEST_ID_CHARS = 256
_MAX_PAGE = 10_000  # entries: more would hold up the event loop, and with it detection
_MAX_DIGITS = 15
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Frontend:
    """The endpoints, over one worker. `allow_faults` opens `/walkaway/faults`."""

    def __init__(
        self, link: WorkerLink, config: EngineConfig, worker: Ready, *, allow_faults: bool
    ) -> None:
        self._link = link
        self._config = config
        self._worker = worker
        self._allow_faults = allow_faults
        self._tokenizer = Tokenizer(worker.vocab_size)
        self._registry = metrics_registry(link, config)

    def app(self) -> Starlette:
        routes = [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{model}", self.model),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/walkaway/lifecycle", self.lifecycle),
            Route("/walkaway/steps", self.steps),
            Route("/walkaway/config", self.config),
            Route("/walkaway/clock", self.clock),
            Route("/walkaway/faults", self.faults, methods=["GET", "PUT"]),
        ]
        handlers = {
            ApiError: _answer_api_error,
            HTTPException: _answer_http_error,
            EngineStoppedError: _answer_stopped,
            Exception: _answer_bug,
        }
        return Starlette(routes=routes, exception_handlers=handlers)

    async def completions(self, request: Request) -> ASGIApp:
        return await self._generate(request, read_completion)

    async def chat(self, request: Request) -> ASGIApp:
        return await self._generate(request, read_chat)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        check_model(request.path_params["model"], self._config)
        return JSONResponse(self._model_card())

    async def health(self, request: Request) -> Response:
        return Response(status_code=200)

    async def metrics(self, request: Request) -> Response:
        return Response(exposition(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def lifecycle(self, request: Request) -> Response:
        after, limit = _page_query(request)
        return ndjson(self._link.lifecycle.after(after, limit))

    async def steps(self, request: Request) -> Response:
        after, limit = _page_query(request)
        return ndjson(self._link.steps.after(after, limit))

    async def config(self, request: Request) -> Response:
        config = msgspec.to_builtins(self._config)
        config["device"] = self._worker.device
        config["vocab_size"] = self._worker.vocab_size
        config["gpu_name"] = self._worker.gpu_name
        config["frontend_pid"], config["worker_pid"] = os.getpid(), self._worker.pid
        config["faults"] = msgspec.to_builtins(self._link.faults)
        return JSONResponse(config)

    async def clock(self, request: Request) -> Response:
        boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else None  # noqa: ASYNC240 tiny
        now_ns = time.perf_counter_ns()
        return JSONResponse({"clock": "CLOCK_MONOTONIC", "now_ns": now_ns, "boot_id": boot_id})

    async def faults(self, request: Request) -> Response:
        if not self._allow_faults:
            raise ApiError(404, "faults can be set over HTTP only with --allow-faults")
        if request.method == "PUT":
            try:
                self._link.set_faults(msgspec.json.decode(await _read_body(request), type=Faults))
            except (msgspec.DecodeError, FaultError) as error:
                raise ApiError(400, f"faults: {error}") from error
        return Response(msgspec.json.encode(self._link.faults), media_type="application/json")

    def _model_card(self) -> dict[str, str | int]:
        return {
            "id": self._config.model,
            "object": "model",
            "created": 0,
            "owned_by": "walkaway",
            "max_model_len": self._config.max_model_len,
        }

    async def _generate(
        self, request: Request, read: Callable[[bytes, EngineConfig, Tokenizer], Generation]
    ) -> ASGIApp:
        client_request_id = request.headers.get("x-request-id")
        if client_request_id and len(client_request_id) > _MAX_REQUEST_ID_CHARS:
            raise ApiError(400, f"X-Request-Id: at most {_MAX_REQUEST_ID_CHARS} characters")
        try:
            data = await _read_body(request)
        except ClientDisconnect:
            return Response(status_code=499)  # nothing was submitted, nobody reads this
        generation = read(data, self._config, self._tokenizer)
        created = int(time.time())  # noqa: TID251 OpenAI's `created` is wall time
        return GenerationResponse(self._link, generation, client_request_id, created)


async def _read_body(request: Request) -> bytes:
    """The whole body; ApiError 413 as soon as it is over the limit."""
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise ApiError(413, f"request body: at most {MAX_BODY_BYTES} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def _page_query(request: Request) -> tuple[int, int]:
    limit = _number(request, "limit", default=_MAX_PAGE)
    return _number(request, "after", default=0), min(max(limit, 1), _MAX_PAGE)


def _number(request: Request, name: str, *, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        raise ApiError(400, f"{name}: a number of at most {_MAX_DIGITS} digits", param=name)
    return int(text)


def ndjson(page: Page[LifecycleEntry] | Page[StepRecord]) -> Response:
    """One entry a line; the headers say where to go on and what can never be had."""
    headers = {
        "x-walkaway-first": str(page.first),
        "x-walkaway-next-after": str(page.next_after),
        "x-walkaway-dropped": str(page.dropped),
    }
    body = b"".join(msgspec.json.encode(entry) + b"\n" for entry in page.entries)
    return Response(body, media_type="application/x-ndjson", headers=headers)


async def _answer_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response(request.headers.get("x-request-id"))


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    request_id = request.headers.get("x-request-id")
    return ApiError(error.status_code, error.detail).response(request_id, error.headers)


async def _answer_stopped(request: Request, error: Exception) -> Response:
    return ApiError(503, str(error)).response(request.headers.get("x-request-id"))


async def _answer_bug(request: Request, error: Exception) -> Response:
    """The traceback goes to the log; the client gets the shape that it understands."""
    return ApiError(500, "internal error").response(request.headers.get("x-request-id"))
