"""Time per token of the model `tiny` at a context of 256 tokens, against transformers,
and what `--batch-invariant` costs.

Ours is the worker's whole step: deciding, computing, updating, delivering, logging, and the report
as a frame. Only the socket is missing. Theirs is `generate` with our weights. Both answer the same
prompts, and must give the same greedy tokens.
"""

import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import Any, NoReturn

from msgspec import structs

from reference_engine.config import EngineConfig
from reference_engine.context import Context
from reference_engine.core.request import Sampling
from reference_engine.core.scheduler import Scheduler
from reference_engine.model.shapes import MODEL_SHAPES, ModelShape
from reference_engine.model.tokenizer import EOS_TOKEN_ID, FIRST_WORD
from reference_engine.protocol import (
    AddRequest,
    StepReport,
)
from reference_engine.wire import (
    encode_frame,
)
from reference_engine.worker.engine import Engine
from reference_engine.worker.engine_io import EngineIO, FrontendShare
from reference_engine.worker.inbox import Added, Heard
from tools.bench.ratio import BenchRatio, RatioLimit, UnavailableError, share, times_as_fast

_AT_LEAST = {1: 1.5, 4: None, 16: 1.0}


def model_speed(*, quick: bool = False) -> Iterator[BenchRatio]:
    ours = SteppedEngine()
    theirs = TransformersLlama(ours.runner.model, MODEL_SHAPES["tiny"])
    for num_streams, at_least in _AT_LEAST.items():
        yield from _compare(ours, theirs, num_streams, None if quick else at_least, quick=quick)


def batch_invariance(*, quick: bool = False) -> Iterator[BenchRatio]:
    """The engine with `--batch-invariant` (ours) and without it (theirs)."""
    length, num_tokens, rounds = (6, 3, 2) if quick else (232, 24, 5)
    engines = [SteppedEngine(batch_invariant=with_it) for with_it in (True, False)]
    for num_streams in (1, 16):
        asked = _prompts(num_streams, length)
        prompt_ms: tuple[list[float], list[float]] = ([], [])
        token_ms: tuple[list[float], list[float]] = ([], [])
        for _ in range(rounds):
            for engine, prompt, token in zip(engines, prompt_ms, token_ms, strict=True):
                _, (first_s, *later_s) = engine.answer(asked, num_tokens)
                prompt.append(1e3 * first_s)
                token.append(1e3 * median(later_s))
        name = f"batch invariance, {_streams(num_streams)}"
        yield times_as_fast(f"{name}: prompts of {length} tokens", "ms", *prompt_ms)
        yield times_as_fast(f"{name}: time per token", "ms", *token_ms)


def _compare(
    ours: "SteppedEngine",
    theirs: "TransformersLlama",
    num_streams: int,
    at_least: float | None,
    *,
    quick: bool,
) -> Iterator[BenchRatio]:
    length, num_tokens, rounds = (6, 4, 2) if quick else (232, 48, 15)  # contexts of 232 to 279
    asked = _prompts(num_streams, length)
    # Once to compare the answers, which also warms both up.
    tokens, _ = theirs.generate(asked, num_tokens)
    equal = sum(a == b for a, b in zip(ours.answer(asked, num_tokens)[0], tokens, strict=True))
    ours_ms, theirs_ms = [], []
    for _ in range(rounds):
        theirs_ms.append(1e3 * median(theirs.generate(asked, num_tokens)[1]))
        ours_ms.append(1e3 * median(ours.answer(asked, num_tokens)[1][1:]))
    name, all_equal = _streams(num_streams), RatioLimit("at least", 1.0)
    yield share(f"{name}: answers equal to theirs", "answers", [equal], [num_streams], all_equal)
    yield times_as_fast(f"{name}: time per token", "ms", ours_ms, theirs_ms, at_least)


def _streams(number: int) -> str:
    return f"{number} stream{'s' * (number > 1)}"


def _prompts(num_streams: int, length: int) -> list[list[int]]:
    """Byte tokens, other ones for every stream."""
    return [[3 + (31 * i + 7 * j * j) % 256 for j in range(length)] for i in range(num_streams)]


def _require(module: str, extra: str) -> None:
    if find_spec(module) is None:
        raise UnavailableError(f"needs {module}: pip install 'walkaway[{extra}]'")


