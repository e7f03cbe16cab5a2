"""A frontend with the faults that `Faults` names, which concern clients that have left."""

import asyncio
from typing import Any, Final

import msgspec

from reference_engine.api.openai import TOO_LONG, Generation
from reference_engine.api.schemas import ApiError
from reference_engine.config import EngineConfig
from reference_engine.context import CancelReason, DetectionMethod
from reference_engine.core.request import FinishReason, Sampling
from reference_engine.faults import Faults
from reference_engine.protocol import Output, Ready, SetFaults
from reference_engine.serve.client_request import ClientRequest, RequestChoice
from reference_engine.serve.link import WorkerLink

_REARM_S: Final = 0.25  # over two readings of /metrics, ten a second
_FIRST_TOKEN: Final = 16  # of prompts that were refused, which so share no prefix
_TOKENS: Final = 200


class FaultyLink(WorkerLink):
    """Correct while `faults` are the defaults. They hold for the worker too.

    `_polled_s`: when /metrics was last read. `_grown` is never given back.
    """

    faults = Faults()
    _polled_s = float("-inf")
    _grown: tuple[bytes, ...] = ()
    _num_refused = 0

    def polled(self) -> None:
        self._polled_s = asyncio.get_running_loop().time()

    def set_faults(self, faults: Faults) -> None:
        self.faults = faults
        for worker in self.router.names:
            self._send(worker, SetFaults(faults=faults))

    def worker_up(self, ready: Ready) -> None:
        """A worker that was started again has the faults of its start."""
        if ready.worker in self.workers:
            self._send(ready.worker, SetFaults(faults=self.faults))
        super().worker_up(ready)

    def _cancel_unread(
        self, request: ClientRequest, method: DetectionMethod, reason: CancelReason
    ) -> None:
        if self.faults.grow_memory:
            self._grow(self.faults.grow_memory)
        if self._is_ignored(request):
            return
        if self.faults.delay_abort:
            loop = asyncio.get_running_loop()
            loop.call_later(
                self.faults.delay_abort, super()._cancel_unread, request, method, reason
            )
        else:
            self._cancel_once_unwatched(request, method, reason)

    def _cancel_once_unwatched(
        self, request: ClientRequest, method: DetectionMethod, reason: CancelReason
    ) -> None:
        loop = asyncio.get_running_loop()
        wait_s = self._polled_s + _REARM_S - loop.time()
        if self.faults.poll_rearms and wait_s > 0:
            loop.call_later(wait_s, self._cancel_once_unwatched, request, method, reason)
        else:
            super()._cancel_unread(request, method, reason)

    def cancel(
        self,
        request: ClientRequest,
        reason: CancelReason,
        method: DetectionMethod = DetectionMethod.NONE,
    ) -> bool:
        if self.faults.cancel_does_nothing and reason is CancelReason.API:
            return not request.is_ended
        if self.faults.abort_by_prefix and reason is CancelReason.API and request.client_request_id:
            for other in list(self.live.values()):
                if (other.client_request_id or "").startswith(request.client_request_id):
                    super().cancel(other, reason, method)
            return True
        return super().cancel(request, reason, method)

    def submit(self, generation: Generation, **given: Any) -> ClientRequest:
        if self.faults.grow_with_answers:
            self._grow(self.faults.grow_with_answers)
        return super().submit(generation, **given)

    def refused(self, error: ApiError, config: EngineConfig) -> None:
        """What would fit of a prompt that is too long may be computed, though it is refused."""
        if not self.faults.compute_refused or error.code != TOO_LONG:
            return
        self._num_refused += 1
        prompt = [_FIRST_TOKEN + self._num_refused % _TOKENS] * (config.max_model_len - 1)
        generation = Generation(
            chat=False,
            model=config.model,
            prompt_token_ids=prompt,
            sampling=Sampling(max_tokens=1),
            stream=False,
            include_usage=False,
            continuous_usage=False,
        )
        super().submit(generation, client_request_id=None, owner=None, created=0)

    def _take_output(
        self, request: ClientRequest, choice: RequestChoice, output: Output, now_ns: int
    ) -> None:
        ending = output.ending
        if self.faults.abort_says_stop and ending and ending.finish_reason is FinishReason.ABORT:
            stopped = msgspec.structs.replace(ending, finish_reason=FinishReason.STOP)
            output = msgspec.structs.replace(output, ending=stopped)
        super()._take_output(request, choice, output, now_ns)

    def _grow(self, megabytes: float) -> None:
        self._grown = (*self._grown, b"\1" * int(megabytes * 1e6))

    def _is_ignored(self, request: ClientRequest) -> bool:
        if self.faults.ignore_disconnect:
            return True
        if self.faults.ignore_disconnect_unary and not request.asked.stream:
            return True
        return self.faults.ignore_disconnect_while_waiting and request.num_generated == 0
