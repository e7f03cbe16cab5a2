"""One engine in virtual time: the live one's classes, with a clock that only moves when they sleep.

    heard ──▶ inbox ──▶ step(boundary): apply, schedule, execute (the clock moves), report

The engine is the same as in the worker; `step` is called for each boundary, instead of `run` for
all. A boundary comes when the step before has ended and `between_s` has passed; if there is nothing
to compute, with the first command. A command that is heard at the very instant of a boundary is
applied at it, as the live inbox does. With `async_scheduling` the next step begins as soon as one
has ended: what is decided and reported at a boundary takes none of its time.
"""

from array import array
from collections.abc import Mapping
from heapq import heappop, heappush
from random import Random
from typing import Final, NamedTuple, NoReturn

from harness.simulate.lags import NO_LAG, NS, Lag
from harness.simulate.machine import Growth
from harness.simulate.rows import Gauges
from reference_engine.config import EngineConfig
from reference_engine.core.request import Request
from reference_engine.core.scheduler import Scheduler
from reference_engine.core.step import Sampled, StepPlan
from reference_engine.faults import Faults
from reference_engine.model.runners import VOCAB_SIZE, SimulatedRunner
from reference_engine.model.teacher import Teacher
from reference_engine.model.tokenizer import FIRST_WORD
from reference_engine.protocol import Output, RequestEvent, StepRecord, StepReport
from reference_engine.worker.engine_io import Compute, EngineIO, FrontendShare
from reference_engine.worker.faults import FaultIO, FaultyEngine
from reference_engine.worker.inbox import Command, Heard

FRONTEND: Final = "frontend-0"
_WORDS: Final = tuple(range(FIRST_WORD, VOCAB_SIZE))


class ReplicaDiedError(Exception):
    """A fault has ended the engine."""


class VirtualClock:
    def __init__(self, now_ns: int) -> None:
        self.ns = now_ns

    def now_ns(self) -> int:
        return self.ns

    def sleep(self, seconds: float) -> None:
        self.ns += round(seconds * NS)


class VirtualRunner(SimulatedRunner):
    """Each request says one word again and again unless there is a teacher: nobody reads it. The
    words of two requests differ, or one would find the other's answer in the prefix cache. No word
    ends a sequence, as those of the simulated runner never do."""

    def sample(self, plan: StepPlan) -> Sampled:
        if self._teacher is not None:
            return super().sample(plan)
        words, num_words = _WORDS, len(_WORDS)
        tokens = {one.request_id: words[one.arrival % num_words] for one in plan.sampling}
        return Sampled(tokens, {})


class StepLags(NamedTuple):
    """The `step_s`, `between_s`, `schedule_s` and `growth` of a machine's lags."""

    step: Lag = NO_LAG
    between: Lag = NO_LAG
    schedule: Lag = NO_LAG
    growth: Growth = Growth()


class TimedScheduler(Scheduler):
    """Takes a little of a step's time to decide: what it admits is stamped later than what was
    freed at the same boundary. The runner sleeps less by that time, and more by the time that a
    step takes beyond its cost."""

    def __init__(
        self,
        config: EngineConfig,
        eos_token_ids: frozenset[int],
        clock: VirtualClock,
        lags: StepLags,
        random: Random,
    ) -> None:
        super().__init__(config, eos_token_ids)
        self._clock = clock
        self._lags = lags
        self._random = random
        self._spent_ns = 0

    def schedule(self) -> StepPlan:
        plan = super().schedule()
        growth = self._lags.growth
        prompt_tokens = sum(request.num_prompt_tokens for request in plan.admitted)
        times = growth.times(growth.schedule_request, self.num_slots_used)
        times += growth.schedule_prompt_token * prompt_tokens
        self._spent_ns = round(self._lags.schedule.draw(self._random) * times)
        self._clock.ns += self._spent_ns
        return plan

    def sleep_rest(self, seconds: float) -> None:
        more_ns = self._lags.step.draw(self._random) - self._spent_ns
        self._clock.sleep(max(0.0, seconds + more_ns / NS))


class StepLog(NamedTuple):
    """The time at which each step ended, and the tokens that it sampled; step n is at n - 1."""

    ended_ns: "array[int]"
    tokens: "array[int]"


