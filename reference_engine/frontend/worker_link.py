"""The frontend's end of the socket to the worker: submit, abort, and hear what each step brought.

`EngineState` is what `/metrics` shows: the last report, copied here as it comes.
"""

import asyncio
from collections.abc import Callable
from itertools import count
from typing import cast

import msgspec

from reference_engine.config import EngineConfigError
from reference_engine.core.counters import Counters
from reference_engine.faults import Faults
from reference_engine.frontend.journal import (
    LIFECYCLE_CAPACITY,
    STEPS_CAPACITY,
    LifecycleEntry,
    Ring,
)
from reference_engine.protocol import (
    AbortRequest,
    AddRequest,
    Event,
    Failed,
    FrameReader,
    FromWorker,
    Output,
    Ready,
    SetFaults,
    StepRecord,
    StepReport,
    ToWorker,
    encode_frame,
)
from reference_engine.request import CancelReason, Sampling

_WORKER_ENDED = "the engine's worker process has ended"


class EngineStoppedError(RuntimeError):
    """Nothing can be generated any more: the worker has ended, or the server is shutting down."""


class Answer:
    """One request's outputs on their way to its client: an async iterator that ends with it.

    It ends after the output that has a finish reason, at once after `stop` (the client left), and
    with EngineStoppedError after `fail`.
    """

    def __init__(self, request_id: str, client_request_id: str | None) -> None:
        self.request_id = request_id
        self.client_request_id = client_request_id
        self.is_finished = False
        self._outputs: asyncio.Queue[Output | None] = asyncio.Queue()
        self._failure: EngineStoppedError | None = None

    def push(self, output: Output) -> None:
        self.is_finished = output.finish_reason is not None
        self._outputs.put_nowait(output)

    def stop(self) -> None:
        self._outputs.put_nowait(None)

    def fail(self, error: EngineStoppedError) -> None:
        self._failure = error
        self.is_finished = True
        self._outputs.put_nowait(None)

    def __aiter__(self) -> "Answer":
        return self

    async def __anext__(self) -> Output:
        if self.is_finished and self._outputs.empty():
            raise StopAsyncIteration
        output = await self._outputs.get()
        if self._failure is not None:
            raise self._failure
        if output is None:
            raise StopAsyncIteration
        return output


