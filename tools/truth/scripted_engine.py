"""An engine that does what a script says, and keeps the truth about it.

It is no model of a good engine: the script says how wrong it is, so that what a harness claims to
have measured can be held against what really happened. It shares no code with the harness, nor with
the bundled engine.

    boundary: stop due requests, give back due slots and blocks, admit ─▶ step ─▶ a token for all

All methods are called by one task of one event loop; time comes in through `clock_ns`. The state:
the queue, the batch, the requests that gave up their place in the batch but not yet their slot and
blocks (`leaving`), and the free slots in the order in which they became free.
"""

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

HIDDEN = ("deliver", "boundaries_left")  # not part of the truth


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """How the engine behaves.

    A step takes `step_s`, and `stream_s` more for each request in the batch; for `busy_s` of it the
    processor is busy.

    `linger_steps`: whole steps that it computes for a client that it saw leave. `free_delay_s`:
    from leaving the batch until slot and blocks are given back (at the boundary after that). Every
    `ghost_every`-th client that leaves is not noticed (0: all are), nor a `ghost_share` of them.
    `leak_blocks`: this number of blocks of each aborted request that had been admitted is never
    given back. `leak_slots`: nor is the slot of the first ones, up to this number. `wedge_after`:
    after this number of leaves no request is admitted any more (0: never so).

    Its pages may be wrong too (see `Shown`): `gauge_every_s` and
    `gauge_every_steps`, how seldom the gauges move; `aborted_counter`, what is wrong with the
    counter of aborts, and `counter_late_s`, by how much a late one is late.
    """

    slots: int = 4
    step_s: float = 0.02
    stream_s: float = 0.0
    busy_s: float = 0.0
    num_blocks: int = 512
    block_size: int = 16
    linger_steps: int = 0
    free_delay_s: float = 0.0
    ghost_every: int = 0
    ghost_share: float = 0.0
    ghost_seed: int = 0
    leak_blocks: int = 0
    leak_slots: int = 0
    wedge_after: int = 0
    gauge_every_s: float = 0.0
    gauge_every_steps: int = 0
    aborted_counter: str = "exact"
    counter_late_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Work:
    """A request, and the truth about it. `deliver` hands a token to its connection.

    `slot_from`: whose slot it was given, if it had been waiting when that one gave it back.
    """

    number: int
    client_id: str
    prompt_tokens: int
    max_tokens: int
    deliver: Callable[["Work"], None]
    arrived_ns: int
    admitted_ns: int | None = None
    slot_from: str | None = None
    token_times_ns: list[int] = field(default_factory=list)
    sent_times_ns: list[int] = field(default_factory=list)
    closed_ns: int | None = None
    boundaries_left: int | None = None
    is_ghost: bool = False
    removed_ns: int | None = None
    freed_ns: int | None = None
    finish_reason: str | None = None
    blocks: int = 0
    leaked_blocks: int = 0
    has_leaked_slot: bool = False

    @property
    def name(self) -> str:
        return f"truth-{self.number}"

    def facts(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in HIDDEN}


@dataclass(slots=True, kw_only=True)
class Step:
    step: int
    started_ns: int
    ended_ns: int = 0
    num_running: int
    num_waiting: int
    free_blocks: int
    scheduled: dict[str, int]
    sampled: dict[str, int]


