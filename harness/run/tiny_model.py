"""A small Llama with random weights, made on the spot, so that real engines run without a download.

Its tokenizer is byte-level BPE without merges: special tokens, 256 bytes, then filler words " w0",
" w1" ... So a prompt has as many tokens as bytes. The output rows of special tokens and bytes are
zero and the others large: each sampled token is a visible word, never the end of a sequence and
never a broken character, so `max_tokens` alone decides how long an answer is.

Formats: Hugging Face's folder (safetensors, bfloat16), GGUF version 3 (float32), or a tokenizer
without weights, for engines that only pretend to compute.
"""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from harness.run.recipes import ModelFormat

Floats = npt.NDArray[np.float32]


class Shape(NamedTuple):
    """`vocabulary` and the others in entries; `head` is the size of one attention head."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int
    context: int = 8192

    @property
    def head(self) -> int:
        return self.hidden // self.heads


SHAPES: Final[Mapping[str, Shape]] = {
    "tiny": Shape(256, 4, 4, 2, 512, 2048),  # 3.4 M parameters; a step takes 2 to 5 ms
    "small": Shape(640, 8, 10, 5, 1728, 8192),  # 47 M parameters; a step takes 10 to 15 ms
}
SIMULATED_VOCABULARY: Final = 36_764  # Dynamo's mocker draws its ids from so large a range
SPECIAL: Final = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
QUIET: Final = len(SPECIAL) + 256  # tokens that are never sampled
CHAT: Final = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EPSILON: Final = 1e-5
THETA: Final = 10_000.0
SCALE: Final = 0.02  # standard deviation of the weights
LOUD: Final = 0.4  # and of the output rows


def make_model(path: Path, kind: ModelFormat, preset: str, *, seed: int = 0) -> None:
    """Write the model to `path`: a file for GGUF, else a folder."""
    shape = SHAPES[preset]
    weights = _weights(shape, np.random.default_rng(seed))
    match kind:
        case "gguf":
            with path.open("wb") as file:
                _write_gguf(file, shape, weights)
        case "hf":
            path.mkdir()
            _write_tokenizer(path, shape)
            with (path / "model.safetensors").open("wb") as file:
                _write_safetensors(file, dict(weights))
        case "tokenizer":
            path.mkdir()
            _write_tokenizer(path, shape._replace(vocabulary=SIMULATED_VOCABULARY))


def _weights(shape: Shape, rng: np.random.Generator) -> Iterator[tuple[str, Floats]]:
    """By Hugging Face's names, without `model.` and `.weight`."""

    def drawn(rows: int, columns: int, scale: float = SCALE) -> Floats:
        return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(scale)

    ones = np.ones(shape.hidden, np.float32)
    keys = shape.kv_heads * shape.head
    yield "embed_tokens", drawn(shape.vocabulary, shape.hidden)
    for layer in range(shape.layers):
        prefix = f"layers.{layer}."
        yield prefix + "input_layernorm", ones
        yield prefix + "self_attn.q_proj", drawn(shape.hidden, shape.hidden)
        yield prefix + "self_attn.k_proj", drawn(keys, shape.hidden)
        yield prefix + "self_attn.v_proj", drawn(keys, shape.hidden)
        yield prefix + "self_attn.o_proj", drawn(shape.hidden, shape.hidden)
        yield prefix + "post_attention_layernorm", ones
        yield prefix + "mlp.gate_proj", drawn(shape.feed_forward, shape.hidden)
        yield prefix + "mlp.up_proj", drawn(shape.feed_forward, shape.hidden)
        yield prefix + "mlp.down_proj", drawn(shape.hidden, shape.feed_forward)
    yield "norm", ones
    output = drawn(shape.vocabulary, shape.hidden, LOUD)
    output[:QUIET] = 0
    yield "lm_head", output


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in byte-level BPE: itself where it can be printed."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    letters = {byte: chr(byte) for byte in printed}
    letters |= {byte: chr(256 + number) for number, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


def _vocabulary(size: int) -> list[str]:
    return [*SPECIAL, *_byte_letters(), *(f"\u0120w{number}" for number in range(size - QUIET))]


def _write_tokenizer(folder: Path, shape: Shape) -> None:
    words = _vocabulary(shape.vocabulary)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = [
        {"id": number, "content": word, "special": True, **flags}
        for number, word in enumerate(SPECIAL)
    ]
    model = {"type": "BPE", "vocab": {word: number for number, word in enumerate(words)}}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    pages: dict[str, dict[str, Any]] = {
        "tokenizer.json": {
            "version": "1.0",
            "added_tokens": special,
            "pre_tokenizer": {**byte_level, "use_regex": True},
            "decoder": {**byte_level, "use_regex": True},
            "model": {**model, "merges": []},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "model_max_length": shape.context,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT,
        },
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": shape.hidden,
            "intermediate_size": shape.feed_forward,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head,
            "vocab_size": shape.vocabulary,
            "max_position_embeddings": shape.context,
            "rms_norm_eps": EPSILON,
            "rope_theta": THETA,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            **ends,
        },
        "generation_config.json": ends,
    }
    for name, page in pages.items():
        (folder / name).write_text(json.dumps(page, indent=1))


