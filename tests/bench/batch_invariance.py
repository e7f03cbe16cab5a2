"""What `--batch-invariant` costs: the engine with it (ours) and without it (theirs)."""

from collections.abc import Iterator
from importlib.util import find_spec
from statistics import median

from tests.bench.engine_steps import SteppedEngine, config, prompts
from tests.bench.ratio import Ratio, UnavailableError, times_as_fast


def measure(*, quick: bool = False) -> Iterator[Ratio]:
    if find_spec("torch") is None:
        raise UnavailableError("needs torch: pip install 'walkaway[engine]'")
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
