"""One request from acceptance to its last byte, and the JSON that its client gets.

While a response is sent, a task of its own watches the client (see `detection`). When the
client is gone, its outbox is dropped and the loop over its outputs ends, whatever the state of the
request. The link decides whether to cancel it. A request that is cancelled for another reason goes
on until the worker has reported its end, which its client gets as the end of its answer.
"""

import asyncio
from functools import partial
from typing import Any, Final

import msgspec
from msgspec import UNSET, UnsetType
from starlette.types import Receive, Scope, Send

from reference_engine.api.schemas import (
    ApiError,
    CachedTokens,
    CancellationInfo,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    ChatPiece,
    Completion,
    CompletionChoice,
    CompletionChunk,
    Usage,
)
from reference_engine.cancellation import CancelReason
from reference_engine.core.request import FinishReason
from reference_engine.protocol import Output
from reference_engine.serve.client_request import Choice, ClientRequest
from reference_engine.serve.detection import Client
from reference_engine.serve.link import WorkerLink
from reference_engine.serve.supervisor import EngineStoppedError
from reference_engine.serve.timeouts import Patience, RanOutError

_NO_BUFFERING: Final = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
_DONE: Final = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class AnswerWriter:
    def __init__(self, request: ClientRequest) -> None:
        self._request = request
        self._head: dict[str, Any] = {
            "id": request.answer_id,
            "created": request.created,
            "model": request.model,
        }

    def opening(self) -> bytes:
        """The events before the first token: a chat begins with its role."""
        if not self._request.chat:
            return b""
        delta = ChatDelta(role="assistant", content="")
        pieces = [
            ChatPiece(index=choice.index, delta=delta, logprobs=None, finish_reason=None)
            for choice in self._request.choices
        ]
        return b"".join(self._event([piece], self._usage_so_far(0)) for piece in pieces)

    def token(self, index: int, output: Output) -> bytes:
        others = sum(c.num_sent for c in self._request.choices if c.index != index)
        usage = self._usage_so_far(others + output.num_generated)
        return self._event([self._piece(index, output)], usage)

    def closing(self, aborted: list[tuple[int, Output]]) -> bytes:
        """The events after the last token: the ends of aborted answers, usage, and the end mark."""
        if aborted:
            pieces = [self._piece(index, output) for index, output in aborted]
            return self._event(pieces, **self._end()) + _DONE
        if self._request.include_usage:
            return self._event([], usage_of(self._request)) + _DONE
        return _DONE

    def whole(self, texts: list[str]) -> Completion | ChatCompletion:
        choices: list[Any] = [
            self._choice(choice, text)
            for choice, text in zip(self._request.choices, texts, strict=True)
        ]
        kind = ChatCompletion if self._request.chat else Completion
        return kind(**self._head, choices=choices, **self._end())

    def _choice(self, choice: Choice, text: str) -> ChatChoice | CompletionChoice:
        index, end = choice.index, choice.finish_reason
        if not self._request.chat:
            return CompletionChoice(index=index, text=text, logprobs=None, finish_reason=end)
        message = ChatMessage(role="assistant", content=text)
        return ChatChoice(index=index, message=message, logprobs=None, finish_reason=end)

    def _piece(self, index: int, output: Output) -> ChatPiece | CompletionChoice:
        end, text = output.finish_reason, output.text
        if not self._request.chat:
            return CompletionChoice(index=index, text=text, logprobs=None, finish_reason=end)
        delta = ChatDelta() if end is not None and not text else ChatDelta(content=text)
        return ChatPiece(index=index, delta=delta, logprobs=None, finish_reason=end)

    def _usage_so_far(self, num_generated: int) -> Usage | UnsetType:
        if not self._request.continuous_usage:
            return UNSET
        return _usage(self._request.num_prompt_tokens, num_generated)

    def _end(self) -> dict[str, Any]:
        request = self._request
        if not request.is_aborted:
            return {"usage": usage_of(request)}
        info = _cancellation_info(request)
        return {"usage": usage_of(request), "partial": True, "cancellation_info": info}

    def _event(self, pieces: list[Any], usage: Usage | UnsetType = UNSET, **end: Any) -> bytes:
        kind = ChatChunk if self._request.chat else CompletionChunk
        return _event(kind(**self._head, choices=pieces, usage=usage, **end))


