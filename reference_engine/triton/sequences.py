"""Requests of a stateful model: each sequence keeps one slot of one instance, and its order.

    direct: a slot is a place in the batch; a place whose sequence has nothing to run stays empty
    oldest: the slots are candidates; a batch takes the oldest requests of the sequences

Sequences without a slot wait in a backlog, first come, first served.

Two manners. By default, as Triton's documents say, cancelling any request of a sequence cancels at
once whatever of the sequence still waits, and the sequence is over. The faithful manner keeps what
Triton 2.51 does: cancelling the request that runs ends only that request; a cancelled request that
waits is found when its turn comes, and only then are the requests behind it cancelled, too.
"""

from collections import deque
from dataclasses import dataclass, field

from grpc import StatusCode

from reference_engine.triton.model import InferenceError, invalid
from reference_engine.triton.queue import (
    BatchSizes,
    InstanceBatch,
    ModelScheduler,
    QueuedRequest,
    QueuePhase,
    form_batch,
)


@dataclass(eq=False)
class _Sequence:
    """`is_open`: it takes further requests. `slot`: its instance and its place there."""

    id: int | str
    last_us: int
    waiting: deque[QueuedRequest] = field(default_factory=deque)
    running: QueuedRequest | None = None
    is_open: bool = True
    slot: tuple[int, int] | None = None


class Sequences(ModelScheduler):
    """`slots` is the number for each instance. `sizes` None: the direct strategy."""

    def __init__(
        self,
        instances: int,
        slots: int,
        sizes: BatchSizes | None = None,
        *,
        model: str,
        idle_us: int,
        is_faithful: bool = False,
    ) -> None:
        super().__init__(instances, is_faithful=is_faithful)
        self._model, self._sizes, self._idle_us = model, sizes, idle_us
        self._slots: dict[tuple[int, int], _Sequence | None] = {
            (instance, place): None for place in range(slots) for instance in range(instances)
        }
        self._backlog: list[_Sequence] = []
        self._open: dict[int | str, _Sequence] = {}

    @property
    def num_waiting(self) -> int:
        return sum(len(sequence.waiting) for sequence in self._all())

    def add(self, request: QueuedRequest, now_us: int) -> None:
        self._end_idle(now_us)
        sequence = self._sequence_of(request, now_us)
        request.arrived_us = sequence.last_us = now_us
        sequence.waiting.append(request)
        if request.ends:
            self._close(sequence)

    def cancel(self, request: QueuedRequest) -> None:
        request.is_cancelled = True
        if self._is_faithful or request.phase is QueuePhase.OVER:
            return
        for sequence in self._all():
            if request is sequence.running or request in sequence.waiting:
                self._end_sequence(sequence)
        self._fill_slots()

    def lose(self, instance: int) -> None:
        """The state of its sequences is lost, so they are over."""
        super().lose(instance)
        for sequence in self._in_slots(instance):
            sequence.running = None
            message = f"the model instance that held sequence {sequence.id} ended"
            self._end_sequence(sequence, InferenceError(StatusCode.UNAVAILABLE, message))
        self._fill_slots()

    def next_batches(self, now_us: int) -> list[InstanceBatch]:
        self._end_idle(now_us)
        batches = []
        for instance in sorted(self._idle):
            self._take_turns(instance)
            requests = self._form(instance, now_us)[0]
            if any(requests):
                for sequence in self._in_slots(instance):
                    if sequence.waiting and sequence.waiting[0] in requests:
                        sequence.running = sequence.waiting.popleft()
                batches.append(self._start(InstanceBatch(instance, tuple(requests))))
        return batches

    def finish(self, instance: int) -> None:
        for sequence in self._in_slots(instance):
            sequence.running = None
        super().finish(instance)
        self._fill_slots()

    def wake_us(self, now_us: int) -> int | None:
        times = [self._form(instance, now_us)[1] for instance in self._idle]
        times += [s.last_us + self._idle_us for s in self._open.values() if s.slot is not None]
        return min((time for time in times if time is not None), default=None)

    def _sequence_of(self, request: QueuedRequest, now_us: int) -> _Sequence:
        if not request.sequence:
            raise invalid(
                f"inference request to model '{self._model}' must specify a non-zero or non-empty "
                "correlation ID"
            )
        if request.size > 1:
            raise invalid(
                f"inference request to model '{self._model}' must specify batch-size 1 due to "
                "requirements of sequence batcher"
            )
        name = f"sequence {request.sequence} to model '{self._model}'"
        sequence = self._open.get(request.sequence)
        if sequence is None and not request.starts:
            raise invalid(
                f"inference request for {name} must specify the START flag on the first request of "
                "the sequence"
            )
        if sequence is not None and request.starts and not self._is_faithful:
            raise invalid(f"a request starts {name}, which has not ended")
        if sequence is None:
            sequence = self._open[request.sequence] = _Sequence(request.sequence, now_us)
            self._backlog.append(sequence)
            self._fill_slots()
        return sequence

    def _take_turns(self, instance: int) -> None:
        """The faithful manner finds a cancelled request when it would run next."""
        if self._is_faithful:
            for sequence in self._in_slots(instance):
                if sequence.waiting and sequence.waiting[0].is_cancelled:
                    self._end_sequence(sequence)
            self._fill_slots()

    def _form(self, instance: int, now_us: int) -> tuple[list[QueuedRequest | None], int | None]:
        fronts = {
            sequence.slot: sequence.waiting[0]
            for sequence in self._in_slots(instance)
            if sequence.waiting and sequence.running is None
        }
        if not fronts:
            return [], None
        if self._sizes is not None:
            oldest = sorted(fronts.values(), key=lambda request: request.arrived_us)
            batch, wake_us = form_batch(oldest, self._sizes, now_us)
            return list(batch), wake_us
        last = max(place for _, place in filter(None, fronts))
        row = [fronts.get((instance, place)) for place in range(last + 1)]
        shape = next(request.shape for request in row if request is not None)
        row = [r if r is not None and r.shape == shape else None for r in row]
        while row[-1] is None:
            row.pop()
        return row, None

    def _fill_slots(self) -> None:
        self._backlog = [s for s in self._backlog if s.is_open or s.waiting]
        for slot, sequence in self._slots.items():
            if sequence is not None:
                if sequence.is_open or sequence.waiting or sequence.running is not None:
                    continue
                self._slots[slot] = None
            while self._backlog and self._slots[slot] is None:
                following = self._backlog.pop(0)
                if any(request.is_cancelled for request in following.waiting):
                    self._end_sequence(following)
                else:
                    following.slot, self._slots[slot] = slot, following

    def _end_idle(self, now_us: int) -> None:
        for sequence in list(self._open.values()):
            if sequence.waiting or sequence.running is not None:
                sequence.last_us = now_us
            if sequence.slot is not None and now_us >= sequence.last_us + self._idle_us:
                self._close(sequence)
        self._fill_slots()

    def _close(self, sequence: _Sequence) -> None:
        if sequence.is_open:
            sequence.is_open = False
            del self._open[sequence.id]

    def _end_sequence(self, sequence: _Sequence, error: InferenceError | None = None) -> None:
        self._close(sequence)
        while sequence.waiting:
            self._end(sequence.waiting.popleft(), error)

    def _in_slots(self, instance: int) -> list[_Sequence]:
        return [s for (i, _), s in self._slots.items() if s is not None and i == instance]

    def _all(self) -> list[_Sequence]:
        return [*filter(None, self._slots.values()), *self._backlog]