class WorkerLink(asyncio.Protocol):
    """The connection. All its state changes on the event loop.

    `_answers` holds the requests whose clients are still served; an output for any other request
    is dropped (its tokens have been counted by the worker). `_client_ids` remembers the clients'
    own ids until a request has finished, for the log.
    """

    def __init__(self, now_ns: Callable[[], int], on_gone: Callable[[], None]) -> None:
        self._now_ns = now_ns
        self._on_gone = on_gone
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader()
        self._decoder = msgspec.msgpack.Decoder(FromWorker)
        self._numbers = count(1)
        self._answers: dict[str, Answer] = {}
        self._client_ids: dict[str, str | None] = {}
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.lifecycle: Ring[LifecycleEntry] = Ring(LIFECYCLE_CAPACITY)
        self.steps: Ring[StepRecord] = Ring(STEPS_CAPACITY)
        self.counters = Counters()
        self.cancellations: dict[str, int] = {}
        self.num_running = 0
        self.num_waiting = 0
        self.free_blocks = 0
        self.faults = Faults()

    def __repr__(self) -> str:
        state = "connected" if self._transport is not None else "ended"
        return f"<WorkerLink {state} serving {len(self._answers)} knowing {len(self._client_ids)}>"

    def submit(
        self, prompt_token_ids: list[int], sampling: Sampling, client_request_id: str | None
    ) -> Answer:
        """Hand a request to the worker. Raises EngineStoppedError."""
        answer = Answer(f"req-{next(self._numbers)}", client_request_id)
        self._note_here(answer, "arrived")
        self._send(
            AddRequest(
                request_id=answer.request_id, prompt_token_ids=prompt_token_ids, sampling=sampling
            )
        )
        self._answers[answer.request_id] = answer
        self._client_ids[answer.request_id] = client_request_id
        return answer

    def disconnected(self, answer: Answer) -> None:
        """The client left: log it, and abort its request (unless a fault says otherwise)."""
        if answer.is_finished:
            return
        self._note_here(answer, "disconnected", CancelReason.USER_DISCONNECT)
        if self.faults.ignore_disconnect:
            return
        if self.faults.delay_abort:
            loop = asyncio.get_running_loop()
            loop.call_later(self.faults.delay_abort, self._abort_if_live, answer)
        else:
            self.abort(answer, CancelReason.USER_DISCONNECT)

    def abort(self, answer: Answer, reason: CancelReason) -> None:
        """Stop serving a request and have the worker end it. Harmless for a finished one."""
        if self._answers.pop(answer.request_id, None) is None:
            return
        answer.stop()
        if answer.is_finished or self._transport is None:
            return
        self._note_here(answer, "abort_sent", reason)
        self.cancellations[reason] = self.cancellations.get(reason, 0) + 1
        self._send(AbortRequest(request_id=answer.request_id, reason=reason))

    def shut_down(self) -> None:
        """Abort whatever is being generated; those who wait for it are told why."""
        error = EngineStoppedError("the server is shutting down")
        for answer in list(self._answers.values()):
            self.abort(answer, CancelReason.SERVER_SHUTDOWN)
            answer.fail(error)

    def set_faults(self, faults: Faults) -> None:
        """From now on be wrong in these ways."""
        self.faults = faults
        self._send(SetFaults(faults=faults))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        error = EngineStoppedError(_WORKER_ENDED)
        if not self.ready.done():
            self.ready.set_exception(error)
        for answer in self._answers.values():
            answer.fail(error)
        self._answers.clear()
        self._on_gone()

    def data_received(self, data: bytes) -> None:
        for payload in self._reader.feed(data):
            message: FromWorker = self._decoder.decode(payload)
            match message:
                case Ready() as ready:
                    self.ready.set_result(ready)
                case Failed(message=why):
                    self.ready.set_exception(EngineConfigError(why))
                case StepReport() as report:
                    self._take_in(report)

    def _abort_if_live(self, answer: Answer) -> None:
        if not answer.is_finished:
            self.abort(answer, CancelReason.USER_DISCONNECT)

    def _take_in(self, report: StepReport) -> None:
        self.counters = report.counters
        self.num_running, self.num_waiting = report.num_running, report.num_waiting
        self.free_blocks = report.free_blocks
        if report.step is not None:
            self.steps.append(report.step)
        for event in report.events:
            self._note(event, self._client_ids.get(event.request_id))
        for output in report.outputs:
            self._deliver(output)

    def _deliver(self, output: Output) -> None:
        if output.finish_reason is not None:
            self._client_ids.pop(output.request_id, None)
            answer = self._answers.pop(output.request_id, None)
        else:
            answer = self._answers.get(output.request_id)
        if answer is not None:
            answer.push(output)

    def _note_here(self, answer: Answer, event: str, reason: CancelReason | None = None) -> None:
        """Log what the frontend itself did or saw, during the worker's latest known step."""
        self._note(
            Event(
                t_ns=self._now_ns(),
                event=event,
                request_id=answer.request_id,
                step=self.counters.steps,
                reason=reason,
            ),
            answer.client_request_id,
        )

    def _note(self, event: Event, client_request_id: str | None) -> None:
        entry = LifecycleEntry(
            seq=self.lifecycle.next_number,
            client_request_id=client_request_id,
            **msgspec.structs.asdict(event),
        )
        self.lifecycle.append(entry)

    def _send(self, message: ToWorker) -> None:
        if self._transport is None:
            raise EngineStoppedError(_WORKER_ENDED)
        self._transport.write(encode_frame(message))
