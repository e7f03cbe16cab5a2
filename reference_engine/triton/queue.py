"""Requests of one model that wait for its instances, as Triton's default and dynamic batchers do.

All of it is decision: time is an argument, in microseconds. The model's owner adds and cancels
requests, says which instances are done or lost, and asks what to do next.

Two manners. By default, a cancelled request leaves the queue at once. The faithful manner keeps
what Triton 2.51 does: a queue without a policy forwards its requests at once, so they run although
cancelled; a queue with a policy drops a cancelled request when its turn comes, and looks for timed
out requests every half a second.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NamedTuple

from grpc import StatusCode

from reference_engine.triton.model import InferenceError, cancelled

LOOK_US: Final = 500_000


class QueuePhase(IntEnum):
    WAITING, RUNNING, OVER = range(3)


class IllegalPhaseChangeError(RuntimeError):
    pass


@dataclass(eq=False, slots=True)
class QueuedRequest:
    """`shape`: requests whose shapes differ share no batch. `timeout_us`: 0 for none."""

    size: int = 1
    shape: Hashable = None
    priority: int = 0
    timeout_us: int = 0
    sequence: int | str = 0
    starts: bool = False
    ends: bool = False
    payload: Any = None
    arrived_us: int = 0
    deadline_us: int | None = None
    is_cancelled: bool = False
    is_delayed: bool = False
    phase: QueuePhase = QueuePhase.WAITING

    def move(self, phase: QueuePhase) -> None:
        """Forward only."""
        if phase <= self.phase:
            raise IllegalPhaseChangeError(f"a request that is {self.phase.name} to {phase.name}")
        self.phase = phase


class InstanceBatch(NamedTuple):
    """`requests` has a None for each free slot of the direct strategy."""

    instance: int
    requests: tuple[QueuedRequest | None, ...]


class Ended(NamedTuple):
    """A request that left the queue without running."""

    request: QueuedRequest
    error: InferenceError


class BatchSizes(NamedTuple):
    """`preferred` in ascending order; empty: as large as may be."""

    largest: int = 1
    preferred: tuple[int, ...] = ()
    delay_us: int = 0


def form_batch(
    waiting: Iterable[QueuedRequest], sizes: BatchSizes, now_us: int
) -> tuple[list[QueuedRequest], int | None]:
    """The batch to run now, or none and the time at which to ask again."""
    batch: list[QueuedRequest] = []
    total = best = 0
    is_full = False
    preferred = sizes.preferred or (sizes.largest,)
    for request in waiting:
        if batch and (total + request.size > sizes.largest or request.shape != batch[0].shape):
            is_full = True
            break
        if batch and total + request.size > preferred[-1] and not best:
            best = len(batch)
        batch.append(request)
        total += request.size
        if total in preferred:
            best = len(batch)
    if not batch:
        return [], None
    ripe_us = min(request.arrived_us for request in batch) + sizes.delay_us
    if best and (not sizes.delay_us or now_us < ripe_us):
        return batch[:best], None
    if is_full or total >= preferred[-1] or now_us >= ripe_us:
        return batch, None
    return [], ripe_us


class QueuePolicy(NamedTuple):
    """Triton's ModelQueuePolicy; 0 is none. `delays`: a timed out request goes to the end."""

    timeout_us: int = 0
    allows_override: bool = False
    delays: bool = False
    largest: int = 0

    def deadline_us(self, request: QueuedRequest, now_us: int) -> int | None:
        own = request.timeout_us if self.allows_override else 0
        timeouts = [timeout for timeout in (self.timeout_us, own) if timeout]
        return now_us + min(timeouts) if timeouts else None


