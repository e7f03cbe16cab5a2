"""Shapes of models: the Llama architecture and what Qwen2 and Qwen3 change in it."""

import msgspec

from reference_engine.config import ModelDtype


class Llama3Scaling(msgspec.Struct, frozen=True, kw_only=True):
    """Llama 3.1's rule: a frequency that turns less than `low_freq_factor` times in the original
    context is divided by `factor`; one that turns more than `high_freq_factor` times is kept.
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


def num_weights(shape: ModelShape) -> int:
    """Reckoned: to build a model without memory, torch would load its compiler for seconds."""
    hidden, head_dim = shape.hidden_size, shape.head_dim
    projections = shape.num_projected + shape.num_heads  # into the heads, and out of them
    layer = hidden * (head_dim * projections + 3 * shape.ffn_size + 2)
    if shape.qkv_bias:
        layer += shape.num_projected * head_dim
    if shape.qk_norm:
        layer += (shape.num_heads + shape.num_kv_heads) * head_dim
    vocabularies = 1 if shape.tied_embeddings else 2
    return shape.num_layers * layer + hidden * (vocabularies * shape.vocab_size + 1)


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
    "1b": ModelShape(  # of Llama 3.2 1B
        hidden_size=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        ffn_size=8192,
        vocab_size=128256,
        rope_theta=500000.0,
        rope_scaling=Llama3Scaling(
            factor=32.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
        tied_embeddings=True,
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
SMOLLM2_SHAPE = ModelShape(  # of SmolLM2 135M
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    ffn_size=1536,
    vocab_size=49152,
    rope_theta=100000.0,
    tied_embeddings=True,
)
