"""Handlers in Python in the worker's place: they get the frontend's requests, as Dynamo's would.

    AddRequest ───▶ generate({"token_ids": [...], "stop_conditions": {...}, ...}, context)
    AbortRequest ─▶ its context is stopped or killed
    StepReport ◀─── items: {"token_ids": [...], "text"?: "...", "finish_reason"?: "stop"}

So detection, lifecycle and counters are the same as with any worker. An answer ends with its
stream; its slot is free when its handler has ended, however late that is.
"""

import asyncio
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Final

from reference_engine.config import EngineConfig
from reference_engine.context import Cancellation, Context, DetectionMethod, Signal
from reference_engine.core.accounting import Counters
from reference_engine.core.request import FinishReason, Phase
from reference_engine.dynamo import (
    DistributedRuntime,
    HandlerError,
    NoInstanceError,
    ResponseStream,
    WorkerLostError,
)
from reference_engine.model.tokenizer import Tokenizer
from reference_engine.protocol import (
    AbortRequest,
    AddRequest,
    Ending,
    Output,
    Ready,
    RequestEvent,
    StepReport,
    ToWorker,
)
from reference_engine.serve.supervisor import EngineStoppedError, HandlerFailedError
from reference_engine.worker.answer import GrowingAnswer

_MAX_TRIES: Final = 3  # of a request whose handlers die before its first token
_REASONS: Final = {reason.value: reason for reason in FinishReason}


class Handled:
    """One request at its handler. `ending` is set by the last output; `is_done`: its answer is
    complete but its handler still runs, so the handler has to be stopped.
    """

    def __init__(self, add: AddRequest, tokenizer: Tokenizer) -> None:
        self.add = add
        self.context = Context(add.request_id)
        text_of = tokenizer.text_stream(add.prompt_token_ids)
        self._answer = GrowingAnswer(add.sampling, len(add.prompt_token_ids), None, text_of)
        self.num_generated = len(add.answer)
        self.ending: Ending | None = None
        self.is_done = False

    def request(self, model: str, eos_token_ids: frozenset[int]) -> dict[str, Any]:
        sampling = self.add.sampling
        return {
            "model": model,
            "token_ids": [*self.add.prompt_token_ids, *self.add.answer],
            "stop_conditions": {
                "max_tokens": sampling.max_tokens - len(self.add.answer),
                "stop": list(sampling.stop),
                "ignore_eos": sampling.ignore_eos,
            },
            "sampling_options": {"temperature": sampling.temperature, "seed": sampling.seed},
            "eos_token_ids": sorted(eos_token_ids),
        }

    def take(self, item: Any) -> list[Output]:
        """Raises HandlerError for an item of another form."""
        try:
            token_ids, text = item["token_ids"], item.get("text")
            texts = [*[None if text is None else ""] * (len(token_ids) - 1), text]
            outputs = [self._token(*new) for new in zip(token_ids, texts, strict=False)]
            reason = item.get("finish_reason")
            if reason is not None and self.ending is None:
                outputs.append(self.end(_REASONS.get(reason, FinishReason.STOP)))
        except (AttributeError, LookupError, TypeError) as error:
            text = f"the handler made {item!r:.100}, not a dict with token_ids of the vocabulary"
            raise HandlerError(text) from error
        return [output for output in outputs if output is not None]

    def _token(self, token_id: int, text: str | None) -> Output | None:
        if self.ending is not None:
            self.is_done = True
            return None
        shown = self._answer.push(token_id)
        self.num_generated += 1
        if (stopped := self._answer.end) is not None:
            self.is_done = True
            return self.end(FinishReason.STOP, shown, stopped.stop_reason)
        if text is not None:
            shown = text
        if self.num_generated >= self.add.sampling.max_tokens:
            return self.end(FinishReason.LENGTH, shown)
        return Output(
            request_id=self.add.request_id,
            text=shown,
            num_generated=self.num_generated,
            token_id=token_id,
        )

    def end(
        self, reason: FinishReason, text: str = "", stop_reason: str | int | None = None
    ) -> Output:
        self.ending = Ending(
            finish_reason=reason,
            phase=Phase.DECODE if self.num_generated else Phase.PREFILL,
            stop_reason=stop_reason,
        )
        return Output(
            request_id=self.add.request_id,
            text=text + ("" if stop_reason else self._answer.flush()),
            num_generated=self.num_generated,
            ending=self.ending,
        )


