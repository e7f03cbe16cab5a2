"""One request from acceptance to its last byte, with somebody watching for the client's leaving.

The whole life of a request lies inside this response: it is submitted here, while a task of its own
watches the client (see `detection`). When the client is gone, its outbox is dropped, the loop over
its outputs ends, wherever the request stood, and there is one way out. What becomes of the request
is the link's to decide; a request that somebody else cancels goes on until the worker has said how
it ended, and its client gets that as the end of its answer.
"""

import asyncio
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from reference_engine.api.openai import Generation
from reference_engine.api.schemas import ApiError
from reference_engine.cancellation import CancelReason
from reference_engine.core.request import FinishReason
from reference_engine.protocol import Output
from reference_engine.serve.client_request import ClientRequest
from reference_engine.serve.detection import Client
from reference_engine.serve.link import WorkerLink
from reference_engine.serve.supervisor import EngineStoppedError
from reference_engine.serve.timeouts import Patience, RanOutError

_NO_BUFFERING = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class GenerationResponse:
    """An ASGI response that generates while it is being sent.

    `owner` is the API key that the request came with; `created` is wall time in seconds.
    """

    def __init__(
        self,
        link: WorkerLink,
        generation: Generation,
        client_request_id: str | None,
        *,
        owner: str | None,
        created: int,
    ) -> None:
        self._link = link
        self._generation = generation
        self._client_request_id = client_request_id
        self._owner = owner
        self._created = created

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            request = self._link.submit(
                self._generation,
                client_request_id=self._client_request_id,
                owner=self._owner,
                created=self._created,
            )
        except EngineStoppedError as error:
            await self._refusal(error)(scope, receive, send)
            return
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
                await self._answer(request, client)
                watch.cancel()
        except BaseException:
            # This task was cancelled, or has a bug: nobody will read what is generated.
            self._link.cancel(request, CancelReason.SERVER_SHUTDOWN)
            raise

    async def _answer(self, request: ClientRequest, client: Client) -> None:
        if self._generation.stream:
            await self._stream(request, client)
        else:
            await self._send_whole(request, client)
        if client.has_left or request.has_left:
            await client.dismiss()

    async def _stream(self, request: ClientRequest, client: Client) -> None:
        options = self._generation
        writer = AnswerWriter(
            request,
            include_usage=options.include_usage,
            continuous_usage=options.continuous_usage,
        )
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), *_NO_BUFFERING]
        await client.start(200, [*headers, self._request_id_header(request)])
        await client.send_part(writer.opening())
        aborted = []
        until_heartbeat = Patience(self._link.settings.heartbeat_s)
        try:
            while (item := await self._next(request, client, until_heartbeat)) is not None:
                index, output = item
                if output.finish_reason == FinishReason.ABORT:
                    aborted.append(item)
                    continue
                await client.send_part(writer.token(index, output))
                request.choices[index].num_sent = output.num_generated
        except EngineStoppedError as error:
            await client.send_last(error_event(str(error)))
            return
        finally:
            until_heartbeat.stop()
        if request.is_ended:
            await client.send_last(writer.closing(aborted))

    async def _next(
        self, request: ClientRequest, client: Client, until_heartbeat: Patience
    ) -> tuple[int, Output] | None:
        """The next output, and heartbeats until it comes."""
        while True:
            try:
                with until_heartbeat:
                    return await request.outbox.get()
            except RanOutError:
                await client.send_heartbeat()

    async def _send_whole(self, request: ClientRequest, client: Client) -> None:
        texts = [""] * len(request.choices)
        try:
            while (item := await request.outbox.get()) is not None:
                index, output = item
                texts[index] += output.text
        except EngineStoppedError as error:
            refusal = self._refusal(error)
            await client.start(refusal.status_code, refusal.raw_headers)
            await client.send_last(bytes(refusal.body))
            return
        if not request.is_ended:
            return  # the client has left: nobody is there to be answered
        body = msgspec.json.encode(AnswerWriter(request).whole(texts))
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            self._request_id_header(request),
        ]
        await client.start(200, headers)
        await client.send_last(body)

    def _refusal(self, error: EngineStoppedError) -> Response:
        return ApiError(503, str(error)).response(self._client_request_id)

    def _request_id_header(self, request: ClientRequest) -> tuple[bytes, bytes]:
        """The client's own id, or ours where it gave none."""
        return b"x-request-id", (self._client_request_id or request.request_id).encode("latin-1")


DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class AnswerWriter:
    """Writes the answers to one request.

    `include_usage`: at the end of a stream; `continuous_usage`: with each of its pieces. `head`:
    what every body begins with.
    """

    def __init__(
        self, request: ClientRequest, *, include_usage: bool = False, continuous_usage: bool = False
    ) -> None:
        self._request = request
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        kind = "chat.completion" if request.chat else "text_completion"
        self.head = {
            "id": request.answer_id,
            "object": kind,
            "created": request.created,
            "model": request.model,
        }
        self._chunk = {**self.head, "object": "chat.completion.chunk" if request.chat else kind}

    def opening(self) -> bytes:
        """The events before the first token: chat announces its role."""
        if not self._request.chat:
            return b""
        content = {"delta": {"role": "assistant", "content": ""}}
        choices = [_choice(choice.index, content, None) for choice in self._request.choices]
        return b"".join(self._event([choice], 0) for choice in choices)

    def token(self, index: int, output: Output) -> bytes:
        """The event of one output: text, or the finish reason with none."""
        num_generated = 0
        if self._continuous_usage:
            others = sum(c.num_sent for c in self._request.choices if c.index != index)
            num_generated = others + output.num_generated
        return self._event([self._piece(index, output)], num_generated)

    def closing(self, aborted: list[tuple[int, Output]]) -> bytes:
        """What follows the last token: the ends of aborted answers, usage, and the end mark."""
        request = self._request
        if aborted:
            choices = [self._piece(index, output) for index, output in aborted]
            return _event({**self._chunk, "choices": choices, **self._partial()}) + DONE
        if not self._include_usage:
            return DONE
        return _event({**self._chunk, "choices": [], "usage": usage(request)}) + DONE

    def whole(self, texts: list[str]) -> dict[str, Any]:
        """The body of an answer that was not streamed, or that was aborted. A text a choice."""
        request = self._request
        choices = [
            _choice(choice.index, self._whole_content(text), choice.finish_reason)
            for choice, text in zip(request.choices, texts, strict=True)
        ]
        end = self._partial() if request.is_aborted else {"usage": usage(request)}
        return {**self.head, "choices": choices, **end}

    def _whole_content(self, text: str) -> dict[str, Any]:
        if self._request.chat:
            return {"message": {"role": "assistant", "content": text}}
        return {"text": text}

    def _piece(self, index: int, output: Output) -> dict[str, Any]:
        if not self._request.chat:
            content: dict[str, Any] = {"text": output.text}
        elif output.finish_reason is None or output.text:
            content = {"delta": {"content": output.text}}
        else:
            content = {"delta": {}}
        return _choice(index, content, output.finish_reason)

    def _partial(self) -> dict[str, Any]:
        request = self._request
        info = cancellation_info(request)
        return {"usage": usage(request), "partial": True, "cancellation_info": info}

    def _event(self, choices: list[dict[str, Any]], num_generated: int) -> bytes:
        chunk: dict[str, Any] = {**self._chunk, "choices": choices}
        if self._continuous_usage:
            chunk["usage"] = _usage(self._request.num_prompt_tokens, num_generated)
        return _event(chunk)


def usage(request: ClientRequest) -> dict[str, Any]:
    """OpenAI's: the prompt once, all answers' tokens; cached tokens are those of the first answer.

    The other answers find the prompt in the cache because the first one computed it.
    """
    counts: dict[str, Any] = _usage(request.num_prompt_tokens, request.num_generated)
    ending = request.choices[0].ending
    if ending is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": ending.num_cached_tokens}
    return counts


def cancellation_info(request: ClientRequest) -> dict[str, Any]:
    """How an aborted request ended.

    `position`: tokens that the frontend had when it was cancelled; a step in flight may have added
    one, which `tokens_generated` has. `reason` is null if nobody here had asked for the abort.
    """
    cancellation = request.token.cancellation
    return {
        "reason": None if cancellation is None else cancellation.reason,
        "phase": request.phase,
        "position": request.num_generated if cancellation is None else request.num_at_cancel,
        "tokens_generated": request.num_generated,
        "tokens_remaining": request.num_remaining,
    }


def error_event(message: str) -> bytes:
    """The last event of a stream that cannot go on."""
    error = {"message": message, "type": "server_error", "param": None, "code": None}
    return _event({"error": error})


def _choice(index: int, content: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, **content, "logprobs": None, "finish_reason": finish_reason}


def _usage(num_prompt: int, num_generated: int) -> dict[str, int]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
    }


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + _encode(chunk) + b"\n\n"
