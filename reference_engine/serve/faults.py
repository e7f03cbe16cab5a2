"""A frontend with the faults that `Faults` names, which concern clients that have left."""

import asyncio

from reference_engine.context import CancelReason, DetectionMethod
from reference_engine.faults import Faults
from reference_engine.protocol import Ready, SetFaults
from reference_engine.serve.client_request import ClientRequest
from reference_engine.serve.link import WorkerLink


class FaultyLink(WorkerLink):
    """Correct while `faults` are the defaults. They hold for the worker too."""

    faults = Faults()

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
        if self._is_ignored(request):
            return
        cancel = super()._cancel_unread
        if self.faults.delay_abort:
            loop = asyncio.get_running_loop()
            loop.call_later(self.faults.delay_abort, cancel, request, method, reason)
        else:
            cancel(request, method, reason)

    def _is_ignored(self, request: ClientRequest) -> bool:
        if self.faults.ignore_disconnect:
            return True
        if self.faults.ignore_disconnect_unary and not request.asked.stream:
            return True
        return self.faults.ignore_disconnect_while_waiting and request.num_generated == 0
