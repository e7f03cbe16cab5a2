"""The decode step of an 8B model on a GPU, against the time that the device takes to move as many
bytes as the step has to read: all weights, and the keys and values of every context.

Each batch size has a full batch of contexts of 1,024 tokens, and one request that waits. The
products alone, with the weights laid input by input as the model has them and output by output,
say how much of the step the rest of it takes. With `--quick` the same runs with the model `tiny`,
also on a CPU, where its figures mean nothing.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from random import Random
from statistics import median
from time import perf_counter
from typing import Any, Final, NoReturn

from msgspec import structs

from reference_engine.config import EngineConfig, ModelDtype
from reference_engine.context import Cancellation, CancelReason, Context, DetectionMethod
from reference_engine.core.request import Sampling
from reference_engine.core.scheduler import Scheduler
from reference_engine.model.shapes import MODEL_SHAPES, ModelShape, num_weights
from reference_engine.protocol import (
    AddRequest,
    StepReport,
)
from reference_engine.worker.engine import Engine, EngineIO, Share
from reference_engine.worker.inbox import Added, Cancelled, Heard
from tests.bench.ratio import Bound, Ratio, UnavailableError, share, within

_BATCHES: Final = (1, 16, 64)
_CONTEXT: Final = 1024
_GOAL: Final = 1.25
_WARM_STEPS, _STEPS = 20, 200
_ABORTS: Final = 20
_PROMPT: Final = 64  # tokens of a request that takes an aborted one's place
_PRODUCTS: Final = 10
_PRODUCT: Final = "Projection"


def model_speed_gpu(*, quick: bool = False) -> Iterator[Ratio]:
    try:
        import torch
    except ImportError as error:
        raise UnavailableError("needs torch: pip install 'walkaway[engine]'") from error
    on_gpu = torch.cuda.is_available()
    if not (on_gpu or quick):
        raise UnavailableError("torch sees no CUDA device here; --quick rehearses on the CPU")
    batches, context = ((1, 3), 24) if quick else (_BATCHES, _CONTEXT)
    name = "tiny" if quick else "8b"
    stage = Stage(name, max(batches), context, has_graphs=on_gpu)
    copied = stage.bytes_a_second(1 << (24 if quick else 31))
    for batch in batches:
        yield from _one_batch(stage, batch, median(copied), quick=quick)


def _one_batch(stage: "Stage", batch: int, copied: float, *, quick: bool) -> Iterator[Ratio]:
    warm, counted = (2, 6) if quick else (_WARM_STEPS, _STEPS)
    steps_ms, model_ms = stage.decode(batch, warm, counted)
    title = f"{stage.name}, {batch} x {stage.context} tokens"
    floors = [1e3 * bytes_read(stage.shape, batch, stage.context) / copied] * counted
    goal = None if quick else Bound("at most", _GOAL)
    outside = [whole - part for whole, part in zip(steps_ms, model_ms, strict=True)]
    rate = f"{copied / 1e9:.0f} GB/s"
    yield share(f"{title}: model / bytes at {rate}", "ms", model_ms, floors, goal)
    yield share(f"{title}: step / bytes", "ms", steps_ms, floors)
    yield share(f"{title}: time outside the model / step", "ms", outside, steps_ms)
    freed, refilled, admitting_ms = stage.abort(batch, 3 if quick else _ABORTS)
    yield within(f"{title}: cancel latency", "steps", freed, 1.0)
    yield within(f"{title}: refill", "steps", refilled, 1.0)
    plain = [median(steps_ms)] * len(admitting_ms)
    yield share(f"{title}: step that admits {_PROMPT} tokens / step", "ms", admitting_ms, plain)
    products = 1e3 * bytes_read(stage.shape, 0, 0) / copied
    for layout, times_ms in stage.products(batch, 2 if quick else _PRODUCTS).items():
        floor = [products] * len(times_ms)
        yield share(f"{title}: products alone, {layout} / bytes", "ms", times_ms, floor)


def bytes_read(shape: ModelShape, batch: int, context: int) -> float:
    """By a decode step: all matrices but the embedding, of which it reads a row a token."""
    embedding = 0 if shape.tied_embeddings else shape.vocab_size * shape.hidden_size
    row = 2 * shape.num_kv_heads * shape.head_dim * shape.num_layers
    size = {"float32": 4, "bfloat16": 2}[shape.dtype]
    return size * (num_weights(shape) - embedding + batch * context * row)


class Stage:
    """A runner that is kept, and a new engine without its process for each measurement."""

    def __init__(self, name: str, max_batch: int, context: int, *, has_graphs: bool) -> None:
        import torch

        from reference_engine.model.torch_runner import TorchRunner

        self._torch: Any = torch
        self.name, self.context = name, context
        room = context + 2 * (_STEPS + _WARM_STEPS)
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
        self._runner: Any = TorchRunner(self._config, partial(print, file=sys.stderr))
        if has_graphs and not self._runner.step.is_compiled:
            raise UnavailableError("the step could not be captured: it would be measured eagerly")
        self._model_ms: list[float] = []

    def bytes_a_second(self, size: int) -> list[float]:
        """Read and written by copies within the device's memory."""
        torch = self._torch
        here = torch.zeros(size, dtype=torch.uint8, device=self._runner.info.device)
        there = torch.empty_like(here)
        times_ms = [self._timed(lambda: there.copy_(here)) for _ in range(10)]
        return [2e3 * size / ms for ms in times_ms[2:]]  # the first ones make the memory

    def decode(self, batch: int, warm: int, counted: int) -> tuple[list[float], list[float]]:
        """Milliseconds of whole steps, by the host's clock, and of the model in them, by the
        device's."""
        engine, _ = self._filled(batch)
        steps_ms: list[float] = []
        self._model_ms = []
        step = self._runner.step
        name = "run" if self._runner.info.device == "cuda" else "logits"  # without the copy of ids
        setattr(step, name, self._watched(getattr(step, name)))
        try:
            for _ in range(warm + counted):
                started = perf_counter()
                engine.step(time.perf_counter_ns(), [])
                steps_ms.append(1e3 * (perf_counter() - started))
        finally:
            delattr(step, name)
        return steps_ms[warm:], self._model_ms[warm:]

    def abort(self, batch: int, number: int) -> tuple[list[float], list[float], list[float]]:
        """Steps from the one in which an abort is heard to the release of its blocks, and from
        there to the first step of the request that waited; milliseconds of that step.
        """
        engine, reports = self._filled(batch)
        freed, refilled, admitting_ms = [], [], []
        for turn in range(number):
            heard_in = _last_step(reports)
            del reports[:]
            why = Cancellation(CancelReason.API, DetectionMethod.NONE, 0)
            abort = Cancelled(f"r{turn}", why)
            coming = self._request(f"r{batch + 1 + turn}", _PROMPT)
            started = perf_counter()
            engine.step(time.perf_counter_ns(), [Heard(0, abort), Heard(0, coming)])
            if turn:  # the first that waits has a whole context
                admitting_ms.append(1e3 * (perf_counter() - started))
            at = {event.event: event.step for report in reports for event in report.events}
            freed.append(float(at["blocks_freed"] - heard_in))
            refilled.append(float(at["admitted"] - at["blocks_freed"]))
        return freed, refilled, admitting_ms

    def products(self, num_rows: int, rounds: int) -> dict[str, list[float]]:
        """Milliseconds of all matrix products of a step, by the layout of the weights."""
        model = self._runner.model
        weights = [module.weight for module in model.modules() if type(module).__name__ == _PRODUCT]
        turned = [weight.t().contiguous().t() for weight in weights]
        rows = [weight.new_ones(num_rows, weight.shape[0]) for weight in weights]

        def multiply(matrices: list[Any]) -> None:
            for row, matrix in zip(rows, matrices, strict=True):
                row.mm(matrix)

        with self._torch.inference_mode():
            return {
                layout: [self._timed(partial(multiply, matrices)) for _ in range(rounds)]
                for layout, matrices in (("by input", weights), ("by output", turned))
            }

    def _filled(self, batch: int) -> tuple[Engine, list[StepReport]]:
        """With all prompts of the batch computed, and one request that waits."""
        config = structs.replace(self._config, max_num_seqs=batch)
        scheduler = Scheduler(config, self._runner.tokenizer.eos_token_ids)
        reports: list[StepReport] = []

        def take_in(report: StepReport, shares: Mapping[str, Share]) -> None:
            reports.append(structs.replace(report, events=shares[""].events))

        engine = Engine(scheduler, self._runner, EngineIO(time.perf_counter_ns, take_in, _never))
        coming = [Heard(0, self._request(f"r{n}", self.context)) for n in range(batch + 1)]
        engine.step(time.perf_counter_ns(), coming)
        while (
            any(r.num_owed_tokens > 1 for r in scheduler.running) or len(scheduler.running) < batch
        ):
            engine.step(time.perf_counter_ns(), [])
        return engine, reports

    def _request(self, name: str, num_tokens: int) -> Added:
        random = Random(name)
        prompt = [random.randrange(300, 2000) for _ in range(num_tokens)]
        most = self._config.max_model_len - self.context
        sampling = Sampling(max_tokens=most, temperature=0.0, ignore_eos=True)
        request = AddRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling)
        return Added(request, "", Context(name))

    def _watched(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*inputs: Any) -> Any:
            result: list[Any] = []
            self._model_ms.append(self._timed(lambda: result.append(compute(*inputs))))
            return result[0]

        return watched

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


def _last_step(reports: list[StepReport]) -> int:
    return max(report.step.step for report in reports if report.step is not None)


def _never(*_: object) -> NoReturn:
    raise AssertionError("no request is impossible")
