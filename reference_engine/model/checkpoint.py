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
from msgspec import Meta, structs

from reference_engine.config import EngineConfig, EngineConfigError, ModelDtype
from reference_engine.model.shapes import MODEL_SHAPES, SMOLLM2_SHAPE, Llama3Scaling, ModelShape
from reference_engine.model.smollm2 import CONTEXT as SMOLLM2_CONTEXT
from reference_engine.model.smollm2 import SMOLLM2, cached_folder

_ARCHITECTURES: Final = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_Size = Annotated[int, Meta(ge=1)]


class Checkpoint(NamedTuple):
    """`context`: the most positions that the model was made for."""

    folder: Path
    architecture: str
    shape: ModelShape
    context: int
    eos_token_ids: frozenset[int]


class _Architecture(msgspec.Struct, kw_only=True):
    architectures: list[str] = []


class _Config(_Architecture, kw_only=True):
    """The fields of config.json that matter; transformers' defaults."""

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
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
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
    """The context that is wanted, else the checkpoint's as far as the KV cache holds it.

    Raises EngineConfigError if more is wanted than the model was made for.
    """
    if model in MODEL_SHAPES:
        return EngineConfig().max_model_len if wanted is None else wanted
    context = SMOLLM2_CONTEXT
    if model != SMOLLM2:
        folder = find_checkpoint(model)
        assert folder is not None
        context = _read_config(folder / "config.json").max_position_embeddings
    if wanted is None:
        return min(context, num_cache_tokens)
    if wanted > context:
        raise EngineConfigError(
            f"max_model_len ({wanted}) is beyond the model's context of {context} tokens "
            "(max_position_embeddings in its config.json)"
        )
    return wanted


def shape_of(model: str, dtype: ModelDtype) -> ModelShape:
    """Raises EngineConfigError."""
    folder = find_checkpoint(model)
    if folder is None:
        return structs.replace(MODEL_SHAPES[model], dtype=dtype)
    if model == SMOLLM2 and not folder.exists():  # until its worker has converted it
        return structs.replace(SMOLLM2_SHAPE, dtype=dtype)
    return read_checkpoint(folder, dtype).shape


def read_checkpoint(folder: Path, dtype: ModelDtype) -> Checkpoint:
    """Raises EngineConfigError, naming the file and the field."""
    path = folder / "config.json"
    config = _read_config(path)
    architecture = config.architectures[0]
    rope_theta, rope_scaling = _rope(path, config)
    shape = ModelShape(
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
        ffn_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
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


def _read_config(path: Path) -> _Config:
    [architecture, *_] = read_json(path, _Architecture).architectures or ["none"]
    if architecture not in _ARCHITECTURES:
        raise _unsupported(path, "architectures", architecture, ", ".join(_ARCHITECTURES))
    config = read_json(path, _Config)
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
    return config


def _rope(path: Path, config: _Config) -> tuple[float, Llama3Scaling | None]:
    """transformers 5 writes `rope_parameters`, earlier versions `rope_theta` and `rope_scaling`."""
    rope = config.rope_parameters or config.rope_scaling or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise _unsupported(path, "rope_type", kind, "default and llama3")
    if (share := rope.get("partial_rotary_factor", 1)) != 1:
        raise _unsupported(path, "partial_rotary_factor", share, 1)
    try:
        theta = msgspec.convert(rope.get("rope_theta", config.rope_theta), float)
        return theta, msgspec.convert(rope, Llama3Scaling) if kind == "llama3" else None
    except msgspec.ValidationError as error:
        raise EngineConfigError(f"{path}: rope_type {kind}: {error}") from error


def _ends_of_sequence(folder: Path, config: _Config) -> frozenset[int]:
    """The tokens that end a sequence, from generation_config.json, which has them all; else from
    config.json."""
    path, ends = folder / "generation_config.json", config.eos_token_id
    if path.exists() and (given := read_json(path, _GenerationConfig).eos_token_id) is not None:
        ends = given
    return frozenset(ends if isinstance(ends, list) else () if ends is None else (ends,))


_StructT = TypeVar("_StructT", bound=msgspec.Struct)


def read_json(path: Path, kind: type[_StructT]) -> _StructT:
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