class ScriptedEngine:
    """See above. `lifecycle` and `steps` are the logs that the harness may read."""

    def __init__(self, script: Script, clock_ns: Callable[[], int]) -> None:
        self.script = script
        self.works: list[Work] = []
        self.queue: deque[Work] = deque()
        self.batch: list[Work] = []
        self.leaving: list[Work] = []
        self.lifecycle: list[dict[str, Any]] = []
        self.steps: list[Step] = []
        self._clock_ns = clock_ns
        # For each free slot: which client had it, and when it was given back.
        self._free_slots = deque[tuple[str | None, int]]([(None, 0)] * script.slots)
        self._num_left = 0
        self._rng = random.Random(script.ghost_seed)
        self._slots_to_leak = script.leak_slots

    @property
    def is_wedged(self) -> bool:
        return 0 < self.script.wedge_after <= self._num_left

    @property
    def slots_held(self) -> int:
        return self.script.slots - len(self._free_slots)

    @property
    def has_work(self) -> bool:
        return bool(self.queue or self.batch or self.leaving)

    @property
    def free_blocks(self) -> int:
        held = sum(work.blocks for work in [*self.batch, *self.leaving])
        return self.script.num_blocks - held - sum(work.leaked_blocks for work in self.works)

    # Clients' acts, at any time...

    def submit(
        self, client_id: str, prompt_tokens: int, max_tokens: int, deliver: Callable[[Work], None]
    ) -> Work:
        work = Work(
            number=len(self.works) + 1,
            client_id=client_id,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            deliver=deliver,
            arrived_ns=self._clock_ns(),
        )
        self.works.append(work)
        self.queue.append(work)
        self._tell(work, "arrived", work.arrived_ns)
        return work

    def left(self, work: Work) -> None:
        if work.finish_reason is not None or work.closed_ns is not None:
            return
        now_ns = self._clock_ns()
        work.closed_ns = now_ns
        self._num_left += 1
        every = self.script.ghost_every
        work.is_ghost = every > 0 and self._num_left % every == 0
        work.is_ghost |= self._rng.random() < self.script.ghost_share
        self._tell(work, "disconnected", now_ns, reason="user_disconnect")
        if not work.is_ghost:
            work.boundaries_left = self.script.linger_steps
            self._tell(work, "abort_sent", now_ns, reason="user_disconnect")
            self._tell(work, "abort_received", now_ns, reason="user_disconnect")

    # The engine's steps, one after the other...

    def boundary(self) -> Step | None:
        started_ns = self._clock_ns()
        for work in [*self.batch, *self.queue]:
            self._stop_if_due(work)
        for work in list(self.leaving):
            self._give_back_if_due(work)
        while self.queue and self._free_slots and not self.is_wedged:
            self._admit(self.queue.popleft())
        if not self.batch:
            return None
        scheduled = {w.name: 1 if w.token_times_ns else w.prompt_tokens for w in self.batch}
        for work in self.batch:
            computed = work.prompt_tokens + len(work.token_times_ns)
            work.blocks = math.ceil(computed / self.script.block_size)
        if self.free_blocks < 0:
            raise RuntimeError("the script has too few blocks for this load")
        return Step(
            step=len(self.steps) + 1,
            started_ns=started_ns,
            num_running=len(self.batch),
            num_waiting=len(self.queue),
            free_blocks=self.free_blocks,
            scheduled=scheduled,
            sampled=dict.fromkeys(scheduled, 1),
        )

    def end_step(self, step: Step) -> None:
        """A token for each request in the batch; one with all of its tokens is finished."""
        step.ended_ns = self._clock_ns()
        self.steps.append(step)
        for work in list(self.batch):
            work.token_times_ns.append(step.ended_ns)
            if len(work.token_times_ns) == 1:
                self._tell(work, "first_token", step.ended_ns)
            is_last = len(work.token_times_ns) == work.max_tokens
            if is_last:
                self._remove(work, "length", "length")
                self._give_back(work)
            if work.closed_ns is None:
                work.sent_times_ns.append(self._clock_ns())
                work.deliver(work)

    def _stop_if_due(self, work: Work) -> None:
        if work.boundaries_left is None:
            return
        if work.boundaries_left > 0:
            work.boundaries_left -= 1
            return
        self._remove(work, "abort", "user_disconnect")
        self._give_back_if_due(work)

    def _remove(self, work: Work, finish_reason: str, reason: str) -> None:
        (self.queue if work.admitted_ns is None else self.batch).remove(work)
        self.leaving.append(work)
        work.boundaries_left = None
        work.finish_reason = finish_reason
        work.removed_ns = self._clock_ns()
        self._tell(work, "removed", work.removed_ns, reason=reason)

    def _give_back_if_due(self, work: Work) -> None:
        if work.removed_ns is None or work.freed_ns is not None:
            return
        if self._clock_ns() - work.removed_ns >= self.script.free_delay_s * 1e9:
            self._give_back(work)

    def _give_back(self, work: Work) -> None:
        self.leaving.remove(work)
        freed_ns = self._clock_ns()
        work.freed_ns = freed_ns
        if work.finish_reason == "abort":
            work.leaked_blocks = min(self.script.leak_blocks, work.blocks)
            work.blocks -= work.leaked_blocks
            if work.admitted_ns is not None and self._slots_to_leak:
                self._slots_to_leak -= 1
                work.has_leaked_slot = True
        if work.admitted_ns is not None and not work.has_leaked_slot:
            self._free_slots.append((work.client_id, freed_ns))
        reason = "length" if work.finish_reason == "length" else "user_disconnect"
        self._tell(work, "blocks_freed", freed_ns, reason=reason)
        self._tell(work, "finished", freed_ns, reason=work.finish_reason)

    def _admit(self, work: Work) -> None:
        had_by, freed_ns = self._free_slots.popleft()
        work.slot_from = had_by if work.arrived_ns < freed_ns else None
        work.admitted_ns = self._clock_ns()
        self.batch.append(work)
        self._tell(work, "admitted", work.admitted_ns)

    def _tell(self, work: Work, event: str, t_ns: int, *, reason: str | None = None) -> None:
        entry = {
            "seq": len(self.lifecycle) + 1,
            "t_ns": t_ns,
            "event": event,
            "request_id": work.name,
            "client_request_id": work.client_id,
            "step": len(self.steps),
            "num_generated": len(work.token_times_ns),
            "num_blocks": work.blocks,
            "reason": reason,
        }
        self.lifecycle.append(entry)

    # Its truth...

    def truth(self) -> dict[str, Any]:
        return {
            "script": asdict(self.script),
            "requests": [work.facts() for work in self.works],
            "steps_ns": [(step.started_ns, step.ended_ns) for step in self.steps],
        }


