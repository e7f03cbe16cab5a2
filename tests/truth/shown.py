"""What the scripted engine shows on its metrics page: the truth, or what the script makes of it.

Gauges tell of the last moment at which they moved: of now, of the last reading that is old enough
(`gauge_every_s`), or of the end of the last step that they care for (`gauge_every_steps`; with
nothing left to compute, of now). The counter of aborts is `exact`, `stuck` at nothing, `double`, or
`late`: what it was some time ago.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tests.truth.scripted_engine import ScriptedEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """One reading of the engine."""

    running: int
    waiting: int
    free_blocks: int


class Shown:
    """The metrics page of an engine. `step_ended` is called at the end of each of its steps."""

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
        """By the names that the bundled engine has."""
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
        return Gauges(
            running=engine.slots_held, waiting=len(engine.queue), free_blocks=engine.free_blocks
        )
