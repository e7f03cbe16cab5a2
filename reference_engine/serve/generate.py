"""One request from acceptance to its last byte, and the JSON that its client gets.

When the client is gone, the loop over its outputs ends; the link decides whether to cancel the
request. A request that is cancelled for another reason stays open until the worker has reported its
end, which its client gets as the end of its answer.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from math import ceil
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType
from starlette.types import Receive, Scope, Send

from reference_engine.api import schemas
from reference_engine.api.openai import Generation
from reference_engine.api.schemas import ApiError, json_response
from reference_engine.config import EngineConfig
from reference_engine.context import CancelReason
from reference_engine.core.request import FinishReason
from reference_engine.model.tokenizer import Tokenizer
from reference_engine.protocol import Ending, Output
from reference_engine.serve.client_request import ClientRequest
from reference_engine.serve.detection import RanOutError, ReusableTimeout, WatchedClient
from reference_engine.serve.link import WorkerLink
from reference_engine.serve.supervisor import EngineStoppedError

_STREAM_HEADERS: Final = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_LONG_BODY: Final = 32_768  # bytes: to tokenize more would hold up the event loop for milliseconds
_DONE: Final = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def admit(link: WorkerLink, owner: str | None) -> None:
    """Raises ApiError 429 beyond the key's limits."""
    wait_s = link.limiter.admit(owner, link.now_ns())
    if wait_s is not None:
        raise ApiError(
            429,
            f"too many requests or tokens in a minute; try again in {ceil(wait_s)} s",
            code="rate_limit_exceeded",
            headers={"retry-after": str(ceil(wait_s))},
        )


async def read_generation(
    read: Callable[[bytes, EngineConfig, Tokenizer], Generation],
    body: bytes,
    config: EngineConfig,
    tokenizer: Tokenizer,
) -> Generation:
    if len(body) < _LONG_BODY:
        return read(body, config, tokenizer)
    return await asyncio.to_thread(read, body, config, tokenizer)


class AnswerWriter:
    def __init__(self, request: ClientRequest) -> None:
        self._request = request
        self._is_chat = request.asked.chat
        self._has_usage = request.asked.continuous_usage
        self._tool = request.asked.tool
        self._called: set[int] = set()  # the answers whose call has its name
        self._head: dict[str, Any] = {
            "id": request.answer_id,
            "created": request.created,
            "model": request.asked.model,
        }

    def opening(self) -> bytes:
        if not self._is_chat:
            return b""
        delta = schemas.ChatDelta(role="assistant", content="")
        pieces = [
            schemas.ChatPiece(index=choice.index, delta=delta, logprobs=None, finish_reason=None)
            for choice in self._request.choices
        ]
        usage = usage_of(self._request, 0) if self._has_usage else UNSET
        return b"".join(self._event([piece], usage) for piece in pieces)

    def token(self, index: int, output: Output) -> bytes:
        usage: schemas.Usage | UnsetType = UNSET
        if self._has_usage:
            others = sum(c.num_sent for c in self._request.choices if c.index != index)
            usage = usage_of(self._request, others + output.num_generated)
        choice = self._choice(index, output.text, output.ending)
        return self._event([choice], usage, early_stop=choice.early_stop)

    def closing(self, aborted: list[tuple[int, Output]]) -> bytes:
        if aborted:
            choices = [self._choice(at, output.text, output.ending) for at, output in aborted]
            return self._event(choices, **self._end()) + _DONE
        if self._request.asked.include_usage:
            return self._event([], usage_of(self._request)) + _DONE
        return _DONE

    def whole(self, texts: list[str]) -> schemas.Completion | schemas.ChatCompletion:
        kind = schemas.ChatCompletion if self._is_chat else schemas.Completion
        choices = [
            self._choice(choice.index, text, choice.ending, is_whole=True)
            for choice, text in zip(self._request.choices, texts, strict=True)
        ]
        early = next((one.early_stop for one in choices if one.early_stop), UNSET)
        return kind(**self._head, choices=choices, early_stop=early, **self._end())

    def _choice(
        self, index: int, text: str, ending: Ending | None, *, is_whole: bool = False
    ) -> Any:
        end = _place_and_end(index, ending)
        if not self._is_chat:
            return schemas.CompletionChoice(text=text, **end)
        if is_whole:
            message = schemas.ChatMessage(role="assistant", content=text)
            if self._tool is not None:
                message = schemas.ChatMessage(
                    role="assistant", content="", tool_calls=[self._call(index, text)]
                )
            return schemas.ChatChoice(message=message, **end)
        is_only_an_end = ending is not None and not text
        delta = schemas.ChatDelta() if is_only_an_end else schemas.ChatDelta(content=text)
        if self._tool is not None and not is_only_an_end:
            delta = schemas.ChatDelta(tool_calls=[self._call(index, text)])
        return schemas.ChatPiece(delta=delta, **end)

    def _call(self, index: int, text: str) -> schemas.ToolCall:
        assert self._tool is not None
        if index in self._called:
            return schemas.ToolCall(function=schemas.FunctionCall(arguments=text))
        self._called.add(index)
        return schemas.ToolCall(
            id=f"call-{self._request.request_id}-{index}",
            type="function",
            function=schemas.FunctionCall(name=self._tool, arguments=text),
        )

    def _end(self) -> dict[str, Any]:
        request = self._request
        if not request.is_aborted:
            return {"usage": usage_of(request)}
        cancellation, position = request.context.cancellation, request.num_at_cancel
        position = request.num_generated if position is None else position
        info = schemas.CancellationInfo(
            reason=None if cancellation is None else cancellation.reason,
            phase=request.phase,
            position=position,
            tokens_generated=request.num_generated,
            tokens_remaining=request.num_remaining,
        )
        return {"usage": usage_of(request), "partial": True, "cancellation_info": info}

    def _event(
        self, choices: list[Any], usage: schemas.Usage | UnsetType = UNSET, **end: Any
    ) -> bytes:
        kind = schemas.ChatChunk if self._is_chat else schemas.CompletionChunk
        return _event(kind(**self._head, choices=choices, usage=usage, **end))


