"""A client's request from acceptance to end: n answers, each a request of the engine.

An answer grows here whether its client reads or not: its text so far is the partial result of a
cancelled request.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

import msgspec

from reference_engine.api.openai import Generation
from reference_engine.context import Context
from reference_engine.core.request import FinishReason, Phase
from reference_engine.dynamo.router import RoutedInstance
from reference_engine.metrics.collector import MetricsCollector
from reference_engine.protocol import AddRequest, Ending, Output, RequestEvent

MAX_QUEUED: Final = 64  # outputs of a request: several steps' worth, so that few are ever joined
_PHASE_AFTER: Final = {
    "admitted": Phase.PREFILL,
    "resumed": Phase.PREFILL,
    "preempted": Phase.WAITING,
    "first_token": Phase.DECODE,
}
_PHASES: Final = tuple(Phase)
_DECODE: Final = Phase.DECODE  # set by each token, and slow to look up in the enum


class Outbox:
    """Outputs on their way to a client, each with the index of its answer.

    It holds at most MAX_QUEUED outputs and one for each answer. A further output is joined to the
    latest of its answer.
    """

    def __init__(self) -> None:
        self._queue: deque[tuple[int, Output]] = deque()
        self._changed = asyncio.Event()
        self._is_closed = False
        self._failure: Exception | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, index: int, output: Output) -> None:
        if self._is_closed:
            return
        if len(self._queue) < MAX_QUEUED or not self._join_to_latest(index, output):
            self._queue.append((index, output))
        self._changed.set()

    def close(self, failure: Exception | None = None) -> None:
        self._is_closed, self._failure = True, failure
        self._changed.set()

    def drop(self) -> None:
        self._queue.clear()
        self.close()

    async def get(self) -> tuple[int, Output] | None:
        while not self._queue:
            if self._failure is not None:
                raise self._failure
            if self._is_closed:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._queue.popleft()

    def _join_to_latest(self, index: int, output: Output) -> bool:
        for place in range(len(self._queue) - 1, -1, -1):
            at, earlier = self._queue[place]
            if at == index:
                text = earlier.text + output.text
                self._queue[place] = at, msgspec.structs.replace(output, text=text)
                return True
        return False


class RequestChoice:
    """One answer: a request of the engine. Only `WorkerLink` changes it, except for `num_sent`.

    `num_unread`: tokens that a client which has left will never get. All stamps are the worker's,
    except `last_output_ns`. `holders` are the workers that hold blocks for it: two during a
    hand-over. `seed` and `token_ids` let another worker continue it.
    """

    def __init__(self, context: Context, index: int, seed: int) -> None:
        self.request_id = context.id()
        self.context = context
        self.index = index
        self.seed = seed
        self.token_ids: list[int] = []
        self.phase = Phase.WAITING
        self.num_generated = 0
        self.num_sent = 0
        self.num_sent_at_leaving: int | None = None
        self.ending: Ending | None = None
        self.stamps: dict[str, int] = {}
        self.holders: set[str] = set()
        self.last_output_ns: int | None = None
        self._texts: list[str] = []

    @property
    def finish_reason(self) -> FinishReason | None:
        return None if self.ending is None else self.ending.finish_reason

    @property
    def is_aborted(self) -> bool:
        return self.finish_reason == FinishReason.ABORT

    @property
    def num_unread(self) -> int:
        sent = self.num_sent_at_leaving
        return 0 if sent is None else self.num_generated - sent

    @property
    def text(self) -> str:
        return "".join(self._texts)

    @property
    def is_freed(self) -> bool:
        return "blocks_freed" in self.stamps and not self.holders

    def note(self, event: RequestEvent, worker: str) -> None:
        if event.event in ("admitted", "taken_over"):
            self.holders.add(worker)
        if event.event == "blocks_freed":
            self.holders.discard(worker)
            self.stamps[event.event] = event.t_ns  # the last one counts
        self.stamps.setdefault(event.event, event.t_ns)
        self.phase = _PHASE_AFTER.get(event.event, self.phase)

    def take(self, output: Output) -> None:
        self._texts.append(output.text)
        if output.num_generated > self.num_generated:
            self.phase = _DECODE
        if output.token_id is not None:
            self.token_ids.append(output.token_id)
        self.num_generated, self.ending = output.num_generated, output.ending
        if output.ending is not None:
            self.phase = output.ending.phase

    def join_text(self) -> None:
        """Keep the text as one string: a twelfth of the memory of one string per token."""
        self._texts = [self.text]

    def forget_text(self) -> None:
        self._texts.clear()


class ClientRequest:
    """`asked` keeps the prompt's tokens while a worker may need them. `owner` is its API key; never
    shown.

    `created` is wall time in seconds. `worker` is the worker that has it; with None it waits for
    one, and `moved` says why. `has_failed`: its worker was lost, or out of memory for it.
    `num_at_cancel`: tokens known here when it was cancelled, None if it was not.
    """

    def __init__(
        self,
        request_id: str,
        generation: Generation,
        *,
        client_request_id: str | None,
        owner: str | None,
        created: int,
        arrived_ns: int,
    ) -> None:
        self.request_id = request_id
        self.answer_id = f"{'chatcmpl' if generation.chat else 'cmpl'}-{request_id}"
        self.endpoint = "chat_completions" if generation.chat else "completions"
        self.client_request_id = client_request_id
        self.owner = owner
        self.created = created
        self.arrived_ns = arrived_ns
        self.asked = generation
        self.num_prompt_tokens = len(generation.prompt_token_ids)
        self.context = Context(request_id)
        self.choices = self._make_choices(generation.n, generation.sampling.seed)
        self.outbox = Outbox()
        self.worker: RoutedInstance[str] | None = None
        self.moved: str | None = None
        self.num_resubmissions = 0
        self.num_migrations = 0
        self.timers: dict[str, asyncio.TimerHandle] = {}
        self.has_left = False
        self.has_failed = False
        self.num_at_cancel: int | None = None

    def _make_choices(self, n: int, seed: int) -> list[RequestChoice]:
        """Several answers are children of the request; one answer is the request."""
        if n == 1:
            return [RequestChoice(self.context, 0, seed)]
        seeds = [seed, *(hash((seed, index)) & (2**63 - 1) for index in range(1, n))]
        choices = [RequestChoice(Context(f"{self.request_id}-{i}"), i, seeds[i]) for i in range(n)]
        for choice in choices:
            self.context.link_child(choice.context)
        return choices

    @property
    def is_ended(self) -> bool:
        return self.has_failed or all(choice.ending is not None for choice in self.choices)

    @property
    def is_aborted(self) -> bool:
        return any(choice.is_aborted for choice in self.choices)

    @property
    def num_generated(self) -> int:
        return sum(choice.num_generated for choice in self.choices)

    @property
    def num_sent(self) -> int:
        return sum(choice.num_sent for choice in self.choices)

    @property
    def num_remaining(self) -> int:
        most = self.asked.sampling.max_tokens
        return sum(most - c.num_generated for c in self.choices if c.is_aborted)

    @property
    def phase(self) -> Phase:
        going_on = [choice for choice in self.choices if choice.ending is None]
        aborted = [choice for choice in self.choices if choice.is_aborted]
        counted = going_on or aborted or self.choices
        return max((choice.phase for choice in counted), key=_PHASES.index)

    @property
    def status(self) -> str:
        if self.has_failed:
            return "failed"
        if self.is_ended:
            return "aborted" if self.is_aborted else "finished"
        return "waiting" if self.phase is Phase.WAITING else "running"

    def is_at(self, worker: str) -> bool:
        return self.worker is not None and self.worker.name == worker

    def additions(self) -> list[AddRequest]:
        """What a worker needs to compute the answers that have not ended, or to continue them."""
        asked = self.asked
        return [
            AddRequest(
                request_id=choice.request_id,
                prompt_token_ids=asked.prompt_token_ids,
                sampling=msgspec.structs.replace(asked.sampling, seed=choice.seed),
                priority=asked.priority,
                parent_id=self.request_id if asked.n > 1 else None,
                answer=list(choice.token_ids),
            )
            for choice in self.choices
            if choice.ending is None
        ]

    def move(self, max_migrations: int, max_resubmissions: int) -> bool:
        """Prepare it for another worker; False if it may not move.

        Without a token it is computed anew. Tokens that were shown must stay, so the other worker
        continues after them.
        """
        if self.num_generated:
            self.num_migrations += 1
            self.moved = "migrated"
        else:
            self.num_resubmissions += 1
            self.moved = "resubmitted"
        for choice in self.choices:
            if choice.ending is None:
                choice.phase = Phase.WAITING
                choice.holders.clear()
                if not choice.num_generated:
                    choice.stamps.clear()
        within = self.num_migrations <= max_migrations
        return within and self.num_resubmissions <= max_resubmissions

    def leave(self) -> None:
        self.has_left = True
        for choice in self.choices:
            choice.num_sent_at_leaving = choice.num_sent

    def count_tokens(self, choice: RequestChoice, collector: MetricsCollector, now_ns: int) -> None:
        """Several tokens that arrive at once count as one interval."""
        if choice.last_output_ns is None:
            collector.first_token_s.observe((now_ns - self.arrived_ns) / 1e9)
        else:
            collector.next_token_s.observe((now_ns - choice.last_output_ns) / 1e9)
        choice.last_output_ns = now_ns

    def count_ended(self, choice: RequestChoice, collector: MetricsCollector, now_ns: int) -> None:
        assert choice.ending is not None
        stamps = choice.stamps
        end_ns = stamps.get("finished", now_ns)
        admitted_ns, first_token_ns = stamps.get("admitted"), stamps.get("first_token")
        collector.ended(
            finish_reason=choice.ending.finish_reason,
            prompt_tokens=self.num_prompt_tokens,
            generated_tokens=choice.num_generated,
            max_tokens=self.asked.sampling.max_tokens,
            e2e_s=(end_ns - self.arrived_ns) / 1e9,
            queue_s=_seconds(self.arrived_ns, admitted_ns),
            prefill_s=_seconds(admitted_ns, first_token_ns),
            decode_s=_seconds(first_token_ns, end_ns),
        )

    def set_timer(
        self, name: str, seconds: float | None, callback: Callable[..., object], *args: object
    ) -> None:
        self.stop_timer(name)
        if seconds is not None:
            loop = asyncio.get_running_loop()
            self.timers[name] = loop.call_later(seconds, callback, *args)

    def stop_timer(self, name: str) -> None:
        if name in self.timers:
            self.timers.pop(name).cancel()

    def stop_timers(self) -> None:
        for timer in self.timers.values():
            timer.cancel()
        self.timers.clear()


def _seconds(start_ns: int | None, end_ns: int | None) -> float | None:
    return None if start_ns is None or end_ns is None else (end_ns - start_ns) / 1e9


class Archive:
    """The latest ended requests, which stay known for a while; time is a monotonic stamp.

    Only an aborted request's prompt and text are kept. Measured with answers of 4,000 words of 5
    bytes: an aborted request takes 24 KB with one answer and 340 KB with 16, a finished one 3.5 KB
    and 17 KB. The prompt adds MAX_PROMPT_SHOWN characters at most.
    """

    def __init__(self, capacity: int, keep_s: float) -> None:
        self._capacity = capacity
        self._keep_ns = int(keep_s * 1e9)
        self._entries: OrderedDict[str, tuple[ClientRequest, int]] = OrderedDict()
        self._latest_of_client: dict[tuple[str, str | None], str] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: ClientRequest, now_ns: int) -> None:
        for choice in request.choices:
            choice.token_ids = []
            if request.is_aborted:
                choice.join_text()
            else:
                choice.forget_text()
        prompt = request.asked.prompt if request.is_aborted else ""
        request.asked = msgspec.structs.replace(request.asked, prompt=prompt, prompt_token_ids=[])
        self._entries[request.request_id] = request, now_ns + self._keep_ns
        if request.client_request_id is not None:
            name = request.client_request_id, request.owner
            self._latest_of_client[name] = request.request_id
        self._forget(now_ns)

    def by_id(self, request_id: str, now_ns: int) -> ClientRequest | None:
        self._forget(now_ns)
        request, _ = self._entries.get(request_id, (None, 0))
        return request

    def latest_of(self, client_id: str, owner: str | None, now_ns: int) -> ClientRequest | None:
        self._forget(now_ns)
        request_id = self._latest_of_client.get((client_id, owner))
        return None if request_id is None else self._entries[request_id][0]

    def _forget(self, now_ns: int) -> None:
        while self._entries:
            request_id, (request, until_ns) = next(iter(self._entries.items()))
            if len(self._entries) <= self._capacity and now_ns < until_ns:
                return
            del self._entries[request_id]
            if request.client_request_id is not None:
                name = request.client_request_id, request.owner
                if self._latest_of_client[name] == request_id:
                    del self._latest_of_client[name]