class ModelScheduler(ABC):
    """Which request runs where. `ended` collects what left without running, until it is taken."""

    def __init__(self, instances: int, *, is_faithful: bool) -> None:
        self._is_faithful = is_faithful
        self._idle = set(range(instances))
        self._running: dict[int, InstanceBatch] = {}
        self._ended: list[Ended] = []

    @abstractmethod
    def add(self, request: QueuedRequest, now_us: int) -> None:
        """Raises InferenceError for a request that cannot wait here."""

    @abstractmethod
    def cancel(self, request: QueuedRequest) -> None:
        """May be repeated, at any time."""

    @abstractmethod
    def next_batches(self, now_us: int) -> list[InstanceBatch]: ...

    @abstractmethod
    def wake_us(self, now_us: int) -> int | None:
        """The time at which to ask for batches again, if nothing happens before."""

    @property
    @abstractmethod
    def num_waiting(self) -> int: ...

    @property
    def num_running(self) -> int:
        return sum(request is not None for b in self._running.values() for request in b.requests)

    def take_ended(self) -> list[Ended]:
        ended, self._ended = self._ended, []
        return ended

    def finish(self, instance: int) -> None:
        """Its batch has left the model."""
        if instance not in self._running:
            raise IllegalPhaseChangeError(f"instance {instance} runs no batch")
        self._leave(instance)
        self._idle.add(instance)

    def lose(self, instance: int) -> None:
        """It runs nothing until it is restored."""
        if instance in self._running:
            self._leave(instance)
        self._idle.discard(instance)

    def restore(self, instance: int) -> None:
        if instance in self._running or instance in self._idle:
            raise IllegalPhaseChangeError(f"instance {instance} was not lost")
        self._idle.add(instance)

    def _start(self, batch: InstanceBatch) -> InstanceBatch:
        self._idle.remove(batch.instance)
        self._running[batch.instance] = batch
        for request in batch.requests:
            if request is not None:
                request.move(QueuePhase.RUNNING)
        return batch

    def _leave(self, instance: int) -> None:
        for request in self._running.pop(instance).requests:
            if request is not None:
                request.move(QueuePhase.OVER)

    def _end(self, request: QueuedRequest, error: InferenceError | None = None) -> None:
        """A request that ends without an error was cancelled."""
        request.move(QueuePhase.OVER)
        self._ended.append(Ended(request, error or cancelled()))


class Queue(ModelScheduler):
    """First come, first served in each level of priority; 1 is the most urgent.

    `sizes` None: each request is a batch of its own.
    """

    def __init__(
        self,
        instances: int,
        sizes: BatchSizes | None = None,
        *,
        is_faithful: bool = False,
        policy: QueuePolicy | None = None,
        levels: int = 0,
        default_level: int = 0,
        level_policies: dict[int, QueuePolicy] | None = None,
    ) -> None:
        super().__init__(instances, is_faithful=is_faithful)
        self._sizes, self._default_level = sizes, default_level
        default, own = policy or QueuePolicy(), level_policies or {}
        numbers = range(1, levels + 1) if levels else [0]
        self._policies = {number: own.get(number, default) for number in numbers}
        self._waiting: list[QueuedRequest] = []
        self._keeps_cancelled = is_faithful and not levels and default == QueuePolicy()
        self._look_us: int | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: QueuedRequest, now_us: int) -> None:
        if request.priority not in self._policies:
            request.priority = self._default_level
        policy = self._policies[request.priority]
        num_equal = sum(other.priority == request.priority for other in self._waiting)
        if policy.largest and num_equal >= policy.largest:
            raise InferenceError(StatusCode.UNAVAILABLE, "Exceeds maximum queue size")
        request.arrived_us = now_us
        request.deadline_us = policy.deadline_us(request, now_us)
        if not self._waiting:
            self._look_us = now_us + LOOK_US
        self._waiting.append(request)

    def cancel(self, request: QueuedRequest) -> None:
        request.is_cancelled = True
        if not self._is_faithful:
            self._drop_cancelled()

    def next_batches(self, now_us: int) -> list[InstanceBatch]:
        if self._is_faithful and not self._idle:
            self._look(now_us)
            return []
        self._drop_timed_out(now_us)
        if not self._keeps_cancelled:
            self._drop_cancelled()
        batches = []
        for instance in sorted(self._idle):
            requests, _ = self._form(now_us)
            if not requests:
                break
            for request in requests:
                self._waiting.remove(request)
            batches.append(self._start(InstanceBatch(instance, tuple(requests))))
        return batches

    def wake_us(self, now_us: int) -> int | None:
        if self._is_faithful and not self._idle:
            return self._look_us if self._waiting else None
        times = [request.deadline_us for request in self._waiting]
        if self._idle:
            times.append(self._form(now_us)[1])
        return min((time for time in times if time is not None), default=None)

    def _form(self, now_us: int) -> tuple[list[QueuedRequest], int | None]:
        if self._sizes is None:
            return self._waiting[:1], None
        order = sorted(self._waiting, key=lambda request: (request.priority, request.is_delayed))
        return form_batch(order, self._sizes, now_us)

    def _look(self, now_us: int) -> None:
        if self._look_us is not None and now_us >= self._look_us:
            self._look_us = now_us + LOOK_US
            self._drop_timed_out(now_us)

    def _drop_timed_out(self, now_us: int) -> None:
        for request in list(self._waiting):
            if request.deadline_us is None or now_us < request.deadline_us:
                continue
            self._waiting.remove(request)
            if self._policies[request.priority].delays:
                request.is_delayed, request.deadline_us = True, None
                self._waiting.append(request)
            else:
                error = InferenceError(StatusCode.UNAVAILABLE, "Request timeout expired")
                self._end(request, error)

    def _drop_cancelled(self) -> None:
        for request in [one for one in self._waiting if one.is_cancelled]:
            self._waiting.remove(request)
            self._end(request)
