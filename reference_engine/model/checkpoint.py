"""A checkpoint: a Hugging Face folder, and what its JSON files say about the model.

    config.json              architecture and shape
    generation_config.json   ends of a sequence
    model.safetensors        see `weights`
    tokenizer.json           see `pretrained`

A model that this engine cannot compute is refused here, by the name of a field.
"""

from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from reference_engine.config import EngineConfig, EngineConfigError, ModelDtype
from reference_engine.model.shapes import MODEL_SHAPES, LinearScaling, Llama3Scaling, ModelShape
from reference_engine.model.smollm2 import CONTEXT as SMOLLM2_CONTEXT
from reference_engine.model.smollm2 import SMOLLM2, cached_folder

_ARCHITECTURES: Final = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_QWEN3_HEAD_DIM: Final = 128  # of transformers' Qwen3Config, for a file that has none
_Size = Annotated[int, Meta(ge=1)]


class Checkpoint(NamedTuple):
    """`context`: the most positions that the model was made for."""

    folder: Path
    architecture: str
    shape: ModelShape
    context: int
    eos_token_ids: frozenset[int]


class _Rope(msgspec.Struct, kw_only=True):
    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    partial_rotary_factor: float = 1.0
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None


class _Config(msgspec.Struct, kw_only=True):
    """The fields of config.json that matter; transformers' defaults."""

    architectures: list[str] = []
    hidden_size: _Size
    num_hidden_layers: _Size
    num_attention_heads: _Size
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    intermediate_size: _Size
    vocab_size: _Size
    max_position_embeddings: _Size
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    tie_word_embeddings: bool = False
    eos_token_id: int | list[int] | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    partial_rotary_factor: float = 1.0
    pretraining_tp: int = 1
    quantization_config: dict[str, Any] | None = None


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def find_checkpoint(model: str) -> Path | None:
    """The folder of a model; None for one with random weights. Raises EngineConfigError."""
    if model in MODEL_SHAPES:
        return None
    if model == SMOLLM2:
        return cached_folder()
    folder = Path(model).expanduser()
    if not folder.is_dir():
        names = ", ".join([*sorted(MODEL_SHAPES), SMOLLM2])
        raise EngineConfigError(f"--model {model}: neither a folder nor one of {names}")
    return folder


def choose_context(model: str, wanted: int | None, num_cache_tokens: int) -> int:
    """What is wanted, else the checkpoint's context as far as the KV cache holds it.

    Raises EngineConfigError if more is wanted than the model was made for.
    """
    if model in MODEL_SHAPES:
        return EngineConfig().max_model_len if wanted is None else wanted
    context = SMOLLM2_CONTEXT
    if model != SMOLLM2:
        folder = find_checkpoint(model)
        assert folder is not None
        context = _read(folder / "config.json", _Config).max_position_embeddings
    if wanted is None:
        return min(context, num_cache_tokens)
    if wanted > context:
        raise EngineConfigError(
            f"max_model_len ({wanted}) is beyond the model's context of {context} tokens "
            "(max_position_embeddings in its config.json)"
        )
    return wanted


def read_checkpoint(folder: Path, dtype: ModelDtype) -> Checkpoint:
    """Raises EngineConfigError, naming the file and the field."""
    path = folder / "config.json"
    config = _read(path, _Config)
    architecture = config.architectures[0] if config.architectures else "none"
    if architecture not in _ARCHITECTURES:
        raise _unsupported(path, "architectures", architecture, ", ".join(_ARCHITECTURES))
    _check_fields(path, config)
    # transformers 5 writes `rope_parameters`, earlier versions `rope_theta` and `rope_scaling`.
    rope = config.rope_parameters or config.rope_scaling or _Rope()
    num_kv_heads = config.num_key_value_heads or config.num_attention_heads
    shape = ModelShape(
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=config.head_dim or _default_head_dim(config, architecture),
        ffn_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        rope_theta=rope.rope_theta or config.rope_theta,
        rope_scaling=_rope_scaling(path, rope),
        norm_eps=config.rms_norm_eps,
        qkv_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        tied_embeddings=config.tie_word_embeddings,
        dtype=dtype,
    )
    if shape.num_heads % shape.num_kv_heads:
        divisors = f"a divisor of num_attention_heads ({shape.num_heads})"
        raise _unsupported(path, "num_key_value_heads", shape.num_kv_heads, divisors)
    if shape.head_dim % 2:
        raise _unsupported(path, "head_dim", shape.head_dim, "an even number")
    ends = _ends_of_sequence(folder, config)
    return Checkpoint(folder, architecture, shape, config.max_position_embeddings, ends)


def _check_fields(path: Path, config: _Config) -> None:
    if config.quantization_config is not None:
        method = config.quantization_config.get("quant_method", "unknown")
        raise _unsupported(path, "quantization_config", method, "weights that are not quantised")
    for name, only in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("use_sliding_window", False),
        ("partial_rotary_factor", 1.0),
        ("pretraining_tp", 1),
    ):
        if (value := getattr(config, name)) != only:
            raise _unsupported(path, name, value, only)


def _default_head_dim(config: _Config, architecture: str) -> int:
    if architecture == "Qwen3ForCausalLM":
        return _QWEN3_HEAD_DIM
    return config.hidden_size // config.num_attention_heads


def _rope_scaling(path: Path, rope: _Rope) -> LinearScaling | Llama3Scaling | None:
    kind = rope.rope_type or rope.type or "default"
    if rope.partial_rotary_factor != 1:
        raise _unsupported(path, "partial_rotary_factor", rope.partial_rotary_factor, 1)
    try:
        match kind:
            case "default":
                return None
            case "linear":
                return msgspec.convert(rope, LinearScaling, from_attributes=True)
            case "llama3":
                return msgspec.convert(rope, Llama3Scaling, from_attributes=True)
            case _:
                raise _unsupported(path, "rope_type", kind, "default, linear, llama3")
    except msgspec.ValidationError as error:
        raise EngineConfigError(f"{path}: rope_type {kind}: {error}") from error


def _ends_of_sequence(folder: Path, config: _Config) -> frozenset[int]:
    """Those of generation_config.json, which has them all; else those of config.json."""
    path, ends = folder / "generation_config.json", config.eos_token_id
    if path.exists() and (given := _read(path, _GenerationConfig).eos_token_id) is not None:
        ends = given
    return frozenset(ends if isinstance(ends, list) else () if ends is None else (ends,))


_StructT = TypeVar("_StructT", bound=msgspec.Struct)


def _read(path: Path, kind: type[_StructT]) -> _StructT:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError as error:
        raise EngineConfigError(
            f"--model {path.parent}: no Hugging Face checkpoint, there is no {path.name}"
        ) from error
    except (OSError, ValueError) as error:
        raise EngineConfigError(f"{path}: {error}") from error


def _unsupported(path: Path, field: str, value: object, supported: object) -> EngineConfigError:
    return EngineConfigError(f"{path}: {field} is {value}; this engine supports only {supported}")