def _place_and_end(index: int, ending: Ending | None) -> dict[str, Any]:
    if ending is None:
        return {"index": index, "logprobs": None, "finish_reason": None}
    early = ending.early_stop
    stopped: schemas.EarlyStopped | UnsetType = UNSET
    if early is not None:
        stopped = schemas.EarlyStopped(condition=early.condition, tokens_saved=early.tokens_saved)
    return {
        "index": index,
        "logprobs": None,
        "finish_reason": ending.finish_reason,
        "stop_reason": ending.stop_reason,
        "early_stop": stopped,
    }


def usage_of(request: ClientRequest, num_sent: int | None = None) -> schemas.Usage:
    """Cached tokens are the first answer's: the other answers find what it has computed.

    With `num_sent`, usage in the middle of a stream: these tokens, and nothing on the cache yet.
    """
    ending, num_generated = request.choices[0].ending, num_sent
    if num_generated is None:
        num_generated = request.num_generated
    cached: schemas.CachedTokens | UnsetType = UNSET
    if num_sent is None and ending is not None:
        cached = schemas.CachedTokens(cached_tokens=ending.num_cached_tokens)
    return schemas.Usage(
        prompt_tokens=request.num_prompt_tokens,
        completion_tokens=num_generated,
        total_tokens=request.num_prompt_tokens + num_generated,
        prompt_tokens_details=cached,
    )


def _event(body: msgspec.Struct) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


class GenerationResponse:
    """An ASGI response to a request that the worker has, sent while it is generated."""

    def __init__(self, link: WorkerLink, request: ClientRequest) -> None:
        self._link = link
        self._request = request
        self._name = request.client_request_id or request.request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = self._request
        client = WatchedClient(
            scope,
            receive,
            send,
            stall_timeout_s=self._link.settings.stall_timeout_s,
            on_left=partial(self._link.disconnected, request),
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(client.listen())
                await (self._stream(client) if request.asked.stream else self._send_whole(client))
                if client.has_left or request.has_left:
                    await client.dismiss()
                watch.cancel()
        except BaseException:
            # This task was cancelled, or has a bug: the answer will not be read.
            self._link.cancel(request, CancelReason.SERVER_SHUTDOWN)
            raise

    async def _stream(self, client: WatchedClient) -> None:
        request, writer = self._request, AnswerWriter(self._request)
        name = b"x-request-id", self._name.encode("latin-1")
        await client.start(200, [*_STREAM_HEADERS, name])
        await client.send(writer.opening())
        aborted = []
        until_heartbeat = ReusableTimeout(self._link.settings.heartbeat_s)
        try:
            while (item := await self._next(client, until_heartbeat)) is not None:
                index, output = item
                if output.ending is not None and output.finish_reason == FinishReason.ABORT:
                    aborted.append(item)
                    continue
                await client.send(writer.token(index, output))
                request.choices[index].num_sent = output.num_generated
        except EngineStoppedError as error:
            await client.send(_event(ApiError(error.status, str(error)).body), is_last=True)
            return
        finally:
            until_heartbeat.stop()
        if request.is_ended:
            await client.send(writer.closing(aborted), is_last=True)

    async def _next(
        self, client: WatchedClient, until_heartbeat: ReusableTimeout
    ) -> tuple[int, Output] | None:
        while True:
            try:
                with until_heartbeat:
                    return await self._request.outbox.get()
            except RanOutError:
                await client.send_heartbeat()

    async def _send_whole(self, client: WatchedClient) -> None:
        request = self._request
        texts = [""] * len(request.choices)
        try:
            while (item := await request.outbox.get()) is not None:
                index, output = item
                texts[index] += output.text
        except EngineStoppedError as error:
            answer = ApiError(error.status, str(error)).response(request.client_request_id)
        else:
            if not request.is_ended:
                return  # the client has left
            whole = AnswerWriter(request).whole(texts)
            answer = json_response(whole, headers={"x-request-id": self._name})
        await client.start(answer.status_code, answer.raw_headers)
        await client.send(bytes(answer.body), is_last=True)
