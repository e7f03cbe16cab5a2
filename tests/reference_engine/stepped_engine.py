"""An engine without its process: a made-up model, a counted clock, and steps by hand."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, cycle
from random import Random
from typing import Any, NoReturn

from msgspec.structs import replace

from reference_engine.config import Component, EngineConfig
from reference_engine.context import CancelReason, Signal
from reference_engine.core.request import Sampling
from reference_engine.core.scheduler import Scheduler
from reference_engine.core.step import Sampled, StepPlan
from reference_engine.faults import Faults
from reference_engine.model.runners import SimulatedRunner
from reference_engine.model.tokenizer import FIRST_WORD, Tokenizer, WordTokenizer
from reference_engine.protocol import AbortRequest, AddRequest, SetFaults, StepReport
from reference_engine.worker.engine_io import EngineIO, FrontendShare, Leaving
from reference_engine.worker.faults import FaultIO, FaultyEngine
from reference_engine.worker.inbox import Inbox, Requests
from tests.reference_engine.fake_worker import READY

CORRECT = Faults()
Message = AddRequest | AbortRequest | SetFaults


class MadeUpRunner:
    """Samples the words one after the other, round and round.

    `breaks` may raise: it is asked before each step with its plan, and before an export with None.
    """

    info = READY
    tokenizer: Tokenizer = WordTokenizer(READY.vocab_size)

    def __init__(self) -> None:
        self._words: Iterator[int] = cycle(range(FIRST_WORD, self.info.vocab_size))
        self.meanwhile: Callable[[], object] = lambda: None
        self.breaks: Callable[[StepPlan | None], object] = lambda _: None

    def say_next(self, token_id: int) -> None:
        self._words = chain([token_id], self._words)

    def launch(self, plan: StepPlan) -> Callable[[], Sampled]:
        names = [one.request_id for one in plan.sampling]

        def compute() -> Sampled:
            self.meanwhile()
            self.breaks(plan)
            return Sampled({name: next(self._words) for name in names}, {})

        return compute

    block_bytes = SimulatedRunner.block_bytes
    import_blocks = SimulatedRunner.import_blocks

    def export_blocks(self, _: Sequence[int]) -> bytes:
        self.breaks(None)
        return b""


class Bench:
    """An engine, its reports, and a clock that ticks once a reading."""

    def __init__(
        self,
        faults: Faults = CORRECT,
        max_num_seqs: int = 2,
        component: Component = "backend",
        **settings: Any,
    ) -> None:
        self.reports: list[StepReport] = []
        self.slept: list[float] = []
        self.hung_up: list[tuple[str, str]] = []
        self.said: list[str] = []
        self.left: list[Leaving] = []
        self.shares: dict[str, FrontendShare] = {}
        self.inbox = Inbox(self.now)
        self.runner = MadeUpRunner()
        self._requests: dict[str, Requests] = {}
        self._now_ns = 0
        config = EngineConfig(
            component=component,
            max_num_seqs=max_num_seqs,
            num_blocks=8,
            block_size=4,
            max_model_len=32,
            **settings,
        )
        self.scheduler = Scheduler(config, MadeUpRunner.tokenizer.eos_token_ids)
        self.engine = FaultyEngine(
            self.scheduler,
            self.runner,
            EngineIO(
                self.now,
                report=self.take_in,
                hang_up=lambda *why: self.hung_up.append(why),
                hand_over=self.left.append if component == "prefill" else None,
                say=self.said.append,
                ahead=(lambda compute: compute) if settings.get("async_scheduling") else None,
            ),
            faults=faults,
            by=FaultIO(Random(1), sleep=self.slept.append, die=self.die),
        )

    def check_integrity(self) -> None:
        self.scheduler.check_integrity(self.engine._lost_blocks)

    def now(self) -> int:
        self._now_ns += 1
        return self._now_ns

    def set_faults(self, faults: Faults) -> None:
        self.step(SetFaults(faults=faults))

    def pass_time(self, ns: int) -> None:
        self._now_ns += ns

    def die(self) -> NoReturn:
        raise SystemExit

    def requests_of(self, frontend: str) -> Requests:
        return self._requests.setdefault(frontend, Requests(frontend, self.inbox, self.now))

    def hear(self, *messages: Message, of: str = "frontend-0") -> None:
        for message in messages:
            match message:
                case AddRequest():
                    self.requests_of(of).add(message)
                case AbortRequest(request_id=name, signal=signal, reason=reason):
                    self.requests_of(of).cancel(name, signal, reason)
                case SetFaults():
                    self.inbox.put(message)

    def step(self, *messages: Message) -> StepReport:
        self.hear(*messages)
        drained = self.inbox.drain(timeout_s=0.0)
        assert drained is not None
        self.engine.step(*drained)
        return self.reports[-1]

    def take_in(self, report: StepReport, shares: Mapping[str, FrontendShare]) -> None:
        """A report to all frontends in one."""
        self.shares = dict(shares)
        outputs = [output for share in shares.values() for output in share.outputs]
        events = [event for share in shares.values() for event in share.events]
        self.reports.append(replace(report, outputs=outputs, events=events))

    def lose(self, frontend: str = "frontend-0") -> int:
        num_lost = self.requests_of(frontend).cancel_all(CancelReason.FRONTEND_LOST)
        self.step()
        return num_lost

    def events(self, request_id: str) -> list[str]:
        events = [event for report in self.reports for event in report.events]
        return [event.event for event in events if event.request_id == request_id]


def add(
    request_id: str,
    *,
    num_prompt: int = 6,
    max_tokens: int = 8,
    parent_id: str | None = None,
    word: int = 5,
    **sampling: Any,
) -> AddRequest:
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=[word] * num_prompt,
        sampling=Sampling(max_tokens=max_tokens, **{"ignore_eos": True} | sampling),
        parent_id=parent_id,
    )


def abort(request_id: str, signal: Signal = Signal.STOP) -> AbortRequest:
    reason = CancelReason.USER_DISCONNECT
    return AbortRequest(request_id=request_id, reason=reason, signal=signal)
