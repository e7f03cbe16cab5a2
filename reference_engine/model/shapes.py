"""Shapes of the models that can be named: Llama architectures with random weights."""

import msgspec


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_size: int
    vocab_size: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


MODEL_SHAPES: dict[str, ModelShape] = {
    "tiny": ModelShape(
        hidden_size=256, num_layers=4, num_heads=4, num_kv_heads=2, ffn_size=512, vocab_size=2048
    ),
}
