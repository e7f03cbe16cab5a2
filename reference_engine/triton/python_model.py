"""A model of Triton's Python backend: a scheduler, its instances, and the requests between them.

    infer ─▶ scheduler ─▶ instance's process ─▶ responses of the request
      context's signal ─▶ scheduler (it waits) or process (it runs): `is_cancelled()` is True there

By default, a kill also ends the request's responses at once, while the model continues as it likes.
In the faithful manner only the model ends a request that runs.
"""

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from grpc import StatusCode
from tritonclient.grpc.model_config_pb2 import ModelConfig
from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelInferResponse

from reference_engine.config import EngineConfigError
from reference_engine.context import Cancellation, Context, Signal
from reference_engine.triton.configuration import (
    as_dict,
    controls_of,
    count_instances,
    make_scheduler,
)
from reference_engine.triton.instance import ModelInstance
from reference_engine.triton.model import (
    FINAL_PARAMETER,
    InferenceError,
    RequestControls,
    cancelled,
    invalid,
    is_decoupled,
    read_parameters,
)
from reference_engine.triton.python_backend.messages import BatchItem, Executed, Response
from reference_engine.triton.queue import InstanceBatch, QueuedRequest, QueuePhase
from reference_engine.triton.tensors import read_inputs

log: Final = logging.getLogger(__name__)
RESTART_PAUSE_S: Final = 1.0


@dataclass(eq=False)
class _Answer:
    """A request until its client and its model have done with it.

    `instance` is the one that runs it; `responses` ends with an error, or with None.
    """

    key: int
    request: ModelInferRequest
    controls: RequestControls
    parameters: dict[str, Any]
    queued: QueuedRequest
    instance: int | None = None
    is_over: bool = False
    responses: asyncio.Queue[ModelInferResponse | InferenceError | None] = field(
        default_factory=asyncio.Queue
    )

    def end(self, error: InferenceError | None = None) -> None:
        if not self.is_over:
            self.is_over = True
            self.responses.put_nowait(error)


