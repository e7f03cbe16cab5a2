"""A frontend without a network: a made-up worker behind the link, an ASGI client in front of it."""

import asyncio
import json
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import httpx
import msgspec

from reference_engine.api.openai import Generation
from reference_engine.api.schemas import LifecycleEntry
from reference_engine.config import EngineConfig, FrontendSettings
from reference_engine.core.accounting import Counters
from reference_engine.core.request import FinishReason, Phase, Sampling
from reference_engine.metrics.collector import MetricsCollector
from reference_engine.model.tokenizer import WordTokenizer
from reference_engine.protocol import (
    AbortRequest,
    Ending,
    Output,
    Ready,
    RequestEvent,
    StepReport,
    ToWorker,
)
from reference_engine.serve.faults import FaultyLink
from reference_engine.serve.generate import GenerationResponse
from reference_engine.serve.link import Company
from reference_engine.serve.server import Frontend

READY = Ready(pid=1, device="cpu", vocab_size=2048, gpu_name=None, worker="worker-0")
EMPTY_REPORT = StepReport(free_blocks=0, counters=Counters(), worker="worker-0")


class FakeWorker:
    """The other end of the link: collects its messages, and reports what a test gives it.

    Its clock is the event loop's, a nanosecond later with each reading. `sent` has the messages of
    all `workers`, each with its worker's name.
    """

    def __init__(
        self, *, workers: Sequence[str] = ("worker-0",), patience_s: float = 0.0, **settings: Any
    ) -> None:
        self.sent: list[tuple[str, ToWorker]] = []
        self.arrived = asyncio.Event()
        self.aborted = asyncio.Event()
        self._readings = 0
        limits = FrontendSettings(**settings)
        self.link = FaultyLink(
            self.now_ns,
            send=self.send,
            settings=limits,
            collector=MetricsCollector(EngineConfig()),
            random=Random(1),
            company=Company(patience_s=patience_s),
        )
        for name in workers:
            self.link.worker_up(ready(name))

    def now_ns(self) -> int:
        self._readings += 1
        return int(asyncio.get_running_loop().time() * 1e9) + self._readings

    @property
    def received(self) -> list[ToWorker]:
        return [message for _, message in self.sent]

    def die(self) -> None:
        self.link.worker_lost("worker-0")

    def send(self, worker: str, message: ToWorker) -> None:
        if worker not in self.link.router.names:
            raise ConnectionResetError("dead")
        self.sent.append((worker, message))
        (self.aborted if isinstance(message, AbortRequest) else self.arrived).set()

    def say(
        self,
        *outputs: Output,
        events: list[RequestEvent] | None = None,
        holds_blocks: bool = False,
        worker: str = "worker-0",
    ) -> None:
        """A report; an ended request's blocks are freed before its last output, as in a worker."""
        ended = [o.request_id for o in outputs if o.ending is not None and not holds_blocks]
        freed = [self.event("blocks_freed", request_id) for request_id in ended]
        self.link.take_in(
            worker,
            msgspec.structs.replace(
                EMPTY_REPORT, outputs=list(outputs), events=(events or []) + freed, worker=worker
            ),
        )

    def event(self, name: str, request_id: str = "req-1") -> RequestEvent:
        return RequestEvent(t_ns=self.now_ns(), event=name, request_id=request_id, step=1)

    def events(self) -> list[str]:
        """The names of the frontend's own entries."""
        return [entry.event for entry in self.entries() if entry.event != "blocks_freed"]

    def entries(self) -> list[LifecycleEntry]:
        lines = self.link.lifecycle.after(0, 100).lines
        return [msgspec.json.decode(line, type=LifecycleEntry) for line in lines]

    def aborts(self) -> list[tuple[str, str]]:
        return [(m.request_id, m.reason) for m in self.received if isinstance(m, AbortRequest)]

    def methods(self) -> dict[str, int]:
        """Aborts sent, by how the client's leaving was detected."""
        signals = self.link.collector.signals
        return {str(method): number for (_, method), number in signals.items()}


def ready(worker: str, pid: int = 1) -> Ready:
    return msgspec.structs.replace(READY, worker=worker, pid=pid)


class AsgiClient:
    """An HTTP client as an ASGI server would present it. `app` is called at once."""

    def __init__(self, app: Any, *, extensions: dict[str, Any] | None = None) -> None:
        self.gone = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self.got_text = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()
        self.send_error: Exception | None = None
        scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/", "headers": []}
        if extensions is not None:
            scope["extensions"] = extensions
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.reads.wait()
        if self.send_error is not None:
            raise self.send_error
        self.sent.append(message)
        if b"word" in message.get("body", b""):
            self.got_text.set()

    def leave(self) -> None:
        self.gone.set()

    @property
    def status(self) -> int:
        status: int = self.sent[0]["status"]
        return status

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def json(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.body)
        return body

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """The events of a stream that is complete."""
        events = [e for e in self.body.decode().split("\n\n") if e.startswith("data: ")]
        assert events.pop() == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events]

    async def finished(self) -> None:
        await asyncio.wait_for(self.task, timeout=1000)


class Served:
    """A frontend without a process, before a made-up worker."""

    def __init__(self, **settings: Any) -> None:
        self.worker = FakeWorker(**settings)
        self.link = self.worker.link
        self.frontend = Frontend(
            self.link,
            EngineConfig(),
            self.link.settings,
            WordTokenizer(READY.vocab_size),
            allow_faults=True,
        )
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=self.frontend.app()), base_url="http://engine"
        )

    def methods_and_paths(self) -> list[tuple[str, str]]:
        return [
            (method, route.path_format.format(name="req-1", model="tiny"))
            for route in self.frontend.routes()
            for method in sorted(route.methods or ())
        ]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def generation(**changes: Any) -> Generation:
    plain = Generation(
        chat=False,
        model="tiny",
        prompt_token_ids=[5, 6],
        sampling=Sampling(max_tokens=8),
        stream=True,
        include_usage=True,
        continuous_usage=False,
    )
    return msgspec.structs.replace(plain, **changes)


def respond(
    worker: FakeWorker, name: str | None = "mine", *, owner: str | None = None, **changes: Any
) -> GenerationResponse:
    request = worker.link.submit(
        generation(**changes), client_request_id=name, owner=owner, created=0
    )
    return GenerationResponse(worker.link, request)


def asked(
    *,
    limits: dict[str, Any] | None = None,
    extensions: dict[str, Any] | None = None,
    wrap: Callable[[Any], Any] = lambda app: app,
    **changes: Any,
) -> tuple[FakeWorker, AsgiClient]:
    """A worker that has a request, and the request's client. `limits`: the frontend's settings."""
    worker = FakeWorker(**limits or {})
    return worker, AsgiClient(wrap(respond(worker, **changes)), extensions=extensions)


def output(
    text: str,
    num_generated: int,
    reason: str | None = None,
    *,
    of: str = "req-1",
    phase: str = "decode",
) -> Output:
    ending = reason and Ending(
        finish_reason=FinishReason(reason),
        phase=Phase(phase),
        num_cached_tokens=1,
    )
    return Output(request_id=of, text=text, num_generated=num_generated, ending=ending or None)


async def settled(condition: Callable[[], bool]) -> None:
    for _ in range(200):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never became true")


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "little") + payload