class SteppedEngine:
    """A torch runner that is kept, and a new engine without its process for each set of prompts."""

    def __init__(self, *, batch_invariant: bool = False) -> None:
        _require("torch", "engine")
        from reference_engine.model.torch_runner import TorchRunner

        self._config = EngineConfig(  # room for all streams; all prompts in one step
            device="cpu",
            max_num_seqs=max(_AT_LEAST),
            num_blocks=512,
            max_model_len=512,
            max_num_batched_tokens=8192,
            batch_invariant=batch_invariant,
        )
        self.runner: Any = TorchRunner(self._config)

    def answer(
        self, prompts: list[list[int]], num_tokens: int
    ) -> tuple[list[list[int]], list[float]]:
        """Greedy answers of `num_tokens` tokens each, and each step's seconds.

        The first step computes the prompts.
        """
        scheduler = Scheduler(self._config, frozenset({EOS_TOKEN_ID}))
        engine = Engine(scheduler, self.runner, EngineIO(time.perf_counter_ns, _frame, _never))
        sampling = Sampling(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        to_come = [
            AddRequest(request_id=f"r{i}", prompt_token_ids=prompt, sampling=sampling)
            for i, prompt in enumerate(prompts)
        ]
        heard = [Heard(0, Added(one, "", Context(one.request_id))) for one in to_come]
        steps = [_step_s(engine, heard)]
        requests = list(scheduler.requests.values())
        while scheduler.has_work:
            steps.append(_step_s(engine, []))
        tokens = [request.token_ids[request.num_prompt_tokens :] for request in requests]
        return tokens, steps


def _step_s(engine: Engine, heard: list[Heard]) -> float:
    started = perf_counter()
    engine.step(time.perf_counter_ns(), heard)
    return perf_counter() - started


def _frame(report: StepReport, shares: Mapping[str, FrontendShare]) -> None:
    for outputs, events in shares.values():
        encode_frame(structs.replace(report, outputs=outputs, events=events))


def _never(*_: object) -> NoReturn:
    raise AssertionError("no fault is in force")


class TransformersLlama:
    """LlamaForCausalLM with our weights: eval, inference mode, sdpa, KV cache."""

    def __init__(self, ours: Any, shape: ModelShape) -> None:
        _require("transformers", "bench")
        self._torch: Any = import_module("torch")
        transformers: Any = import_module("transformers")
        config = transformers.LlamaConfig(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.ffn_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            rms_norm_eps=shape.norm_eps,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
            pad_token_id=0,
            eos_token_id=None,
        )
        config.rope_parameters = {"rope_type": "default", "rope_theta": shape.rope_theta}
        self._model = transformers.LlamaForCausalLM(config).eval()
        self._model.load_state_dict(_renamed_weights(ours, shape))
        self._stamps: list[float] = []
        self._model.register_forward_pre_hook(self._stamp)

    def generate(
        self, prompts: list[list[int]], num_tokens: int
    ) -> tuple[list[list[int]], list[float]]:
        """Greedy answers to prompts of equal length, `num_tokens` tokens each, and the seconds from
        each forward pass after the first to the next."""
        self._stamps = []
        with self._torch.inference_mode():
            ids = self._torch.tensor(prompts)
            out = self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                use_cache=True,
            )
            tokens = out[:, ids.shape[1] :].tolist()
        return tokens, [after - before for before, after in pairwise(self._stamps[1:])]

    def _stamp(self, *_: object) -> None:
        self._stamps.append(perf_counter())


def _renamed_weights(ours: Any, shape: ModelShape) -> dict[str, Any]:
    """Copies of our weights under their names there, fused matrices split.

    Rows of the output matrix for tokens that ours never samples are zero, so that greedy decoding
    passes them over there too, without a logits processor that would cost time.
    """
    head = ours.lm_head.weight.detach().t().clone()
    head[:FIRST_WORD] = 0.0
    weights = {
        "lm_head.weight": head,
        "model.embed_tokens.weight": ours.embedding.weight,
        "model.norm.weight": ours.norm.weight,
    }
    num_keys = shape.num_kv_heads * shape.head_dim
    for number, block in enumerate(ours.blocks):
        q, k, v = block.attention.qkv_proj.weight.t().split([shape.hidden_size, num_keys, num_keys])
        gate, up = block.ffn.gate_up_proj.weight.t().chunk(2)
        parts = {
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": block.attention.o_proj.weight.t(),
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": block.ffn.down_proj.weight.t(),
            "input_layernorm": block.attention_norm.weight,
            "post_attention_layernorm": block.ffn_norm.weight,
        }
        weights |= {f"model.layers.{number}.{name}.weight": w for name, w in parts.items()}
    return {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
