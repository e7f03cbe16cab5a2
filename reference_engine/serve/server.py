"""The HTTP server: its routes and their answers. No middleware, which could hide a disconnect."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import asdict
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from reference_engine.api import schemas
from reference_engine.api.bodies import echo_of, read_body, read_page, read_request_id
from reference_engine.api.journal import JournalPage
from reference_engine.api.openai import (
    Generation,
    check_model,
    decode_body,
    read_chat,
    read_completion,
)
from reference_engine.api.openapi import openapi_document
from reference_engine.api.schemas import ApiError, json_response
from reference_engine.config import EngineConfig, FrontendSettings
from reference_engine.context import CancelReason
from reference_engine.faults import Faults
from reference_engine.metrics.exposition import CONTENT_TYPE, MetricsPage
from reference_engine.model.runners import VOCAB_SIZE
from reference_engine.model.tokenizer import Tokenizer, WordTokenizer
from reference_engine.protocol import Ready
from reference_engine.serve.access import KeyCheck
from reference_engine.serve.client_request import ClientRequest
from reference_engine.serve.faults import FaultyLink
from reference_engine.serve.generate import (
    AnswerWriter,
    GenerationResponse,
    admit,
    read_generation,
    usage_of,
)
from reference_engine.serve.link import WorkerLink
from reference_engine.serve.supervisor import SHUTTING_DOWN, EngineStoppedError

NO_WORKER_READY: Final = Ready(pid=os.getpid(), device="none", vocab_size=VOCAB_SIZE, gpu_name=None)
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


class Frontend:
    def __init__(
        self,
        link: FaultyLink,
        config: EngineConfig,
        settings: FrontendSettings,
        tokenizer: Tokenizer,
        *,
        allow_faults: bool,
        name: str = "frontend-0",
        frontends: Sequence[str] = ("frontend-0",),
    ) -> None:
        self._link = link
        self._settings = settings
        self._config = config
        self._name = name
        self._frontends = frontends
        self._allow_faults = allow_faults
        self.check_integrity: Callable[[], object] = lambda: None
        self._tokenizer = tokenizer
        self._metrics_page = MetricsPage(link.collector, config)
        self._openapi = msgspec.json.encode(openapi_document(self.routes(), config.model))

    def app(self) -> ASGIApp:
        kinds = (ApiError, HTTPException, EngineStoppedError, ClientDisconnect, Exception)
        app = Starlette(
            routes=self.routes(), exception_handlers=dict.fromkeys(kinds, _answer_error)
        )
        app.router.redirect_slashes = False
        return KeyCheck(app, self._settings.api_keys)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            *RequestsApi(self._link).routes(),
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/openapi.json", self.openapi),
            Route("/walkaway/lifecycle", self.lifecycle),
            Route("/walkaway/steps", self.steps),
            Route("/walkaway/integrity", self.integrity),
            Route("/walkaway/config", self.config),
            Route("/walkaway/clock", self.clock),
            Route("/walkaway/faults", self.faults, methods=["GET", "PUT"]),
        ]

    async def completions(self, request: Request) -> ASGIApp:
        return await self._generate(request, read_completion)

    async def chat(self, request: Request) -> ASGIApp:
        return await self._generate(request, read_chat)

    async def models(self, request: Request) -> Response:
        cards = [] if self._config.runner == "none" else [self._model_card()]
        return json_response(schemas.ModelList(data=cards))

    async def model(self, request: Request) -> Response:
        check_model(request.path_params["model"], self._config)
        return json_response(self._model_card())

    async def health(self, request: Request) -> Response:
        link = self._link
        missing = [name for name in link.workers if name not in link.router.names]
        if link.is_draining:
            raise EngineStoppedError(SHUTTING_DOWN)
        if missing:
            raise EngineStoppedError(f"not connected: {', '.join(missing)}")
        return Response()

    async def metrics(self, request: Request) -> Response:
        self._link.polled()
        return Response(self._metrics_page.write(), headers={"content-type": CONTENT_TYPE})

    async def openapi(self, request: Request) -> Response:
        return Response(self._openapi, media_type="application/json")

    async def lifecycle(self, request: Request) -> Response:
        after, limit = read_page(request.query_params)
        return ndjson(self._link.lifecycle.after(after, limit))

    async def steps(self, request: Request) -> Response:
        after, limit = read_page(request.query_params)
        return ndjson(self._link.steps.after(after, limit))

    async def integrity(self, request: Request) -> Response:
        try:
            self.check_integrity()
        except RuntimeError as error:
            raise ApiError(500, str(error)) from error
        return PlainTextResponse("ok\n")

    async def config(self, request: Request) -> Response:
        config = msgspec.to_builtins(self._config)
        workers = self._link.workers
        first = next(iter(workers.values()), NO_WORKER_READY)
        config["device"], config["compile"] = first.device, first.is_compiled
        config["vocab_size"] = first.vocab_size
        config["gpu_name"], config["gpu_uuid"] = first.gpu_name, first.gpu_uuid
        config["bytes_are_tokens"] = isinstance(self._tokenizer, WordTokenizer)
        config["frontend_pid"], config["worker_pid"] = os.getpid(), first.pid
        config["name"], config["frontends"] = self._name, list(self._frontends)
        config["workers"] = {name: ready.pid for name, ready in workers.items()}
        config["faults"] = msgspec.to_builtins(self._link.faults)
        config["frontend"] = self._settings.shown()
        return JSONResponse(config)

    async def clock(self, request: Request) -> Response:
        boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else None
        return json_response(schemas.ClockAnswer(now_ns=time.perf_counter_ns(), boot_id=boot_id))

    async def faults(self, request: Request) -> Response:
        if not self._allow_faults:
            raise ApiError(404, "faults can be set over HTTP only with --allow-faults")
        if request.method == "PUT":
            self._link.set_faults(decode_body(await read_body(request), Faults))
        return json_response(self._link.faults)

    def _model_card(self) -> schemas.ModelCard:
        return schemas.ModelCard(
            id=self._config.model,
            created=0,
            owned_by="walkaway",
            max_model_len=self._config.max_model_len,
        )

    async def _generate(
        self, request: Request, read: Callable[[bytes, EngineConfig, Tokenizer], Generation]
    ) -> ASGIApp:
        client_request_id = read_request_id(request.headers)
        owner: str | None = request.state.owner
        admit(self._link, owner)
        body = await read_body(request)
        try:
            generation = await read_generation(read, body, self._config, self._tokenizer)
        except ApiError as error:
            self._link.refused(error, self._config)
            raise
        submitted = self._link.submit(
            generation,
            client_request_id=client_request_id,
            owner=owner,
            created=int(time.time()),  # noqa: TID251 OpenAI's `created` is wall time
        )
        return GenerationResponse(self._link, submitted)


def ndjson(page: JournalPage) -> Response:
    body = b"".join(page.lines)
    return Response(body, media_type="application/x-ndjson", headers=page.headers())


async def _answer_error(request: Request, error: Exception) -> Response:
    match error:
        case ApiError():
            answer = error
        case HTTPException(status_code=404):
            answer = ApiError(404, "no such path; /openapi.json lists all paths")
        case HTTPException(status_code=status):
            text = f"{error.detail}: {request.method}; /openapi.json lists the methods"
            answer = ApiError(status, text, headers=error.headers)
        case EngineStoppedError():
            answer = ApiError(error.status, str(error))
        case ClientDisconnect():
            return Response(status_code=499)  # it left while sending its body: this is never read
        case _:
            answer = ApiError(500, "internal error")
    return answer.response(echo_of(request.headers))


class RequestsApi:
    """The endpoints under `/v1/requests`: query a request, cancel it, send a ping for it.

    A request has three names: the engine's (`req-7`), its answer's (`cmpl-req-7`, `chatcmpl-req-7`)
    and its client's X-Request-Id, which means all live requests that share it, or else the latest
    ended one. A request of another API key does not exist here.
    """

    def __init__(self, link: WorkerLink) -> None:
        self._link = link

    def routes(self) -> list[Route]:
        return [
            Route("/v1/requests/{name:path}/cancel", self.cancel, methods=["POST"]),
            Route("/v1/requests/{name:path}/ping", self.ping, methods=["POST"]),
            Route("/v1/requests/{name:path}", self.show),
        ]

    async def show(self, request: Request) -> Response:
        found = self._found(request)[-1]
        kind = "chat.completion" if found.asked.chat else "text_completion"
        if found.is_ended and found.is_aborted:
            texts = [choice.text for choice in found.choices]
            answer = asdict(AnswerWriter(found).whole(texts)) | {"prompt": found.asked.prompt}
        else:
            lengths = [
                schemas.ChoiceLength(
                    index=choice.index,
                    finish_reason=choice.finish_reason,
                    tokens_generated=choice.num_generated,
                )
                for choice in found.choices
            ]
            answer = {"created": found.created, "model": found.asked.model}
            answer |= {"choices": lengths, "usage": usage_of(found)}
        return json_response(schemas.RequestShown(**{**facts_of(found), **answer}, object=kind))

    async def cancel(self, request: Request) -> Response:
        answers = []
        for found in self._found(request):
            cancelled = self._link.cancel(found, CancelReason.API)
            answers.append(schemas.RequestCancelled(**facts_of(found), cancelled=cancelled))
        has_cancelled = any(answer.cancelled for answer in answers)
        name = request.path_params["name"]
        return json_response(
            schemas.CancelAnswer(id=name, cancelled=has_cancelled, requests=answers)
        )

    async def ping(self, request: Request) -> Response:
        live = [found for found in self._found(request) if not found.is_ended]
        if not live:
            raise ApiError(404, "this request has ended", code="request_ended")
        for found in live:
            self._link.ping(found)
        bounds = {found.request_id: found.asked.keep_alive_s for found in live}
        return json_response(
            schemas.PingAnswer(id=request.path_params["name"], keep_alive_s=bounds)
        )

    def _found(self, request: Request) -> list[ClientRequest]:
        """The engine's and the answer's name go before the client's. Raises ApiError 404."""
        link, name, owner = self._link, request.path_params["name"], request.state.owner
        request_id, now_ns = name.removeprefix("chatcmpl-").removeprefix("cmpl-"), link.now_ns()
        named = link.live.get(request_id) or link.archive.by_id(request_id, now_ns)
        if named is not None and named.owner == owner and name in (request_id, named.answer_id):
            return [named]
        live = [r for r in link.live.values() if (r.client_request_id, r.owner) == (name, owner)]
        if live:
            return live
        latest = link.archive.latest_of(name, owner, now_ns)
        if latest is None:
            raise ApiError(404, "no such request, or it is no longer known", code="unknown_request")
        return [latest]


def facts_of(request: ClientRequest) -> dict[str, Any]:
    given = request.context.cancellation
    endings = [choice.ending for choice in request.choices if choice.ending is not None]
    return {
        "id": request.answer_id,
        "request_id": request.request_id,
        "client_request_id": request.client_request_id,
        "status": request.status,
        "phase": request.phase,
        "tokens_generated": request.num_generated,
        "preemptions": sum(ending.num_preemptions for ending in endings),
        "cancellation": None if given is None else schemas.Cancelled(**given._asdict()),
    }
