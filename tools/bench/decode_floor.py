"""The decode step of an 8B model on a GPU, against the time that the device takes to move as many
bytes as the step has to read: all weights, and the keys and values of every context.

Each batch size has a full batch of contexts of some 1,024 tokens, and one request that waits. All
is measured twice: with the weights laid input by input, as the model has them, and output by
output. With `--quick` the same runs with the model `tiny`, also on a CPU, where its figures mean
nothing.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from random import Random
from statistics import median
from time import perf_counter
from typing import Any, Final, NamedTuple, NoReturn

from msgspec import structs

from reference_engine.config import EngineConfig, ModelDtype
from reference_engine.context import Cancellation, CancelReason, Context, DetectionMethod
from reference_engine.core.request import Sampling
from reference_engine.core.scheduler import Scheduler
from reference_engine.model.memory import BYTES
from reference_engine.model.shapes import MODEL_SHAPES, num_weights
from reference_engine.protocol import AddRequest, StepReport
from reference_engine.worker.engine import Engine
from reference_engine.worker.engine_io import EngineIO, FrontendShare
from reference_engine.worker.inbox import Added, CancelCommand, Heard
from tools.bench.ratio import BenchRatio, RatioLimit, UnavailableError, share, within

_BATCHES: Final = (1, 16, 64)
_CONTEXT: Final = 1024
_GOAL: Final = 1.25
_WARM_STEPS, _STEPS = 20, 200
_ABORTS: Final = 20
_PROMPTS: Final = (64, 512)  # tokens of a request that takes an aborted one's place
_PRODUCTS: Final = 10


def model_speed_gpu(*, quick: bool = False) -> Iterator[BenchRatio]:
    try:
        import torch
    except ImportError as error:
        raise UnavailableError("needs torch: pip install 'walkaway[engine]'") from error
    on_gpu = torch.cuda.is_available()
    if not (on_gpu or quick):
        raise UnavailableError("torch sees no CUDA device here; --quick rehearses on the CPU")
    batches, context = ((1, 3), 24) if quick else (_BATCHES, _CONTEXT)
    name = "tiny" if quick else "8b"
    stage = KeptRunner(name, max(batches), context, has_graphs=on_gpu)
    copied = median(stage.bytes_a_second(1 << (24 if quick else 31)))
    for batch in batches:
        yield from _one_batch(stage, batch, copied, quick=quick)
    stage.turn_weights()
    for batch in batches:
        yield from _by_output(stage, batch, copied, quick=quick)


def _one_batch(
    stage: "KeptRunner", batch: int, copied: float, *, quick: bool
) -> Iterator[BenchRatio]:
    num_steps = (2, 6) if quick else (_WARM_STEPS, _STEPS)
    title, rate = stage.title(batch), f"{copied / 1e9:.0f} GB/s"
    steps = stage.decode(batch, num_steps)
    goal = None if quick else RatioLimit("at most", _GOAL)
    floors_ms = [stage.floor_ms(step.num_tokens, copied) for step in steps]
    whole_ms, model_ms = [step.whole_ms for step in steps], [step.model_ms for step in steps]
    outside_ms = [step.whole_ms - step.model_ms for step in steps]
    yield share(f"{title}: step / bytes at {rate}", "ms", whole_ms, floors_ms, goal)
    yield share(f"{title}: model with its inputs / bytes", "ms", model_ms, floors_ms)
    yield share(f"{title}: time outside of both / step", "ms", outside_ms, whole_ms)
    drawn_ms = [step.whole_ms for step in stage.decode(batch, num_steps, temperature=1.0)]
    yield share(f"{title}: step at temperature 1 / greedy step", "ms", drawn_ms, whole_ms)
    yield from _aborts(stage, batch, median(whole_ms), quick=quick)
    yield _products(stage, batch, copied, quick=quick)


def _aborts(
    stage: "KeptRunner", batch: int, plain_ms: float, *, quick: bool
) -> Iterator[BenchRatio]:
    title = stage.title(batch)
    for num_tokens in _PROMPTS:
        aborts = stage.abort(batch, 3 if quick else _ABORTS, num_tokens)
        if num_tokens == _PROMPTS[0]:
            freed = [abort.freed_steps for abort in aborts]
            yield within(f"{title}: cancel latency", "steps", freed, 1.0)
            refilled = [abort.refilled_steps for abort in aborts]
            yield within(f"{title}: refill", "steps", refilled, 1.0)
        times_ms = [abort.step_ms for abort in aborts[1:]]  # the first refill has a whole context
        what = f"{title}: step that admits {num_tokens} tokens / step"
        yield share(what, "ms", times_ms, [plain_ms] * len(times_ms))


def _products(stage: "KeptRunner", batch: int, copied: float, *, quick: bool) -> BenchRatio:
    times_ms = stage.products(batch, 2 if quick else _PRODUCTS)
    floors_ms = [stage.floor_ms(0, copied)] * len(times_ms)
    return share(f"{stage.title(batch)}: products alone / weights", "ms", times_ms, floors_ms)


def _by_output(
    stage: "KeptRunner", batch: int, copied: float, *, quick: bool
) -> Iterator[BenchRatio]:
    steps = stage.decode(batch, (2, 6) if quick else (_WARM_STEPS, _STEPS))
    floors_ms = [stage.floor_ms(step.num_tokens, copied) for step in steps]
    whole_ms = [step.whole_ms for step in steps]
    yield share(f"{stage.title(batch)}: step / bytes", "ms", whole_ms, floors_ms)
    yield _products(stage, batch, copied, quick=quick)


class MeasuredStep(NamedTuple):
    """Milliseconds of a whole step, by the host's clock, and of the model with the copy of its
    inputs, by the device's; `num_tokens`: the tokens of all contexts.
    """

    whole_ms: float
    model_ms: float
    num_tokens: int


class Abort(NamedTuple):
    """Steps from the one in which it is heard to the release of the blocks, and from there to the
    first step of the request that waited; milliseconds of that step.
    """

    freed_steps: float
    refilled_steps: float
    step_ms: float


class KeptRunner:
    """A runner that is kept, and a new engine without its process for each measurement."""

    def __init__(self, name: str, max_batch: int, context: int, *, has_graphs: bool) -> None:
        import torch

        from reference_engine.model.torch_runner import TorchRunner

        self._torch: Any = torch
        self.name, self.context = name, context
        room = context + max(*_PROMPTS, _STEPS + _WARM_STEPS)
        dtype: ModelDtype = "bfloat16" if has_graphs else "float32"
        self._config = EngineConfig(
            model=name,
            dtype=dtype,
            compile=has_graphs,
            max_num_seqs=max_batch,
            max_model_len=room,
            num_blocks=(max_batch + 1) * -(-room // 16),
            max_num_batched_tokens=max(2048, max_batch),
            enable_prefix_caching=False,
        )
        self.shape = structs.replace(MODEL_SHAPES[name], dtype=dtype)
        self._said: list[str] = []
        self._runner: Any = TorchRunner(self._config, self._said.append)
        for line in self._said:
            print(line, file=sys.stderr)  # noqa: T201
        self._eager = ", eager" if has_graphs and not self._runner.step.is_compiled else ""
        self._laid = "by input"

    def title(self, batch: int) -> str:
        how = f"weights {self._laid}{self._eager}"
        return f"{self.name}, {batch} x {self.context} tokens, {how}"

    def floor_ms(self, num_tokens: int, copied: float) -> float:
        """The time of moving what a decode step reads: all matrices but the embedding, of which it
        reads a row a token, and the keys and values of all contexts.
        """
        shape, size = self.shape, BYTES[self.shape.dtype]
        embedding = 0 if shape.tied_embeddings else shape.vocab_size * shape.hidden_size
        weights = size * (num_weights(shape) - embedding)
        token: float = self._runner.block_bytes / self._config.block_size
        return 1e3 * (weights + num_tokens * token) / copied

    def bytes_a_second(self, size: int) -> list[float]:
        """Read and written by copies within the device's memory."""
        torch = self._torch
        here = torch.zeros(size, dtype=torch.uint8, device=self._runner.info.device)
        there = torch.empty_like(here)
        times_ms = [self._timed(lambda: there.copy_(here)) for _ in range(10)]
        return [2e3 * size / ms for ms in times_ms[2:]]  # the first ones make the memory

    def decode(
        self, batch: int, num_steps: tuple[int, int], temperature: float = 0.0
    ) -> list[MeasuredStep]:
        """Steps of a full batch; the first ones of them are not counted."""
        engine, scheduler, _ = self._filled(batch, temperature)
        warm, counted = num_steps
        steps = []
        self._runner.step = watched = WatchedStep(self._runner.step, self._timed)
        try:
            for _ in range(warm + counted):
                num_tokens = sum(request.num_tokens for request in scheduler.running)
                started = perf_counter()
                engine.step(time.perf_counter_ns(), [])
                whole_ms = 1e3 * (perf_counter() - started)
                steps.append(MeasuredStep(whole_ms, watched.latest_ms, num_tokens))
        finally:
            self._runner.step = watched.step
        return steps[warm:]

    def abort(self, batch: int, number: int, num_tokens: int) -> list[Abort]:
        """`number` requests of a full batch are aborted one by one; the requests that take their
        places have prompts of `num_tokens` tokens.
        """
        engine, _, reports = self._filled(batch)
        aborts = []
        for turn in range(number):
            heard_in = _last_step(reports)
            del reports[:]
            why = Cancellation(CancelReason.API, DetectionMethod.NONE, 0)
            abort = CancelCommand(f"r{turn}", why)
            coming = self._request(f"r{batch + 1 + turn}", num_tokens)
            started = perf_counter()
            engine.step(time.perf_counter_ns(), [Heard(0, abort), Heard(0, coming)])
            step_ms = 1e3 * (perf_counter() - started)
            at = {event.event: event.step for report in reports for event in report.events}
            freed, admitted = at["blocks_freed"], at["admitted"]
            aborts.append(Abort(float(freed - heard_in), float(admitted - freed), step_ms))
        return aborts

    def products(self, num_rows: int, rounds: int) -> list[float]:
        """Milliseconds of all matrix products of a step."""
        weights = [module.weight for module in self._projections()]
        rows = [weight.new_ones(num_rows, weight.shape[0]) for weight in weights]

        def multiply() -> None:
            for row, weight in zip(rows, weights, strict=True):
                row.mm(weight)

        with self._torch.inference_mode():
            return [self._timed(multiply) for _ in range(rounds)]

    def turn_weights(self) -> None:
        """Lay each matrix output by output in memory; its shape and its values stay."""
        for module in self._projections():
            module.weight.data = module.weight.data.t().contiguous().t()
        self._laid = "by output"
        if self._runner.step.is_compiled:
            from reference_engine.model.device_step import CudaGraphs

            with self._torch.inference_mode():
                self._runner.step.prepare(CudaGraphs(), self._said.append)

    def _projections(self) -> list[Any]:
        from reference_engine.model.llama import Projection

        return [one for one in self._runner.model.modules() if isinstance(one, Projection)]

    def _filled(
        self, batch: int, temperature: float = 0.0
    ) -> tuple[Engine, Scheduler, list[StepReport]]:
        """An engine with all prompts of the batch computed, and one request that waits."""
        config = structs.replace(self._config, max_num_seqs=batch)
        scheduler = Scheduler(config, self._runner.tokenizer.eos_token_ids)
        reports: list[StepReport] = []

        def take_in(report: StepReport, shares: Mapping[str, FrontendShare]) -> None:
            reports.append(structs.replace(report, events=shares[""].events))

        engine = Engine(scheduler, self._runner, EngineIO(time.perf_counter_ns, take_in, _never))
        coming = [
            Heard(0, self._request(f"r{n}", self.context, temperature)) for n in range(batch + 1)
        ]
        engine.step(time.perf_counter_ns(), coming)
        while (
            any(r.num_owed_tokens > 1 for r in scheduler.running) or len(scheduler.running) < batch
        ):
            engine.step(time.perf_counter_ns(), [])
        return engine, scheduler, reports

    def _request(self, name: str, num_tokens: int, temperature: float = 0.0) -> Added:
        random = Random(name)
        prompt = [random.randrange(300, 2000) for _ in range(num_tokens)]
        most = self._config.max_model_len - self.context
        sampling = Sampling(max_tokens=most, temperature=temperature, ignore_eos=True)
        request = AddRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling)
        return Added(request, "", Context(name))

    def _timed(self, compute: Callable[[], object]) -> float:
        """Milliseconds by the device's own clock, where it has one."""
        if self._runner.info.device != "cuda":
            started = perf_counter()
            compute()
            return 1e3 * (perf_counter() - started)
        begin, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        compute()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))


class WatchedStep:
    """A runner's `step`, timed."""

    def __init__(self, step: Any, timed: Callable[[Callable[[], object]], float]) -> None:
        self.step, self._timed = step, timed
        self.latest_ms = 0.0

    def logits(self, spans: Any) -> Any:
        results: list[Any] = []
        self.latest_ms = self._timed(lambda: results.append(self.step.logits(spans)))
        return results[0]


def _last_step(reports: list[StepReport]) -> int:
    return max(report.step.step for report in reports if report.step is not None)


def _never(*_: object) -> NoReturn:
    raise AssertionError("no request is impossible")
