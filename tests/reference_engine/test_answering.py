"""Leaving, as ASGI tells of it: `receive` and `send` are local functions, nothing else is real."""

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any, cast

import msgspec
import pytest

from reference_engine.core.counters import Counters
from reference_engine.faults import Faults
from reference_engine.frontend.answering import GenerationResponse
from reference_engine.frontend.openai_api import Generation
from reference_engine.frontend.worker_link import WorkerLink
from reference_engine.protocol import (
    FrameReader,
    FromWorker,
    Output,
    StepReport,
    ToWorker,
    encode_frame,
)
from reference_engine.request import Sampling

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class FakeWorker:
    """The other end of the link: collects what is sent to it, and says what it is told to."""

    def __init__(self) -> None:
        ticks = count(1)
        self.received: list[ToWorker] = []
        self.arrived = asyncio.Event()
        self.link = WorkerLink(lambda: next(ticks), on_gone=lambda: None)
        self.link.connection_made(cast(asyncio.BaseTransport, self))
        self._reader = FrameReader()
        self._decoder = msgspec.msgpack.Decoder(ToWorker)

    def write(self, data: bytes) -> None:
        self.received += [self._decoder.decode(payload) for payload in self._reader.feed(data)]
        self.arrived.set()

    def say(self, *outputs: Output) -> None:
        report: FromWorker = StepReport(
            step=None,
            outputs=list(outputs),
            events=[],
            num_running=0,
            num_waiting=0,
            free_blocks=0,
            counters=Counters(),
        )
        self.link.data_received(encode_frame(report))

    def events(self) -> list[str]:
        return [entry.event for entry in self.link.lifecycle.after(0, 100).entries]


class Client:
    """An HTTP client as an ASGI server would present it."""

    def __init__(self, response: GenerationResponse) -> None:
        self._gone = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self.got_text = asyncio.Event()
        self.task = asyncio.create_task(response({"type": "http"}, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)
        if b"word" in message.get("body", b""):
            self.got_text.set()

    def leave(self) -> None:
        self._gone.set()

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def respond(worker: FakeWorker, *, stream: bool = True) -> GenerationResponse:
    generation = Generation(
        chat=False,
        model="tiny",
        prompt_token_ids=[5],
        sampling=Sampling(max_tokens=8),
        stream=stream,
        include_usage=True,
        continuous_usage=False,
    )
    return GenerationResponse(worker.link, generation, "mine", created=0)


def output(text: str, num_generated: int, reason: str | None = None) -> Output:
    return Output(request_id="req-1", text=text, num_generated=num_generated, finish_reason=reason)


async def finished(client: Client) -> None:
    await asyncio.wait_for(client.task, timeout=5)


async def settled(condition: Callable[[], bool]) -> None:
    for _ in range(100):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never became true")


async def test_a_stream_runs_to_its_end() -> None:
    worker = FakeWorker()
    client = Client(respond(worker))
    await worker.arrived.wait()
    worker.say(output(" word", 1), output("", 1, "length"))
    await finished(client)
    assert client.body.endswith(b"data: [DONE]\n\n")
    assert b'"completion_tokens":1' in client.body
    assert dict(client.sent[0]["headers"])[b"x-request-id"] == b"mine"
    assert len(worker.received) == 1, "a finished request is not aborted"
    assert worker.events() == ["arrived"]


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_before_the_first_token_aborts_without_a_write(stream: bool) -> None:
    worker = FakeWorker()
    client = Client(respond(worker, stream=stream))
    await worker.arrived.wait()
    client.leave()
    await finished(client)
    assert worker.events() == ["arrived", "disconnected", "abort_sent"]
    assert msgspec.to_builtins(worker.received[1])[1:] == ["req-1", "user_disconnect"]
    assert not stream or len(client.sent) >= 1


async def test_leaving_between_tokens_is_seen_while_nothing_is_written() -> None:
    worker = FakeWorker()
    client = Client(respond(worker))
    await worker.arrived.wait()
    worker.say(output(" word", 1))
    await client.got_text.wait()
    client.leave()
    await finished(client)
    assert worker.events()[1:] == ["disconnected", "abort_sent"]
    assert "serving 0 knowing 1" in repr(worker.link)
    worker.say(output(" late", 2), output("", 2, "abort"))  # dropped, and harmless
    assert "serving 0 knowing 0" in repr(worker.link), "nothing is kept of a request that ended"
    assert b"late" not in client.body


async def test_the_fault_ignore_disconnect_sees_and_does_nothing() -> None:
    worker = FakeWorker()
    worker.link.faults = Faults(ignore_disconnect=True)
    client = Client(respond(worker))
    await worker.arrived.wait()
    client.leave()
    await settled(lambda: "disconnected" in worker.events())
    assert not client.task.done()
    worker.say(output(" word", 1), output("", 1, "length"))
    await finished(client)
    assert worker.events() == ["arrived", "disconnected"]


async def test_a_dying_worker_ends_the_stream_with_an_error() -> None:
    worker = FakeWorker()
    client = Client(respond(worker))
    await worker.arrived.wait()
    worker.say(output(" word", 1))
    await client.got_text.wait()
    worker.link.ready.set_exception(RuntimeError("unused"))
    worker.link.ready.exception()
    worker.link.connection_lost(None)
    await finished(client)
    assert b'"error"' in client.body
    assert b"[DONE]" not in client.body


async def test_shutting_down_tells_those_who_wait() -> None:
    worker = FakeWorker()
    client = Client(respond(worker))
    await worker.arrived.wait()
    worker.link.shut_down()
    await finished(client)
    assert b"shutting down" in client.body
    assert msgspec.to_builtins(worker.received[1])[1:] == ["req-1", "server_shutdown"]


async def test_a_request_after_the_workers_death_is_refused() -> None:
    worker = FakeWorker()
    worker.link.connection_lost(None)
    worker.link.ready.exception()
    client = Client(respond(worker))
    await finished(client)
    assert client.sent[0]["status"] == 503


async def test_shutdown_aborts_what_is_running() -> None:
    worker = FakeWorker()
    client = Client(respond(worker))
    await worker.arrived.wait()
    client.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client.task
    assert msgspec.to_builtins(worker.received[1])[1:] == ["req-1", "server_shutdown"]
