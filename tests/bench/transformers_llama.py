"""The same model in Hugging Face transformers: LlamaForCausalLM with our weights, on the clock."""

from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

from reference_engine.model.shapes import ModelShape
from reference_engine.model.tokenizer import FIRST_WORD
from tests.bench.ratio import UnavailableError


class Generated(NamedTuple):
    """Tokens of each stream, and the seconds from each forward pass after the first to the next."""

    tokens: list[list[int]]
    steps_s: list[float]


class TransformersLlama:
    """Greedy `generate` at its best plain settings: eval, inference mode, sdpa, KV cache."""

    def __init__(self, ours: Any, shape: ModelShape, device: str) -> None:
        if find_spec("transformers") is None:
            raise UnavailableError("needs transformers: pip install 'walkaway[bench]'")
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
        self._device = device
        self._model = transformers.LlamaForCausalLM(config).eval()
        self._model.load_state_dict(_renamed_weights(ours, shape))
        self._model.to(device)
        self._stamps: list[float] = []
        self._model.register_forward_pre_hook(self._stamp)

    def generate(self, prompts: list[list[int]], num_tokens: int) -> Generated:
        """Greedy answers of `num_tokens` tokens each; the prompts are equally long."""
        self._stamps = []
        with self._torch.inference_mode():
            ids = self._torch.tensor(prompts, device=self._device)
            out = self._model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                use_cache=True,
            )
            tokens = out[:, ids.shape[1] :].tolist()
        return Generated(tokens, [after - before for before, after in pairwise(self._stamps[1:])])

    def _stamp(self, *_: object) -> None:
        if self._device == "cuda":
            self._torch.cuda.synchronize()
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
