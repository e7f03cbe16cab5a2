"""The settings that depend on the device: which one computes, what it serves, how many blocks fit.

On a CPU absent settings have `EngineConfig`'s own defaults. On CUDA they are bfloat16, captured
steps, as many blocks as fit, and the first of two models that fits.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from msgspec import structs

from reference_engine.config import EngineConfig, EngineConfigError, check_values
from reference_engine.device import Gpu, NoGpuError, Surroundings, choose_gpu
from reference_engine.model.checkpoint import choose_context, shape_of
from reference_engine.model.memory import (
    DoesNotFitError,
    block_bytes,
    blocks_that_fit,
    check_fit,
    gb,
    reckon,
)
from reference_engine.model.shapes import ModelShape

ON_CPU: Final = EngineConfig()
MODELS_ON_CUDA: Final = ("8b", "1b")
UTILIZATION: Final = 0.9
MOST_BLOCKS: Final = 65_536  # unless more are asked for: each takes some of the host's memory, too
_BFLOAT16: Final = (8, 0)


class WantedSettings(NamedTuple):
    """`given`: the settings of EngineConfig on the command line. `num_workers`: of this engine on
    the device, which share `utilization` of its memory; 0: they are elsewhere, and have settings of
    their own.
    """

    given: Mapping[str, Any]
    num_workers: int = 1
    utilization: float = UTILIZATION
    kv_cache_memory: int | None = None

    @property
    def device(self) -> str:
        device: str = self.given.get("device", ON_CPU.device)
        return device


class Chosen(NamedTuple):
    """`text` says what is served where; `is_news` if that is more than the usual on a CPU."""

    config: EngineConfig
    text: str
    is_news: bool = False


def choose(wanted: WantedSettings, look_around: Callable[[], Surroundings]) -> Chosen:
    """Raises EngineConfigError for what cannot work here."""
    given = wanted.given
    check_values(given)  # before any is divided by
    runner = given.get("runner", ON_CPU.runner)
    if runner != "torch" or wanted.num_workers == 0:
        if wanted.kv_cache_memory is not None:
            raise EngineConfigError("--kv-cache-memory is for torch workers: give --num-blocks")
        if wanted.num_workers == 0:
            return Chosen(structs.replace(ON_CPU, device="cpu"), "workers elsewhere: no device")
        device = "cpu" if wanted.device == "auto" else wanted.device
        return Chosen(_config(given, device, ON_CPU.num_blocks), f"{runner} runner: no device")
    if wanted.device == "cpu":
        return _on_cpu(wanted)
    try:
        gpu = choose_gpu(wanted.device, look_around())
    except NoGpuError as error:
        if wanted.device != "auto":
            raise EngineConfigError(
                f"--device {wanted.device}: {error}; or take --device cpu"
            ) from error
        return _on_cpu(wanted, error)
    return _on_cuda(wanted, gpu)


def _on_cpu(wanted: WantedSettings, no_gpu: NoGpuError | None = None) -> Chosen:
    given = wanted.given
    num_blocks = ON_CPU.num_blocks
    if wanted.kv_cache_memory is not None:
        model, dtype = given.get("model", ON_CPU.model), given.get("dtype", ON_CPU.dtype)
        shape = shape_of(model, dtype)
        num_blocks = _blocks_in(wanted.kv_cache_memory, {**given, "model": model}, shape)
    config = _config(given, "cpu", num_blocks)
    text = f"cpu: {_describe(config)}"
    if no_gpu is None:
        return Chosen(config, text)
    return Chosen(config, f"{text}; not CUDA, because {no_gpu}", is_news=not no_gpu.is_usual)


def _on_cuda(wanted: WantedSettings, gpu: Gpu) -> Chosen:
    given = wanted.given
    can_bfloat16 = gpu.capability >= _BFLOAT16
    if given.get("dtype") == "bfloat16" and not can_bfloat16:
        has = ".".join(map(str, gpu.capability))
        raise EngineConfigError(
            f"--dtype bfloat16: {gpu.name} has compute capability {has}, and bfloat16 needs 8.0: "
            "take --dtype float32"
        )
    settings = {
        "dtype": "bfloat16" if can_bfloat16 else "float32",
        "compile": not given.get("batch_invariant", False),
        **given,
    }
    config = (
        _fit(settings, wanted, gpu)
        if "model" in given
        else _take_first_that_fits(MODELS_ON_CUDA, settings, wanted, gpu)
    )
    text = f"{gpu.device} ({gpu.name}, {gb(gpu.total_bytes)}): {_describe(config)}"
    return Chosen(config, text, is_news=True)


def _take_first_that_fits(
    models: Sequence[str], settings: Mapping[str, Any], wanted: WantedSettings, gpu: Gpu
) -> EngineConfig:
    """Raises DoesNotFitError, with the sizes of the last."""
    refusals = []
    for model in models:
        try:
            return _fit({**settings, "model": model}, wanted, gpu)
        except DoesNotFitError as error:
            refusals.append(error)
    last = refusals[-1]
    # Steps of the CPU's model say nothing of a device, so it is served only if it is asked for.
    advice = dict.fromkeys([*last.advice, f"take --model {ON_CPU.model}"])
    raise DoesNotFitError(f"neither {' nor '.join(models)} fits: {last.what}", [*advice])


def _fit(settings: Mapping[str, Any], wanted: WantedSettings, gpu: Gpu) -> EngineConfig:
    """Raises DoesNotFitError."""
    budget = int(gpu.total_bytes * wanted.utilization) // wanted.num_workers
    shape = shape_of(settings["model"], settings["dtype"])
    if wanted.kv_cache_memory is not None:
        num_blocks = _blocks_in(wanted.kv_cache_memory, settings, shape)
    elif "num_blocks" in settings:
        num_blocks = settings["num_blocks"]
    else:
        num_blocks = _most_blocks(settings, shape, budget)
    device = "cuda" if wanted.device == "auto" else wanted.device
    config = _config(settings, device, num_blocks)
    whose = (
        f"of {gpu.device} ({gpu.name}, {gb(gpu.total_bytes)}) that --gpu-memory-utilization "
        f"{wanted.utilization:g} gives "
    )
    whose += "it" if wanted.num_workers == 1 else f"each of {wanted.num_workers} workers"
    check_fit(reckon(shape, config, on_gpu=True), budget, whose, config)
    return config


def _most_blocks(settings: Mapping[str, Any], shape: ModelShape, budget: int) -> int:
    """As many blocks as fit, but always enough for one request, even if they do not fit."""
    size = _block_size(settings)
    most = choose_context(settings["model"], settings.get("max_model_len"), sys.maxsize)
    largest = {
        "max_model_len": most,
        "num_blocks": -(-most // size),
        "enable_chunked_prefill": True,
    }
    memory = reckon(shape, EngineConfig(**{**settings, **largest}), on_gpu=True)
    fit = blocks_that_fit(memory, budget, block_bytes(shape, size))
    return max(_least_blocks(settings), min(MOST_BLOCKS, fit))


def _blocks_in(num_bytes: int, settings: Mapping[str, Any], shape: ModelShape) -> int:
    one, least = block_bytes(shape, _block_size(settings)), _least_blocks(settings)
    if num_bytes // one < least:
        raise EngineConfigError(
            f"--kv-cache-memory holds {num_bytes // one} blocks, and one request may need {least}: "
            f"give {-(-least * one // 10**6)}MB or more, or lower --max-model-len"
        )
    return num_bytes // one


def _least_blocks(settings: Mapping[str, Any]) -> int:
    """Enough for one request of the wanted context, else of the usual one if the model has it."""
    wanted = settings.get("max_model_len")
    most = choose_context(settings["model"], wanted, ON_CPU.max_model_len)
    return -(-most // _block_size(settings))


def _config(given: Mapping[str, Any], device: str, num_blocks: int) -> EngineConfig:
    """`num_blocks` unless it is given; the context is the model's, as far as the blocks hold it."""
    num_blocks = given.get("num_blocks", num_blocks)
    model = given.get("model", ON_CPU.model)
    num_tokens = num_blocks * _block_size(given)
    context = choose_context(model, given.get("max_model_len"), num_tokens)
    chosen = {"device": device, "num_blocks": num_blocks, "max_model_len": context}
    return EngineConfig(**{**given, **chosen})


def _block_size(settings: Mapping[str, Any]) -> int:
    size: int = settings.get("block_size", ON_CPU.block_size)
    return size


def _describe(config: EngineConfig) -> str:
    return f"{config.model} in {config.dtype}, {config.num_blocks:,} blocks of KV cache"
