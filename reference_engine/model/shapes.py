"""Shapes of models: the Llama architecture and what Qwen2 and Qwen3 change in it."""

import msgspec

from reference_engine.config import ModelDtype


class Llama3Scaling(msgspec.Struct, frozen=True, kw_only=True):
    """Llama 3.1's rule: frequencies that turn less than `low_freq_factor` times in the original
    context are divided by `factor`, those that turn more than `high_freq_factor` times are kept.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """`qkv_bias` is Qwen2's, `qk_norm` (a norm of each head, before the rotation) Qwen3's."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    rope_theta: float = 10000.0
    rope_scaling: Llama3Scaling | None = None
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    dtype: ModelDtype = "float32"

    @property
    def num_projected(self) -> int:
        """Heads of queries, keys and values together."""
        return self.num_heads + 2 * self.num_kv_heads


MODEL_SHAPES: dict[str, ModelShape] = {
    "tiny": ModelShape(
        hidden_size=256,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        ffn_size=512,
        vocab_size=2048,
    ),
    "8b": ModelShape(  # of Llama 3.1 8B
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        ffn_size=14336,
        vocab_size=128256,
        rope_theta=500000.0,
    ),
}
