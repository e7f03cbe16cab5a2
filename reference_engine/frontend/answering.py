"""One request from acceptance to its last byte, with somebody watching for the client's leaving.

The whole life of a request lies inside this response: it is submitted here, while a task of its own
watches the client (see `detection`). When the client is gone, its outbox is dropped, the loop over
its outputs ends, wherever the request stood, and there is one way out. What becomes of the request
is the link's to decide; a request that somebody else cancels goes on until the worker has said how
it ended, and its client gets that as the end of its answer.
"""

import asyncio
from functools import partial

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from reference_engine.cancellation import CancelReason
from reference_engine.frontend.chunks import AnswerWriter, error_event
from reference_engine.frontend.client_request import ClientRequest
from reference_engine.frontend.connection import EngineStoppedError
from reference_engine.frontend.detection import Client
from reference_engine.frontend.errors import ApiError
from reference_engine.frontend.openai_api import Generation
from reference_engine.frontend.patience import Patience, RanOutError
from reference_engine.frontend.worker_link import WorkerLink
from reference_engine.protocol import Output
from reference_engine.request import FinishReason

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