class PythonModel:
    def __init__(self, config: ModelConfig, file: Path, *, is_faithful: bool) -> None:
        self.name, self.config = config.name, config
        self.versions: tuple[str, ...] = (file.parent.name,)
        self._file, self._is_faithful = file, is_faithful
        self._loop = asyncio.get_running_loop()
        self._scheduler = make_scheduler(config, is_faithful=is_faithful)
        self._keys = itertools.count(1)
        self._answers: dict[int, _Answer] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._restarts: set[asyncio.Task[None]] = set()
        self._instances = [self._make_instance(i) for i in range(count_instances(config))]
        self._broken: set[int] = set()  # instances that did not start again

    @property
    def is_ready(self) -> bool:
        return len(self._broken) < len(self._instances)

    @property
    def pids(self) -> list[int | None]:
        return [instance.pid for instance in self._instances]

    async def start(self) -> None:
        """Raises EngineConfigError if an instance does not start."""
        await asyncio.gather(*(self._start(instance) for instance in self._instances))

    async def close(self) -> None:
        for restart in self._restarts:
            restart.cancel()
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.gather(*(instance.close() for instance in self._instances))
        for answer in list(self._answers.values()):
            answer.end(InferenceError(StatusCode.UNAVAILABLE, "the server is stopping"))

    async def infer(
        self, request: ModelInferRequest, context: Context
    ) -> AsyncGenerator[ModelInferResponse, None]:
        if not self.is_ready:
            raise self._not_ready()
        if context.is_stopped():
            raise cancelled()
        answer = self._accept(request)

        def note(signal: Signal, _: Cancellation | None) -> None:
            self._loop.call_soon_threadsafe(self._cancel, answer, signal)

        context.watch(note)
        try:
            self._run()
            while (response := await answer.responses.get()) is not None:
                if isinstance(response, InferenceError):
                    raise response
                yield response
        finally:
            context.unwatch(note)
            self._cancel(answer, Signal.KILL)
            answer.is_over = True  # further responses are dropped

    def check_integrity(self) -> None:
        """Raises RuntimeError if scheduler and requests disagree on what waits and what runs."""
        waiting, running = self._scheduler.num_waiting, self._scheduler.num_running
        phases = [answer.queued.phase for answer in self._answers.values()]
        # A batch may still run after all of its requests are answered.
        if waiting != phases.count(QueuePhase.WAITING) or running < phases.count(
            QueuePhase.RUNNING
        ):
            raise RuntimeError(
                f"model {self.name}: {waiting} requests wait and {running} run, but its requests "
                f"are {[phase.name for phase in phases]}"
            )

    def _accept(self, request: ModelInferRequest) -> _Answer:
        controls, parameters = read_parameters(request)
        arrays = read_inputs(request)
        is_batched = self.config.max_batch_size > 0
        sizes = {array.shape[0] for array in arrays.values()} if is_batched else {1}
        queued = QueuedRequest(
            size=max(sizes, default=1),
            shape=self._shape_of(request),
            priority=controls.priority,
            timeout_us=controls.timeout_us,
            sequence=controls.sequence_id,
            starts=controls.sequence_start,
            ends=controls.sequence_end,
        )
        if len(sizes) > 1:
            raise invalid(f"input batch sizes of model '{self.name}' differ: {sorted(sizes)}")
        controls_of(self.config, controls)  # raises before the request is in a queue
        self._scheduler.add(queued, self._now_us())
        answer = _Answer(next(self._keys), request, controls, parameters, queued)
        queued.payload = answer
        self._answers[answer.key] = answer
        return answer

    def _shape_of(self, request: ModelInferRequest) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The shapes that must be equal in a batch."""
        others = {
            tensor.name
            for tensor in self.config.input
            if tensor.allow_ragged_batch or (-1 not in tensor.dims and not tensor.optional)
        }
        start = 1 if self.config.max_batch_size > 0 else 0
        return tuple(
            (tensor.name, tuple(tensor.shape[start:]))
            for tensor in sorted(request.inputs, key=lambda tensor: tensor.name)
            if tensor.name not in others
        )

    def _run(self) -> None:
        """Do what the scheduler decides, and ask again in time."""
        now_us = self._now_us()
        for batch in self._scheduler.next_batches(now_us):
            self._execute(batch)
        for request, error in self._scheduler.take_ended():
            self._forget(request.payload, error)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake_us = self._scheduler.wake_us(now_us)
        if wake_us is not None:
            self._timer = self._loop.call_later(max(0, wake_us - now_us) / 1e6, self._run)

    def _execute(self, batch: InstanceBatch) -> None:
        some: _Answer = next(r.payload for r in batch.requests if r is not None)
        items = []
        for request in batch.requests:
            if request is not None:
                request.payload.instance = batch.instance
            items.append(self._item(some, request))
        self._instances[batch.instance].execute(items)

    def _item(self, some: _Answer, request: QueuedRequest | None) -> BatchItem:
        answer = some if request is None else request.payload
        controls = answer.controls if request is not None else RequestControls()
        return BatchItem(
            key=None if request is None else answer.key,
            request=answer.request.SerializeToString(),
            parameters=answer.parameters if request is not None else {},
            controls=controls_of(self.config, controls, is_ready=request is not None),
            sequence=controls.sequence_id,
            flags=controls.sequence_start + 2 * controls.sequence_end,
            timeout_us=controls.timeout_us,
            is_cancelled=request is not None and request.is_cancelled,
        )

    def _cancel(self, answer: _Answer, signal: Signal) -> None:
        """May come again, and after the end."""
        if answer.key not in self._answers:
            return
        if not answer.queued.is_cancelled:
            self._scheduler.cancel(answer.queued)
            if answer.instance is not None:
                self._instances[answer.instance].cancel(answer.key)
        if signal is Signal.KILL and not self._is_faithful:
            answer.end(cancelled())
        self._run()

    def _receive(self, index: int, message: Response | Executed) -> None:
        if isinstance(message, Executed):
            self._scheduler.finish(index)
            self._run()
        elif answer := self._answers.get(message.key):
            if message.body is not None and not answer.is_over:
                response = ModelInferResponse.FromString(message.body)
                if message.is_final and is_decoupled(self.config):
                    response.parameters[FINAL_PARAMETER].bool_param = True
                answer.responses.put_nowait(response)
            if message.code is not None:
                answer.end(InferenceError(StatusCode[message.code], message.message))
            if message.is_final:
                self._forget(answer)

    def _forget(self, answer: _Answer, error: InferenceError | None = None) -> None:
        answer.end(error)
        self._answers.pop(answer.key, None)

    def _lose(self, index: int, message: str) -> None:
        log.error("%s; it is started again", message)
        self._scheduler.lose(index)
        for answer in list(self._answers.values()):
            if answer.instance == index:
                self._forget(answer, InferenceError(StatusCode.INTERNAL, message))
        self._run()
        restart = asyncio.create_task(self._restart(index))
        self._restarts.add(restart)
        restart.add_done_callback(self._restarts.discard)

    async def _restart(self, index: int) -> None:
        while True:
            instance = self._instances[index] = self._make_instance(index)
            try:
                await self._start(instance)
                break
            except EngineConfigError as error:
                if index not in self._broken:
                    log.error("%s; it is tried every second", error)  # noqa: TRY400 it says it all
                self._broken.add(index)
                if not self.is_ready:
                    for answer in self._answers.values():
                        answer.end(self._not_ready())
                await asyncio.sleep(RESTART_PAUSE_S)
        self._broken.discard(index)
        self._scheduler.restore(index)
        self._run()

    def _not_ready(self) -> InferenceError:
        return InferenceError(StatusCode.UNAVAILABLE, f"no instance of '{self.name}' runs")

    def _make_instance(self, index: int) -> ModelInstance:
        return ModelInstance(
            f"{self.name}_0_{index}",
            on_message=partial(self._receive, index),
            on_lost=partial(self._lose, index),
        )

    async def _start(self, instance: ModelInstance) -> None:
        await instance.start(self._file, self.versions[0], as_dict(self.config))

    def _now_us(self) -> int:
        return int(self._loop.time() * 1e6)
