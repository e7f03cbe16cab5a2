"""The paged, chunked, batched model against the plainest one: no cache, no batch.

torch is an optional extra: without it these tests are skipped.
"""

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="needs the extra `engine` (torch)")

from reference_engine.config import EngineConfig  # noqa: E402
from reference_engine.core.request import Request, Sampling  # noqa: E402
from reference_engine.core.scheduler import Scheduler  # noqa: E402
from reference_engine.model.llama import build_model, fill_with_random  # noqa: E402
from reference_engine.model.sampler import add_bias, sample, sampling_bias  # noqa: E402
from reference_engine.model.shapes import MODEL_SHAPES  # noqa: E402
from reference_engine.model.tokenizer import EOS_TOKEN_ID, FIRST_WORD, WordTokenizer  # noqa: E402
from reference_engine.model.torch_runner import TorchRunner  # noqa: E402
from tests.reference_engine.conftest import run_to_the_end  # noqa: E402

BIAS = sampling_bias(WordTokenizer(2048), torch.device("cpu"))
GREEDY = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)


def rotated(x: Any, positions: Any) -> Any:
    """Rotary positions as complex numbers: half by half, each pair turned by its angle."""
    theta, head_dim = MODEL_SHAPES["tiny"].rope_theta, x.shape[-1]
    angles = torch.outer(positions, theta ** (-torch.arange(0, head_dim, 2) / head_dim))
    first, second = x.chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1)


def plain_logits(model: Any, token_ids: list[int]) -> Any:
    """Logits after the last token, by the textbook: no cache, no blocks, no batch."""
    shape = MODEL_SHAPES["tiny"]
    positions, num_tokens = torch.arange(len(token_ids)), len(token_ids)
    x = model.embedding(torch.tensor(token_ids))
    causal = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    for block in model.blocks:
        attention = block.attention
        y = block.attention_norm(x)
        projected = attention.qkv_proj(y).view(num_tokens, -1, shape.head_dim)
        q = projected[:, : shape.num_heads]
        k, v = projected[:, shape.num_heads :].chunk(2, dim=1)
        q, k = rotated(q, positions), rotated(k, positions)
        group = shape.num_heads // shape.num_kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=causal
        )
        x = x + attention.o_proj(out.transpose(0, 1).reshape(num_tokens, -1))
        x = x + block.ffn(block.ffn_norm(x), model.operations)
    return model.lm_head(model.norm(x[-1:]))


@pytest.fixture(scope="module")
def plain_model() -> Any:
    model = build_model(MODEL_SHAPES["tiny"], 64, torch.device("cpu"))
    fill_with_random(model, EngineConfig().seed)
    return model


def plain_answer(model: Any, request: Request) -> list[int]:
    tokens = request.token_ids[: request.num_prompt_tokens]
    with torch.inference_mode():
        for _ in range(request.num_generated):
            plain = [Request("plain", tokens, GREEDY)]
            tokens += sample(add_bias(plain_logits(model, tokens), plain, BIAS), plain)
    return tokens


def engine(**settings: Any) -> tuple[TorchRunner, Scheduler]:
    sizes: dict[str, Any] = {"num_blocks": 64, "block_size": 4, "max_model_len": 64}
    config = EngineConfig(**{"device": "cpu"} | sizes | settings)
    runner = TorchRunner(config)
    return runner, Scheduler(config, runner.tokenizer.eos_token_ids)


def test_chunked_batched_and_preempted_answers_equal_the_plain_ones(plain_model: Any) -> None:
    runner, scheduler = engine(num_blocks=16, max_num_seqs=3, max_num_batched_tokens=16)
    for i in range(4):
        prompt = [3 + (7 * i + j) % 256 for j in range(9 + 11 * i)]
        scheduler.add(Request(f"r{i}", prompt, GREEDY))
    requests = list(scheduler.requests.values())
    run_to_the_end(scheduler, runner)
    assert scheduler.counters.preemptions > 0, "the pool is meant to be too small"
    for request in requests:
        assert request.token_ids == plain_answer(plain_model, request), request


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_answers_as_the_cpu_does() -> None:
    answers = []
    for device in ("cpu", "cuda"):
        runner, scheduler = engine(device=device)
        request = Request("a", [9] * 40, GREEDY)
        scheduler.add(request)
        run_to_the_end(scheduler, runner)
        answers.append(request.token_ids)
    assert answers[0] == answers[1]


def sampled(logits: Any, **sampling: Any) -> int:
    requests = [Request("a", [5], Sampling(max_tokens=1, **sampling))]
    token: int = sample(add_bias(logits.clone(), requests, BIAS), requests)[0]
    return token


def test_only_words_and_the_end_are_sampled() -> None:
    logits = torch.zeros(1, 2048)
    logits[0, 7] = 50.0  # a byte token, however likely
    logits[0, EOS_TOKEN_ID] = 20.0
    assert sampled(logits, temperature=0.0) == EOS_TOKEN_ID
    assert sampled(logits, temperature=0.0, ignore_eos=True) >= FIRST_WORD
    assert sampled(logits, temperature=1.0, ignore_eos=True) >= FIRST_WORD


def test_sampling_follows_the_distribution_and_the_seed() -> None:
    logits = torch.full((1, 2048), float("-inf"))
    logits[0, 300], logits[0, 301] = 0.0, float(torch.log(torch.tensor(3.0)))
    drawn = [sampled(logits, seed=seed) for seed in range(400)]
    assert drawn == [sampled(logits, seed=seed) for seed in range(400)]
    # 400 draws with p = 1/4: 100 expected, standard deviation 8.7; the seeds are fixed
    assert 70 <= drawn.count(300) <= 130
    assert drawn.count(301) == 400 - drawn.count(300)


def test_each_position_is_drawn_anew() -> None:
    logits = torch.zeros(1, 2048)
    tokens = []
    for length in range(1, 9):
        requests = [Request("a", [5] * length, Sampling(max_tokens=1, seed=4))]
        tokens += sample(add_bias(logits.clone(), requests, BIAS), requests)
    assert len(set(tokens)) == 8


def test_a_temperature_too_small_for_float32_is_greedy() -> None:
    logits = torch.zeros(1, 2048)
    logits[0, 393] = 1.0
    assert sampled(logits, temperature=1e-320) == 393
