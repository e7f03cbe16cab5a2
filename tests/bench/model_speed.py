"""Time per token of the model `tiny` at a context of 256 tokens, against transformers; on a CUDA
device, too; and what `--batch-invariant` costs.

Ours is the worker's whole step, frames for the frontend included. Theirs is `generate` with the
same weights. Both answer the same prompts, and must give the same greedy tokens.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from statistics import median

from reference_engine.config import Device
from reference_engine.model.shapes import MODEL_SHAPES
from tests.bench.engine_steps import SteppedEngine, config, prompts
from tests.bench.ratio import Bound, Ratio, UnavailableError, share, times_as_fast
from tests.bench.transformers_llama import TransformersLlama

_AT_LEAST = {1: 1.5, 4: None, 16: 1.0}
_PROMPT_TOKENS, _NUM_TOKENS, _ROUNDS = 232, 48, 15  # contexts of 232 to 279 tokens


def measure(*, quick: bool = False, device: Device = "cpu") -> Iterator[Ratio]:
    _require_torch()
    ours = SteppedEngine(config(device))
    theirs = TransformersLlama(ours.runner.model, MODEL_SHAPES["tiny"], device)
    for num_streams, at_least in _AT_LEAST.items():
        yield from _compare(ours, theirs, num_streams, None if quick else at_least, quick=quick)


def _compare(
    ours: SteppedEngine,
    theirs: TransformersLlama,
    num_streams: int,
    at_least: float | None,
    *,
    quick: bool,
) -> Iterator[Ratio]:
    length, num_tokens, rounds = (6, 4, 2) if quick else (_PROMPT_TOKENS, _NUM_TOKENS, _ROUNDS)
    asked = prompts(num_streams, length)
    ours_s, outside_s, theirs_s = [], [], []
    equal = 0
    for number in range(1 + rounds):
        generated = theirs.generate(asked, num_tokens)
        answers = ours.answer(asked, num_tokens)
        if number == 0:
            equal = sum(a == b for a, b in zip(answers.tokens, generated.tokens, strict=True))
            continue  # and both are warm now
        ours_s.append(1e3 * median(step.total_s for step in answers.steps[1:]))
        outside_s.append(1e3 * median(step.outside_s for step in answers.steps[1:]))
        theirs_s.append(1e3 * median(generated.steps_s))
    name = f"{num_streams} stream{'s' * (num_streams > 1)}"
    yield share(
        f"{name}: answers equal to theirs",
        "answers",
        [equal],
        [num_streams],
        Bound("at least", 1.0),
    )
    yield times_as_fast(f"{name}: time per token", "ms", ours_s, theirs_s, at_least)
    yield share(f"{name}: outside the model, of a step", "ms", outside_s, ours_s)


def measure_gpu(*, quick: bool = False) -> Iterator[Ratio]:
    _require_torch()
    import torch

    if not torch.cuda.is_available():
        raise UnavailableError("torch sees no CUDA device here")
    yield from measure(quick=quick, device="cuda")


def measure_batch_invariance(*, quick: bool = False) -> Iterator[Ratio]:
    """The engine with `--batch-invariant` (ours) and without it (theirs)."""
    _require_torch()
    length, num_tokens, rounds = (6, 3, 2) if quick else (232, 24, 5)
    engines = [SteppedEngine(config("cpu", batch_invariant=with_it)) for with_it in (True, False)]
    for num_streams in (1, 16):
        asked = prompts(num_streams, length)
        prompt_ms: tuple[list[float], list[float]] = ([], [])
        token_ms: tuple[list[float], list[float]] = ([], [])
        for _ in range(rounds):
            for engine, prompt, token in zip(engines, prompt_ms, token_ms, strict=True):
                times = [1e3 * step.total_s for step in engine.answer(asked, num_tokens).steps]
                prompt.append(times[0])
                token.append(median(times[1:]))
        name = f"batch invariance, {num_streams} stream{'s' * (num_streams > 1)}"
        yield times_as_fast(f"{name}: prompts of {length} tokens", "ms", *prompt_ms)
        yield times_as_fast(f"{name}: time per token", "ms", *token_ms)


def _require_torch() -> None:
    if find_spec("torch") is None:
        raise UnavailableError("needs torch: pip install 'walkaway[engine]'")
