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
from reference_engine.frontend.worker_link import Answer, EngineStoppedError, WorkerLink
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
        except EngineStoppedError as error:
            await ApiError(503, str(error)).response(self._client_request_id)(scope, receive, send)
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                watch = tasks.create_task(self._watch(receive, answer))
                if generation.stream:
                    await self._stream(answer, send)
                else:
                    await self._send_whole(answer, scope, receive, send)
                watch.cancel()
        finally:
            # It is still being generated only if this task was cancelled, or has a bug.
            self._link.abort(answer, CancelReason.SERVER_SHUTDOWN)

    async def _watch(self, receive: Receive, answer: Answer) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._link.disconnected(answer)

    async def _stream(self, answer: Answer, send: Send) -> None:
        writer = self._writer(answer)
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), *_NO_BUFFERING]
        headers.append(self._request_id_header(answer))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send_part(send, writer.opening())
        num_generated = 0
        try:
            async for output in answer:
                num_generated = output.num_generated
                await _send_part(send, writer.token(output))
        except EngineStoppedError as error:
            await _send_last(send, error_event(str(error)))
            return
        await _send_last(send, writer.closing(num_generated))

    async def _send_whole(self, answer: Answer, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            outputs = [output async for output in answer]
        except EngineStoppedError as error:
            await ApiError(503, str(error)).response(self._client_request_id)(scope, receive, send)
            return
        if not answer.is_finished:
            return  # the client has left: nobody is there to be answered
        body = self._writer(answer).whole(outputs)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            self._request_id_header(answer),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await _send_last(send, body)

    def _writer(self, answer: Answer) -> AnswerWriter:
        prefix = "chatcmpl" if self._generation.chat else "cmpl"
        model = self._generation.model
        return AnswerWriter(self._generation, f"{prefix}-{answer.request_id}", model, self._created)

    def _request_id_header(self, answer: Answer) -> tuple[bytes, bytes]:
        """The client's own id, or ours where it gave none."""
        return b"x-request-id", (self._client_request_id or answer.request_id).encode("latin-1")


async def _send_part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


async def _send_last(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": False})