def usage_of(request: ClientRequest) -> Usage:
    """Prompt tokens count once, and cached tokens are those of the first answer.

    The other answers find the prompt in the cache because the first one computed it.
    """
    ending = request.choices[0].ending
    return _usage(
        request.num_prompt_tokens,
        request.num_generated,
        UNSET if ending is None else CachedTokens(cached_tokens=ending.num_cached_tokens),
    )


def _usage(num_prompt: int, num_generated: int, details: CachedTokens | UnsetType = UNSET) -> Usage:
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_generated,
        total_tokens=num_prompt + num_generated,
        prompt_tokens_details=details,
    )


def _cancellation_info(request: ClientRequest) -> CancellationInfo:
    cancellation = request.token.cancellation
    return CancellationInfo(
        reason=None if cancellation is None else cancellation.reason,
        phase=request.phase,
        position=request.num_generated if cancellation is None else request.num_at_cancel,
        tokens_generated=request.num_generated,
        tokens_remaining=request.num_remaining,
    )


def _event(body: msgspec.Struct) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


class GenerationResponse:
    """An ASGI response to a request that the worker has, sent while it is generated."""

    def __init__(self, link: WorkerLink, request: ClientRequest) -> None:
        self._link = link
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = self._request
        client = Client(
            scope,
            receive,
            send,
            stall_timeout_s=self._link.settings.stall_timeout_s,
            on_left=partial(self._link.disconnected, request),
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(client.listen())
                await (self._stream(client) if request.stream else self._send_whole(client))
                if client.has_left or request.has_left:
                    await client.dismiss()
                watch.cancel()
        except BaseException:
            # This task was cancelled, or has a bug: the answer will not be read.
            self._link.cancel(request, CancelReason.SERVER_SHUTDOWN)
            raise

    async def _stream(self, client: Client) -> None:
        request, writer = self._request, AnswerWriter(self._request)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), *_NO_BUFFERING]
        await client.start(200, [*headers, self._request_id_header()])
        await client.send_part(writer.opening())
        aborted = []
        until_heartbeat = Patience(self._link.settings.heartbeat_s)
        try:
            while (item := await self._next(client, until_heartbeat)) is not None:
                index, output = item
                if output.finish_reason == FinishReason.ABORT:
                    aborted.append(item)
                    continue
                await client.send_part(writer.token(index, output))
                request.choices[index].num_sent = output.num_generated
        except EngineStoppedError as error:
            await client.send_last(_event(ApiError(503, str(error)).body))
            return
        finally:
            until_heartbeat.stop()
        if request.is_ended:
            await client.send_last(writer.closing(aborted))

    async def _next(self, client: Client, until_heartbeat: Patience) -> tuple[int, Output] | None:
        while True:
            try:
                with until_heartbeat:
                    return await self._request.outbox.get()
            except RanOutError:
                await client.send_heartbeat()

    async def _send_whole(self, client: Client) -> None:
        request = self._request
        texts = [""] * len(request.choices)
        try:
            while (item := await request.outbox.get()) is not None:
                index, output = item
                texts[index] += output.text
        except EngineStoppedError as error:
            refusal = ApiError(503, str(error)).response(request.client_request_id)
            await client.start(refusal.status_code, refusal.raw_headers)
            await client.send_last(bytes(refusal.body))
            return
        if not request.is_ended:
            return  # the client has left
        body = _encode(AnswerWriter(request).whole(texts))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            self._request_id_header(),
        ]
        await client.start(200, headers)
        await client.send_last(body)

    def _request_id_header(self) -> tuple[bytes, bytes]:
        name = self._request.client_request_id or self._request.request_id
        return b"x-request-id", name.encode("latin-1")
