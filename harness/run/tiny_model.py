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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from harness.run.recipes import ModelFormat

if TYPE_CHECKING:
    import gguf

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
            _write_gguf(path, shape, dict(weights))
        case "hf":
            path.mkdir()
            _write_tokenizer(path, shape)
            _write_safetensors(path / "model.safetensors", dict(weights))
        case "tokenizer":
            path.mkdir()
            _write_tokenizer(path, shape._replace(vocabulary=SIMULATED_VOCABULARY))


def _weights(shape: Shape, rng: np.random.Generator) -> Iterator[tuple[str, Floats]]:
    """The weights by Hugging Face's names."""

    def drawn(rows: int, columns: int, scale: float = SCALE) -> Floats:
        return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(scale)

    ones = np.ones(shape.hidden, np.float32)
    keys = shape.kv_heads * shape.head
    yield "model.embed_tokens.weight", drawn(shape.vocabulary, shape.hidden)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", ones
        yield f"{prefix}.self_attn.q_proj.weight", drawn(shape.hidden, shape.hidden)
        yield f"{prefix}.self_attn.k_proj.weight", drawn(keys, shape.hidden)
        yield f"{prefix}.self_attn.v_proj.weight", drawn(keys, shape.hidden)
        yield f"{prefix}.self_attn.o_proj.weight", drawn(shape.hidden, shape.hidden)
        yield f"{prefix}.post_attention_layernorm.weight", ones
        yield f"{prefix}.mlp.gate_proj.weight", drawn(shape.feed_forward, shape.hidden)
        yield f"{prefix}.mlp.up_proj.weight", drawn(shape.feed_forward, shape.hidden)
        yield f"{prefix}.mlp.down_proj.weight", drawn(shape.hidden, shape.feed_forward)
    yield "model.norm.weight", ones
    output = drawn(shape.vocabulary, shape.hidden, LOUD)
    output[:QUIET] = 0
    yield "lm_head.weight", output


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


def _write_safetensors(path: Path, weights: Mapping[str, Floats]) -> None:
    """Eight bytes with the header's length, the header, then the tensors without gaps.

    The library writes bfloat16 for torch alone: numpy has no such type.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in weights.items():
        start, end = end, end + 2 * tensor.size
        entries[name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for tensor in weights.values():
            # bfloat16 is the upper half of a float32.
            file.write((tensor.view(np.uint32) >> 16).astype("<u2").tobytes())


def _write_gguf(path: Path, shape: Shape, weights: Mapping[str, Floats]) -> None:
    import gguf

    file = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.LLAMA])
    file.add_name("random weights")
    file.add_file_type(gguf.LlamaFileType.ALL_F32)
    file.add_context_length(shape.context)
    file.add_embedding_length(shape.hidden)
    file.add_block_count(shape.layers)
    file.add_feed_forward_length(shape.feed_forward)
    file.add_head_count(shape.heads)
    file.add_head_count_kv(shape.kv_heads)
    file.add_layer_norm_rms_eps(EPSILON)
    file.add_rope_dimension_count(shape.head)
    file.add_rope_freq_base(THETA)
    file.add_vocab_size(shape.vocabulary)
    _add_tokenizer(file, shape)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, shape.layers)
    for name, tensor in weights.items():
        named = names.get_name(name, (".weight",))
        assert named is not None
        file.add_tensor(named, tensor)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def _add_tokenizer(file: "gguf.GGUFWriter", shape: Shape) -> None:
    from gguf import TokenType

    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("gpt-2")
    file.add_token_list(words := _vocabulary(shape.vocabulary))
    ordinary = len(words) - len(SPECIAL)
    file.add_token_types([TokenType.CONTROL] * len(SPECIAL) + [TokenType.NORMAL] * ordinary)
    file.add_token_merges(["a b"])  # it wants some; "ab" is no token, so none is merged
    file.add_bos_token_id(1)
    file.add_eos_token_id(2)
    file.add_pad_token_id(0)
    file.add_add_bos_token(value=False)
    file.add_chat_template(CHAT)
