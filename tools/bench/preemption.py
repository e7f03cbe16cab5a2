"""The price of a preemption, from the loss of the blocks to the request's next token: blocks copied
to the host and back (ours) against tokens computed again (theirs). Device and model are the
engine's own choice; with `quick` the device is the CPU.

A preempted request has C tokens of a prompt that the prefix cache keeps, and L more that others
evict meanwhile. Copying takes
the whole to the host and L tokens back, computing again takes L tokens:

    copied = b + (C + 2 L) k / r        computed again = a + L p
    break-even: L = (b - a + C k / r) / (p - 2 k / r)

k are bytes a token, r bytes a second of a copy, p seconds a token of prefill; a and b do not depend
on the length. The last lines of each table are 2 k / r against p, by least squares up to 256 tokens
(beyond them attention adds to p), and the break-even length that follows, against a block.
"""

import time
from collections.abc import Iterator
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from reference_engine.config import EngineConfig, EngineConfigError, PreemptionPolicy
from reference_engine.core.request import FinishReason, Request, Sampling
from reference_engine.core.scheduler import Scheduler
from reference_engine.core.step import StepPlan
from reference_engine.defaults import WantedSettings, choose
from reference_engine.device import look_around
from reference_engine.model.torch_runner import TorchRunner
from tools.bench.ratio import BenchRatio, UnavailableError, share

EOS, WORD = 2, 300
POLICIES: tuple[PreemptionPolicy, ...] = ("swap", "recompute")
FITTED = 256
CACHED = (0, 2048)
BLOCK_SIZE = 16


class Sizes(NamedTuple):
    lengths: tuple[int, ...]
    rounds: int


QUICK = Sizes((16, 256), 2)
ON_CPU = Sizes((8, 16, 32, 64, 128, 256, 512, 1024), 9)
ON_GPU = Sizes((16, 64, 256, 1024), 5)  # half a minute with a large model


def swap_or_recompute(*, quick: bool = False) -> Iterator[BenchRatio]:
    try:
        configs = [config_for(policy, quick=quick) for policy in POLICIES]
    except EngineConfigError as error:  # no model fits twice
        raise UnavailableError(str(error)) from error
    swap, recompute = map(Preempting, configs)
    model = f"{configs[0].model} in {configs[0].dtype}"
    on_gpu = swap.device == "cuda"
    lengths, rounds = QUICK if quick else ON_GPU if on_gpu else ON_CPU
    for num_cached in CACHED[:1] if quick else CACHED:
        copied, again = np.empty((2, rounds, len(lengths)))
        for turn in range(rounds):
            for at, length in enumerate(lengths):
                copied[turn, at] = swap.preempt_ms(num_cached, length)
                again[turn, at] = recompute.preempt_ms(num_cached, length)
        title = f"{model}, {num_cached:,} tokens cached" if num_cached else model
        for at, length in enumerate(lengths):
            yield share(
                f"{title}: {length:,} tokens", "ms", list(copied[:, at]), list(again[:, at])
            )
        yield from _break_even(title, lengths, copied, again)


def _break_even(
    title: str, lengths: tuple[int, ...], copied: Any, again: Any
) -> Iterator[BenchRatio]:
    fitted = [length for length in lengths if length <= FITTED]
    slopes_ms, fixed_ms = np.polyfit(fitted, np.median([copied, again], axis=1).T[: len(fitted)], 1)
    copy_ms, compute_ms = np.maximum(slopes_ms, 1e-6)  # 0 is within the noise of few rounds
    yield share(f"{title}: a token more", "µs", [1e3 * copy_ms], [1e3 * compute_ms])
    tokens = max(0.0, (fixed_ms[0] - fixed_ms[1]) / (compute_ms - copy_ms))
    what = f"{title}: break-even length, against a block"
    yield share(what, "tokens", [tokens], [BLOCK_SIZE])


def config_for(preemption: PreemptionPolicy, *, quick: bool) -> EngineConfig:
    """The settings that the engine would choose, with room for two engines on the device."""
    given = {
        "block_size": BLOCK_SIZE,
        "num_blocks": 512,
        "swap_space_blocks": 256,
        "preemption": preemption,
        **({"device": "cpu"} if quick else {}),
    }
    return choose(WantedSettings(given, num_workers=len(POLICIES)), look_around).config


class Preempting:
    def __init__(self, config: EngineConfig) -> None:
        self._runner, self._scheduler = TorchRunner(config), Scheduler(config, frozenset({EOS}))
        self._numbers = count()

    @property
    def device(self) -> str:
        return self._runner.info.device

    def preempt_ms(self, num_cached: int, length: int) -> float:
        """Milliseconds from the preemption of a request with `length` tokens to its next token."""
        request = self._running(num_cached, length)
        num_tokens = request.num_tokens
        start = time.perf_counter()
        plan = StepPlan(step=0)
        self._scheduler._preempt(request, plan)
        cache = self._scheduler.kv_cache
        for block in cache.left_behind(request)[num_cached // BLOCK_SIZE :]:
            cache.pool.blank(block)
        self._runner.launch(plan)()
        while request.num_tokens == num_tokens:
            self._step()
        elapsed_s = time.perf_counter() - start
        self._scheduler.finish(request.request_id, FinishReason.LENGTH)
        self._scheduler.free(request)
        return 1e3 * elapsed_s

    def _running(self, num_cached: int, length: int) -> Request:
        """A request whose prompt is cached, and whose answer has `length` tokens."""
        sampling = Sampling(max_tokens=length + 8, temperature=0.0, ignore_eos=True)
        prompt = [WORD] * max(1, num_cached)
        request = Request(f"r{next(self._numbers)}", prompt, sampling)
        request.token_ids += [WORD + 1] * (length - 1)
        self._scheduler.add(request)
        while request.num_tokens < len(prompt) + length + 1:
            self._step()
        return request

    def _step(self) -> None:
        plan = self._scheduler.schedule()
        self._scheduler.update(plan, self._runner.launch(plan)().tokens)