def _write_safetensors(file: BinaryIO, weights: Mapping[str, Floats]) -> None:
    """Eight bytes with the header's length, the header, then the tensors without gaps."""
    entries: dict[str, Any] = {}
    end = 0
    for name, tensor in weights.items():
        start, end = end, end + 2 * tensor.size
        full = f"{name}.weight" if name == "lm_head" else f"model.{name}.weight"
        entries[full] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    header += b" " * (-len(header) % 8)
    file.write(struct.pack("<Q", len(header)) + header)
    for tensor in weights.values():
        # bfloat16 is the upper half of a float32.
        file.write((tensor.view(np.uint32) >> 16).astype("<u2").tobytes())


_GGUF_NAMES: Final = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_ALIGNMENT: Final = 32
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9  # GGUF's types of values
_CONTROL, _NORMAL = 3, 1  # its kinds of tokens
_CODES: Final = {_U32: "I", _I32: "i", _F32: "f", _BOOL: "?"}  # struct's


def _gguf_name(name: str) -> str:
    if not name.startswith("layers."):
        return f"{_GGUF_NAMES[name]}.weight"
    _, layer, rest = name.split(".", 2)
    return f"blk.{layer}.{_GGUF_NAMES[rest]}.weight"


def _write_gguf(file: BinaryIO, shape: Shape, weights: Iterator[tuple[str, Floats]]) -> None:
    """Magic, version, counts, key-values, tensor descriptions, then the tensors, each aligned."""
    tensors = {_gguf_name(name): tensor for name, tensor in weights}
    values = [_key_value(key, value) for key, value in _gguf_values(shape).items()]
    file.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)) + b"".join(values))
    offset = 0
    for name, tensor in tensors.items():
        sizes = tensor.shape[::-1]  # the fastest-moving one first
        described = struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, 0, offset)  # 0: float32
        file.write(_text(name) + described)
        offset += tensor.nbytes + -tensor.nbytes % _ALIGNMENT
    for tensor in tensors.values():
        file.write(b"\0" * (-file.tell() % _ALIGNMENT))
        file.write(tensor.astype("<f4").tobytes())


def _gguf_values(shape: Shape) -> dict[str, tuple[int, Any]]:
    words = _vocabulary(shape.vocabulary)
    kinds = [_CONTROL if number < len(SPECIAL) else _NORMAL for number in range(len(words))]
    llama = {
        "context_length": (_U32, shape.context),
        "embedding_length": (_U32, shape.hidden),
        "block_count": (_U32, shape.layers),
        "feed_forward_length": (_U32, shape.feed_forward),
        "attention.head_count": (_U32, shape.heads),
        "attention.head_count_kv": (_U32, shape.kv_heads),
        "attention.layer_norm_rms_epsilon": (_F32, EPSILON),
        "rope.dimension_count": (_U32, shape.head),
        "rope.freq_base": (_F32, THETA),
        "vocab_size": (_U32, shape.vocabulary),
    }
    tokenizer = {
        "ggml.model": (_STRING, "gpt2"),
        "ggml.pre": (_STRING, "gpt-2"),
        "ggml.tokens": (_STRING, words),
        "ggml.token_type": (_I32, kinds),
        "ggml.merges": (_STRING, ["a b"]),  # it wants some; "ab" is no token, so none is merged
        "ggml.bos_token_id": (_U32, 1),
        "ggml.eos_token_id": (_U32, 2),
        "ggml.padding_token_id": (_U32, 0),
        "ggml.add_bos_token": (_BOOL, False),
        "chat_template": (_STRING, CHAT),
    }
    return {
        "general.architecture": (_STRING, "llama"),
        "general.name": (_STRING, "random weights"),
        "general.file_type": (_U32, 0),
        **{f"llama.{key}": value for key, value in llama.items()},
        **{f"tokenizer.{key}": value for key, value in tokenizer.items()},
    }


def _key_value(key: str, value: tuple[int, Any]) -> bytes:
    kind, content = value
    if not isinstance(content, list):
        return _text(key) + struct.pack("<I", kind) + _packed(kind, [content])
    head = struct.pack("<IIQ", _ARRAY, kind, len(content))
    return _text(key) + head + _packed(kind, content)


def _packed(kind: int, content: Sequence[Any]) -> bytes:
    if kind == _STRING:
        return b"".join(map(_text, content))
    return struct.pack(f"<{len(content)}{_CODES[kind]}", *content)


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded
