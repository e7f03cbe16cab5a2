"""One request from acceptance to its last byte, with somebody listening for the client's leaving.

An ASGI server tells of a closed connection through `receive`, and only to those who wait in it: an
application that only sends writes into the void. So the whole life of a request lies inside this
response: it is submitted here, while a task of its own waits in `receive`; when the client is gone
the iteration over its outputs ends, wherever the request stood, and there is one way out.
"""

import asyncio

from starlette.types import Receive, Scope, Send

from reference_engine.frontend.chunks import AnswerWriter, error_event
from reference_engine.frontend.errors import ApiError
from reference_engine.frontend.openai_api import Generation
from reference_engine.frontend.worker_link import Answer, WorkerGoneError, WorkerLink
from reference_engine.request import CancelReason

_NO_BUFFERING = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class GenerationResponse:
    """An ASGI response that generates while it is being sent."""

    def __init__(
        self, link: WorkerLink, generation: Generation, client_request_id: str | None, created: int
    ) -> None:
        self._link = link
        self._generation = generation
        self._client_request_id = client_request_id
        self._created = created

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._generation
        try:
            answer = self._link.submit(
                generation.prompt_token_ids, generation.sampling, self._client_request_id
            )
        except WorkerGoneError as error:
            await ApiError(503, str(error)).response()(scope, receive, send)
            return
        watch = asyncio.create_task(self._watch(receive, answer))
        try:
            if generation.stream:
                await self._stream(answer, send)
            else:
                await self._send_whole(answer, scope, receive, send)
        finally:
            watch.cancel()
            # Reached with a live request only when the server is shutting down.
            self._link.abort(answer, CancelReason.SERVER_SHUTDOWN)

    async def _watch(self, receive: Receive, answer: Answer) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._link.disconnected(answer)

    async def _stream(self, answer: Answer, send: Send) -> None:
        writer = self._writer(answer)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), *_NO_BUFFERING]
        headers += self._request_id_header()
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send_part(send, writer.opening())
        num_generated = 0
        try:
            async for output in answer:
                num_generated = output.num_generated
                await _send_part(send, writer.token(output))
        except WorkerGoneError as error:
            await _send_last(send, error_event(str(error)))
            return
        await _send_last(send, writer.closing(num_generated))

    async def _send_whole(self, answer: Answer, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            outputs = [output async for output in answer]
        except WorkerGoneError as error:
            await ApiError(503, str(error)).response()(scope, receive, send)
            return
        if not answer.is_finished:
            return  # the client has left: nobody is there to be answered
        headers = [(b"content-type", b"application/json"), *self._request_id_header()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send_last(send, self._writer(answer).whole(outputs))

    def _writer(self, answer: Answer) -> AnswerWriter:
        prefix = "chatcmpl" if self._generation.chat else "cmpl"
        model = self._generation.model
        return AnswerWriter(self._generation, f"{prefix}-{answer.request_id}", model, self._created)

    def _request_id_header(self) -> list[tuple[bytes, bytes]]:
        if self._client_request_id is None:
            return []
        return [(b"x-request-id", self._client_request_id.encode("latin-1"))]


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _send_last(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": False})
