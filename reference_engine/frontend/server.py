"""The HTTP server: routes, and how each answers. No middleware, which could hide a disconnect."""

import os
import time
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from reference_engine.config import EngineConfig
from reference_engine.faults import Faults
from reference_engine.frontend.answering import GenerationResponse
from reference_engine.frontend.auth import KeyCheck
from reference_engine.frontend.connection import EngineStoppedError
from reference_engine.frontend.errors import ApiError
from reference_engine.frontend.exposition import Page, wants_open_metrics
from reference_engine.frontend.journal import Page as JournalPage
from reference_engine.frontend.metrics import metric_families
from reference_engine.frontend.openai_api import (
    Generation,
    check_model,
    decode_body,
    read_chat,
    read_completion,
)
from reference_engine.frontend.openapi import openapi_document
from reference_engine.frontend.reading import echo_of, read_body, read_page, read_request_id
from reference_engine.frontend.requests_api import RequestsApi
from reference_engine.frontend.settings import FrontendSettings
from reference_engine.frontend.worker_link import WorkerLink
from reference_engine.model.tokenizer import Tokenizer
from reference_engine.protocol import Ready

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class Frontend:
    """The endpoints, over one worker. `allow_faults` opens `/walkaway/faults`."""

    def __init__(
        self,
        link: WorkerLink,
        config: EngineConfig,
        worker: Ready,
        settings: FrontendSettings,
        *,
        allow_faults: bool,
    ) -> None:
        self._link = link
        self._settings = settings
        self._config = config
        self._worker = worker
        self._allow_faults = allow_faults
        self._tokenizer = Tokenizer(worker.vocab_size)
        families = metric_families(link, config)
        self._text_page = Page(families, open_metrics=False)
        self._open_metrics_page = Page(families, open_metrics=True)
        self._openapi = msgspec.json.encode(openapi_document(self.routes(), config.model))

    def app(self) -> ASGIApp:
        handlers = {
            ApiError: _answer_api_error,
            HTTPException: _answer_http_error,
            EngineStoppedError: _answer_stopped,
            ClientDisconnect: _answer_nobody,
            Exception: _answer_bug,
        }
        app = Starlette(routes=self.routes(), exception_handlers=handlers)
        app.router.redirect_slashes = False
        return KeyCheck(app, self._settings.api_keys)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            *RequestsApi(self._link).routes(),
            Route("/v1/models", self.models),
            Route("/v1/models/{model}", self.model),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/openapi.json", self.openapi),
            Route("/walkaway/lifecycle", self.lifecycle),
            Route("/walkaway/steps", self.steps),
            Route("/walkaway/config", self.config),
            Route("/walkaway/clock", self.clock),
            Route("/walkaway/faults", self.faults, methods=["GET", "PUT"]),
        ]

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
        return Response(status_code=503 if self._link.is_draining else 200)

    async def metrics(self, request: Request) -> Response:
        is_open = wants_open_metrics(request.headers.get("accept", ""))
        page = self._open_metrics_page if is_open else self._text_page
        return Response(page.write(), headers={"content-type": page.content_type})

    async def openapi(self, request: Request) -> Response:
        return Response(self._openapi, media_type="application/json")

    async def lifecycle(self, request: Request) -> Response:
        after, limit = read_page(request)
        return ndjson(self._link.lifecycle.after(after, limit))

    async def steps(self, request: Request) -> Response:
        after, limit = read_page(request)
        return ndjson(self._link.steps.after(after, limit))

    async def config(self, request: Request) -> Response:
        config = msgspec.to_builtins(self._config)
        config["device"] = self._worker.device
        config["vocab_size"] = self._worker.vocab_size
        config["gpu_name"] = self._worker.gpu_name
        config["frontend_pid"], config["worker_pid"] = os.getpid(), self._worker.pid
        config["faults"] = msgspec.to_builtins(self._link.faults)
        config["frontend"] = self._settings.shown()
        return JSONResponse(config)

    async def clock(self, request: Request) -> Response:
        boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else None
        now_ns = time.perf_counter_ns()
        return JSONResponse({"clock": "CLOCK_MONOTONIC", "now_ns": now_ns, "boot_id": boot_id})

    async def faults(self, request: Request) -> Response:
        if not self._allow_faults:
            raise ApiError(404, "faults can be set over HTTP only with --allow-faults")
        if request.method == "PUT":
            self._link.set_faults(decode_body(await read_body(request), Faults))
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
        client_request_id = read_request_id(request.headers)
        owner: str | None = request.state.owner
        self._check_rate(owner)
        generation = read(await read_body(request), self._config, self._tokenizer)
        created = int(time.time())  # noqa: TID251 OpenAI's `created` is wall time
        return GenerationResponse(
            self._link, generation, client_request_id, owner=owner, created=created
        )

    def _check_rate(self, owner: str | None) -> None:
        wait_s = self._link.limiter.admit(owner, time.perf_counter_ns())
        if wait_s is not None:
            raise ApiError(
                429,
                f"too many requests or tokens in a minute; try again in {ceil(wait_s)} s",
                code="rate_limit_exceeded",
                headers={"retry-after": str(ceil(wait_s))},
            )


def ndjson(page: JournalPage) -> Response:
    """One entry a line; the headers say where to go on and what can never be had.

    There is more to be had now where next-after is less than last.
    """
    headers = {
        "x-walkaway-first": str(page.first),
        "x-walkaway-last": str(page.last),
        "x-walkaway-next-after": str(page.next_after),
        "x-walkaway-dropped": str(page.dropped),
    }
    return Response(b"".join(page.lines), media_type="application/x-ndjson", headers=headers)


async def _answer_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response(echo_of(request.headers))


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        text = "there is nothing at this path; /openapi.json says what there is"
    else:
        text = f"{error.detail}: {request.method}; /openapi.json says what there is"
    answer = ApiError(error.status_code, text, headers=error.headers)
    return answer.response(echo_of(request.headers))


async def _answer_stopped(request: Request, error: Exception) -> Response:
    return ApiError(503, str(error)).response(echo_of(request.headers))


async def _answer_nobody(request: Request, error: Exception) -> Response:
    """The client left in the middle of its body: nothing was done, and nobody reads this."""
    return Response(status_code=499)


async def _answer_bug(request: Request, error: Exception) -> Response:
    """The traceback goes to the log; the client gets the shape that it understands."""
    return ApiError(500, "internal error").response(echo_of(request.headers))