class HandlerWorker:
    """Stands for `WorkerConnection`, with an endpoint. `on_failed` gets a request's name, and why
    it has no answer.
    """

    def __init__(
        self,
        runtime: DistributedRuntime,
        endpoint: str,
        config: EngineConfig,
        tokenizer: Tokenizer,
        *,
        on_up: Callable[["HandlerWorker", Ready], object],
        on_report: Callable[[str, StepReport], object],
        on_failed: Callable[[str, EngineStoppedError], object],
    ) -> None:
        self._runtime = runtime
        self._endpoint = endpoint
        self.client = runtime.client(endpoint)
        self._config = config
        self._tokenizer = tokenizer
        self._on_up = on_up
        self._on_report = on_report
        self._on_failed = on_failed
        self._counters = Counters()
        self._running: dict[str, tuple[Handled, asyncio.Task[None]]] = {}
        self.ready = Ready(
            pid=os.getpid(),
            device="none",
            vocab_size=tokenizer.vocab_size,
            gpu_name=None,
            worker="handlers",
        )

    async def start(self, *, is_patient: bool) -> Ready:
        """It waits in any case, since others start the handlers, and says so if it is alone."""
        if not (is_patient or self.client.instance_ids()):
            why = f"walkaway engine: waiting for a process that serves {self._endpoint}"
            print(why, file=sys.stderr, flush=True)  # noqa: T201
        await self.client.wait_for_instances()
        self._on_up(self, self.ready)
        return self.ready

    async def keep(self) -> None:
        """Waits for ever: the client finds other handlers."""
        await asyncio.Event().wait()

    def close(self) -> None:
        self._runtime.shutdown()

    def send(self, message: ToWorker) -> None:
        match message:
            case AddRequest():
                handled = Handled(message, self._tokenizer)
                task = asyncio.get_running_loop().create_task(self._serve(handled))
                self._running[message.request_id] = handled, task
            case AbortRequest(request_id=name):
                now_ns = time.perf_counter_ns()
                why = Cancellation(message.reason, DetectionMethod.NONE, now_ns)
                for handled in self._named(name):
                    self._report(handled, "abort_received", reason=message.reason)
                    cancel = handled.context.kill if message.signal is Signal.KILL else None
                    (cancel or handled.context.stop)(why)
            case _:  # settings and beats, which handlers do not have
                pass

    def _named(self, name: str) -> list[Handled]:
        """A request, or all of a parent's."""
        running = [handled for handled, _ in self._running.values()]
        return [one for one in running if name in (one.add.request_id, one.add.parent_id)]

    async def _serve(self, handled: Handled) -> None:
        self._report(handled, "admitted")
        ends: tuple[str, ...] = ()
        try:
            await self._answer(handled)
            ends = "removed", "finished", "blocks_freed"
        except HandlerError as error:
            self._fail(handled, HandlerFailedError(f"the handler failed: {error}"))
        except (NoInstanceError, WorkerLostError) as error:
            self._fail(handled, EngineStoppedError(str(error)))
        finally:
            del self._running[handled.add.request_id]
        reason = None if handled.ending is None else handled.ending.finish_reason
        self._report(handled, *ends, reason=reason)

    async def _answer(self, handled: Handled) -> None:
        """Answers until the handler has ended, which may be after the end of the answer."""
        stream = await self._relay(handled)
        if handled.ending is None:  # the handler has ended without one, or was cancelled
            is_cancelled = handled.context.is_stopped()
            ended = handled.end(FinishReason.ABORT if is_cancelled else FinishReason.STOP)
            self._report(handled, outputs=[ended])
        await stream.ended()
        assert handled.ending is not None
        reason = handled.ending.finish_reason
        self._counters.finished[reason] = self._counters.finished.get(reason, 0) + 1

    def _fail(self, handled: Handled, error: EngineStoppedError) -> None:
        self._on_failed(handled.add.request_id, error)
        handled.context.kill()

    async def _relay(self, handled: Handled) -> ResponseStream:
        """Another instance gets it if one dies before the first token."""
        request = handled.request(self._config.model, self._tokenizer.eos_token_ids)
        for num_left in reversed(range(_MAX_TRIES)):
            stream = await self.client.generate(request, annotated=False, context=handled.context)
            try:
                async for item in stream:
                    before, outputs = handled.num_generated, handled.take(item)
                    self._counters.generated_tokens += handled.num_generated - before
                    is_first = before == len(handled.add.answer) < handled.num_generated
                    self._report(handled, *["first_token"] * is_first, outputs=outputs)
                    if handled.is_done:
                        handled.context.stop()
            except WorkerLostError:
                if handled.num_generated or not num_left:
                    raise
            else:
                return stream
        raise AssertionError("the last try returns or raises")

    def _report(
        self,
        handled: Handled,
        *events: str,
        outputs: list[Output] | None = None,
        reason: str | None = None,
    ) -> None:
        now_ns = time.perf_counter_ns()
        noted = [
            RequestEvent(
                t_ns=now_ns,
                event=event,
                request_id=handled.add.request_id,
                step=0,
                num_generated=handled.num_generated,
                reason=reason,
            )
            for event in events
        ]
        report = StepReport(
            outputs=outputs or [],
            events=noted,
            num_running=len(self._running),
            free_blocks=self._config.num_blocks,
            counters=self._counters,
            worker=self.ready.worker,
        )
        self._on_report(self.ready.worker, report)