class Stepped(NamedTuple):
    """The outcome of a boundary; `record` is None if there was no step."""

    record: StepRecord | None
    outputs: list[Output]
    events: list[RequestEvent]


class Replica:
    def __init__(
        self,
        name: str,
        config: EngineConfig,
        faults: Faults,
        *,
        lags: StepLags,
        random: Random,
        start_ns: int,
        teacher: Teacher | None = None,
    ) -> None:
        self.name = name
        self.clock = VirtualClock(start_ns)
        self.log = StepLog(array("q"), array("i"))
        self._lags = lags
        self._random = random
        self._inbox: list[tuple[int, int, Command]] = []
        self._num_heard = 0
        self._free_ns = start_ns
        self._num_blocks = config.num_blocks
        self._latest: StepReport | None = None
        self._share = FrontendShare([], [])
        runner = VirtualRunner(config.step_cost, lambda s: self.scheduler.sleep_rest(s), teacher)
        self.scheduler = TimedScheduler(
            config, runner.tokenizer.eos_token_ids, self.clock, lags, random
        )
        self._engine = FaultyEngine(
            self.scheduler,
            runner,
            EngineIO(
                self.clock.now_ns,
                self._take_report,
                self._hang_up,
                worker=name,
                reads_all=teacher is not None,
                ahead=self._compute_ahead if config.async_scheduling else None,
            ),
            faults=faults,
            by=FaultIO(random, sleep=self.clock.sleep, die=self._die),
        )

    def hear(self, t_ns: int, command: Command) -> None:
        self._num_heard += 1
        heappush(self._inbox, (t_ns, self._num_heard, command))

    def due_ns(self) -> int | None:
        """The next boundary; None if it waits for a command that has not been sent."""
        patience_s = self._engine.patience_s()
        if patience_s == 0.0:
            return self._free_ns
        heard_ns = max(self._free_ns, self._inbox[0][0]) if self._inbox else None
        if patience_s is None:
            return heard_ns
        in_time_ns = self._free_ns + round(patience_s * NS)
        return in_time_ns if heard_ns is None else min(heard_ns, in_time_ns)

    def step(self, boundary_ns: int) -> Stepped:
        """Raises ReplicaDiedError."""
        inbox, heard = self._inbox, list[Heard]()
        while inbox and inbox[0][0] <= boundary_ns:
            t_ns, _, command = heappop(inbox)
            heard.append(Heard(t_ns, command))
        self.clock.ns = boundary_ns
        self._share, before = FrontendShare([], []), self._latest
        self._engine.step(boundary_ns, heard)
        latest = self._latest
        record = None if latest is None or latest is before else latest.step
        self._free_ns = self.clock.ns
        if record is not None:
            self.log.ended_ns.append(record.ended_ns)
            self.log.tokens.append(len(record.sampled))
            growth = self._lags.growth
            times = growth.times(growth.between_request, record.num_running)
            self._free_ns += round(self._lags.between.draw(self._random) * times)
        return Stepped(record, self._share.outputs, self._share.events)

    def request(self, request_id: str) -> Request | None:
        return self.scheduler.requests.get(request_id)

    @property
    def num_steps(self) -> int:
        return len(self.log.ended_ns)

    @property
    def is_busy(self) -> bool:
        return self._engine.patience_s() == 0.0

    def gauges(self) -> Gauges:
        """The gauges in its latest report."""
        latest = self._latest
        return Gauges(
            worker=self.name,
            free_blocks=self._num_blocks if latest is None else latest.free_blocks,
            running=0 if latest is None else latest.num_running,
            waiting=0 if latest is None else latest.num_waiting,
        )

    def _take_report(self, report: StepReport, shares: Mapping[str, FrontendShare]) -> None:
        self._latest = report
        self._share = shares.get(FRONTEND, self._share)

    def _compute_ahead(self, compute: Compute) -> Compute:
        """The step takes its time from now on, and the clock stands until somebody waits for it."""
        now_ns, sampled = self.clock.ns, compute()
        ended_ns, self.clock.ns = self.clock.ns, now_ns

        def wait() -> Sampled:
            self.clock.ns = max(self.clock.ns, ended_ns)
            return sampled

        return wait

    def _die(self) -> NoReturn:
        raise ReplicaDiedError

    def _hang_up(self, _frontend: str, why: str) -> None:
        raise AssertionError(why)