class Gauges(NamedTuple):
    running: int
    waiting: int
    free_blocks: int


class Shown:
    """The metrics page of an engine: the truth, or what the script makes of it.

    Gauges show the engine as it is now, as it was at the last reading that is old enough
    (`gauge_every_s`), or as it was when the number of steps was last a multiple of
    `gauge_every_steps` (with nothing left to compute, now). The counter of aborts is `exact`,
    `stuck` at nothing, `double`, or `late`: what it was some time ago. `step_ended` is called at
    the end of each step.
    """

    def __init__(self, engine: ScriptedEngine, clock_ns: Callable[[], int]) -> None:
        self._engine = engine
        self._script = engine.script
        self._clock_ns = clock_ns
        self._gauges = self._read()
        self._read_ns = clock_ns()

    def step_ended(self) -> None:
        every = self._script.gauge_every_steps
        if every and len(self._engine.steps) % every == 0:
            self._gauges = self._read()

    def gauges(self) -> Gauges:
        now_ns = self._clock_ns()
        if self._script.gauge_every_s:
            is_due = now_ns - self._read_ns >= self._script.gauge_every_s * 1e9
        else:
            is_due = not self._script.gauge_every_steps or not self._engine.has_work
        if is_due:
            self._gauges, self._read_ns = self._read(), now_ns
        return self._gauges

    def aborted(self) -> int:
        until_ns, error = self._clock_ns(), self._script.aborted_counter
        if error == "late":
            until_ns -= int(self._script.counter_late_s * 1e9)
        aborts = [w.removed_ns for w in self._engine.works if w.finish_reason == "abort"]
        happened = sum(removed is not None and removed <= until_ns for removed in aborts)
        return {"stuck": 0, "double": 2 * happened}.get(error, happened)

    def page(self) -> str:
        works, gauges = self._engine.works, self.gauges()
        finished = sum(work.finish_reason == "length" for work in works)
        lines = [
            f"vllm:num_requests_running {gauges.running}",
            f"vllm:num_requests_waiting {gauges.waiting}",
            f"vllm:kv_cache_usage_perc {1 - gauges.free_blocks / self._script.num_blocks}",
            f"walkaway_engine_free_blocks {gauges.free_blocks}",
            f"vllm:generation_tokens_total {sum(len(w.token_times_ns) for w in works)}",
            f"vllm:prompt_tokens_total {sum(w.prompt_tokens for w in works if w.token_times_ns)}",
            "vllm:num_preemptions_total 0",
            "walkaway_engine_recomputed_tokens_total 0",
            f'vllm:request_success_total{{finished_reason="abort"}} {self.aborted()}',
            f'vllm:request_success_total{{finished_reason="length"}} {finished}',
        ]
        return "\n".join(lines) + "\n"

    def _read(self) -> Gauges:
        engine = self._engine
        return Gauges(engine.slots_held, len(engine.queue), engine.free_blocks)
