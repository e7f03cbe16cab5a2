"""The engine without its process, step by step, on the clock.

A step is the worker's own: deciding, computing, updating, delivering, logging, and the report as a
frame. Only the socket is missing.
"""

import time
from collections.abc import Mapping
from time import perf_counter
from typing import Any, NamedTuple, NoReturn

from reference_engine.config import Device, EngineConfig
from reference_engine.core.request import Sampling
from reference_engine.core.scheduler import Scheduler
from reference_engine.core.step import StepPlan
from reference_engine.model.tokenizer import EOS_TOKEN_ID
from reference_engine.protocol import AddRequest, StepReport, encode_frame
from reference_engine.worker.engine import Engine, EngineIO
from reference_engine.worker.inbox import Heard

MAX_STREAMS = 16


class StepTime(NamedTuple):
    """Seconds of a step, and of that what is not the model and its sampler."""

    total_s: float
    outside_s: float


class Answers(NamedTuple):
    """Tokens of each stream, and the times of the steps; the first step computes the prompts."""

    tokens: list[list[int]]
    steps: list[StepTime]


def config(device: Device, *, batch_invariant: bool = False) -> EngineConfig:
    """Room for all streams; all prompts in one step."""
    return EngineConfig(
        device=device,
        max_num_seqs=MAX_STREAMS,
        num_blocks=512,
        max_model_len=512,
        max_num_batched_tokens=8192,
        batch_invariant=batch_invariant,
    )


def prompts(num_streams: int, length: int) -> list[list[int]]:
    """Byte tokens, other ones for every stream."""
    return [[3 + (31 * i + 7 * j * j) % 256 for j in range(length)] for i in range(num_streams)]


class SteppedEngine:
    """A torch runner that is kept, and a new engine around it for every set of prompts."""

    def __init__(self, config: EngineConfig) -> None:
        # Torch is an optional extra: where it is missing, the benchmark says so before this.
        from reference_engine.model.torch_runner import TorchRunner

        self._config = config
        self._forward_at = self._computed_at = 0.0
        self.runner: Any = TorchRunner(config)
        self.runner.model.register_forward_pre_hook(self._note_forward)

    @property
    def info(self) -> Any:
        return self.runner.info

    def execute(self, plan: StepPlan) -> Mapping[str, int]:
        """The runner's, with the time at which it was done."""
        sampled: Mapping[str, int] = self.runner.execute(plan)
        self._computed_at = perf_counter()
        return sampled

    def answer(self, prompts: list[list[int]], num_tokens: int) -> Answers:
        """Greedy answers of `num_tokens` tokens each."""
        scheduler = Scheduler(self._config, EOS_TOKEN_ID)
        io = EngineIO(time.perf_counter_ns, report=_frame, hang_up=_never)
        engine = Engine(scheduler, self, io)
        sampling = Sampling(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        to_come = [
            AddRequest(request_id=f"r{i}", prompt_token_ids=prompt, sampling=sampling)
            for i, prompt in enumerate(prompts)
        ]
        steps = [self._step(engine, [Heard(0, message) for message in to_come])]
        requests = list(scheduler.requests.values())
        while scheduler.has_work:
            steps.append(self._step(engine, []))
        tokens = [request.token_ids[request.num_prompt_tokens :] for request in requests]
        return Answers(tokens, steps)

    def _step(self, engine: Engine, heard: list[Heard]) -> StepTime:
        started = perf_counter()
        engine.step(time.perf_counter_ns(), heard)
        total = perf_counter() - started
        return StepTime(total, total - (self._computed_at - self._forward_at))

    def _note_forward(self, *_: object) -> None:
        self._forward_at = perf_counter()


def _frame(report: StepReport) -> None:
    encode_frame(report)


def _never(*_: object) -> NoReturn:
    raise AssertionError("no fault is in force")
