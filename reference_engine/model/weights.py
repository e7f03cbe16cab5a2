"""The weights of a checkpoint, copied tensor by tensor into the model.

All files are checked before memory is taken. They are mapped, so the only copy is the model's own.
Ours differ from Hugging Face's in three ways: a matrix lies input by input, projections of one
input are one matrix, and so are Qwen3's two norms of heads, a row for each head.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from reference_engine.config import EngineConfigError
from reference_engine.model.checkpoint import Checkpoint, read_json
from reference_engine.model.llama import Llama, build_model
from reference_engine.model.shapes import ModelShape

_DTYPES: Final = ("F32", "BF16", "F16")
_INDEX: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"
_KNOWN_EXTRAS: Final = ("rotary_emb.inv_freq", "lm_head.weight")  # computed; the embedding, if tied


class Part(NamedTuple):
    """A tensor of the checkpoint, and the slice of a parameter of ours that it fills."""

    name: str
    shape: tuple[int, ...]
    parameter: str
    place: tuple[slice, ...] = ()
    is_transposed: bool = False


def parts_of(shape: ModelShape) -> Iterator[Part]:
    """All tensors of a checkpoint of this shape."""
    hidden, heads = (shape.hidden_size,), (shape.vocab_size, shape.hidden_size)
    yield Part("model.embed_tokens.weight", heads, "embedding.weight")
    for layer in range(shape.num_layers):
        yield from _layer_parts(shape, f"model.layers.{layer}.", f"blocks.{layer}.")
    yield Part("model.norm.weight", hidden, "norm.weight")
    if not shape.tied_embeddings:
        yield Part("lm_head.weight", heads, "lm_head.weight", is_transposed=True)


def _layer_parts(shape: ModelShape, theirs: str, ours: str) -> Iterator[Part]:
    hidden, ffn, head_dim = shape.hidden_size, shape.ffn_size, shape.head_dim
    heads = {"q": shape.num_heads, "k": shape.num_kv_heads, "v": shape.num_kv_heads}
    qkv, first = f"{ours}attention.qkv_proj.", 0
    for name, count in heads.items():
        columns = slice(first * head_dim, (first + count) * head_dim)
        yield _matrix(f"{theirs}self_attn.{name}_proj", qkv, hidden, count * head_dim, columns)
        if shape.qkv_bias:
            size = (count * head_dim,)
            yield Part(f"{theirs}self_attn.{name}_proj.bias", size, qkv + "bias", (columns,))
        if shape.qk_norm and name != "v":
            rows, norm = slice(first, first + count), f"{ours}attention.qk_norm.weight"
            yield Part(f"{theirs}self_attn.{name}_norm.weight", (head_dim,), norm, (rows,))
        first += count
    num_out = shape.num_heads * head_dim
    yield _matrix(f"{theirs}self_attn.o_proj", f"{ours}attention.o_proj.", num_out, hidden)
    gate_up = f"{ours}ffn.gate_up_proj."
    yield _matrix(f"{theirs}mlp.gate_proj", gate_up, hidden, ffn, slice(0, ffn))
    yield _matrix(f"{theirs}mlp.up_proj", gate_up, hidden, ffn, slice(ffn, 2 * ffn))
    yield _matrix(f"{theirs}mlp.down_proj", f"{ours}ffn.down_proj.", ffn, hidden)
    for name, norm in (("input", "attention_norm"), ("post_attention", "ffn_norm")):
        yield Part(f"{theirs}{name}_layernorm.weight", (hidden,), f"{ours}{norm}.weight")


def _matrix(
    theirs: str, ours: str, num_in: int, num_out: int, columns: slice | None = None
) -> Part:
    place = () if columns is None else (slice(None), columns)
    return Part(theirs + ".weight", (num_out, num_in), ours + "weight", place, is_transposed=True)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class CheckpointFiles:
    """The open safetensors files, with each tensor's name. Raises EngineConfigError."""

    def __init__(self, folder: Path, files: ExitStack) -> None:
        self._folder = folder
        self._of: dict[str, Any] = {}
        for name in self._file_names():
            try:
                # It checks that the tensors fill the file: one that was cut off is refused.
                file = files.enter_context(safe_open(folder / name, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise EngineConfigError(
                    f"{folder / name}: no whole safetensors file: {error}; copy it again"
                ) from error
            self._of |= dict.fromkeys(file.keys(), file)

    def _file_names(self) -> list[str]:
        index = self._folder / _INDEX
        if not index.exists():
            if not (self._folder / _SINGLE).exists():
                raise EngineConfigError(
                    f"--model {self._folder}: there is neither {_SINGLE} nor {_INDEX}"
                )
            return [_SINGLE]
        return sorted(set(read_json(index, _Index).weight_map.values()))

    def tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._of[name].get_tensor(name)
        return tensor

    def check(self, parts: list[Part], architecture: str) -> None:
        model = f"--model {self._folder}: as config.json has it, a {architecture}"
        for name, shape, *_ in parts:
            if name not in self._of:
                raise EngineConfigError(f"{model} has a tensor {name}; it is missing")
            found = self._of[name].get_slice(name)
            if tuple(found.get_shape()) != shape:
                raise EngineConfigError(
                    f"{model} has a tensor {name} of the shape {list(shape)}, not "
                    f"{found.get_shape()}"
                )
            if (dtype := found.get_dtype()) not in _DTYPES:
                raise EngineConfigError(
                    f"--model {self._folder}: the tensor {name} is {dtype}; this engine reads only "
                    + ", ".join(_DTYPES)
                )
        for name in sorted(self._of.keys() - {part.name for part in parts}):
            if not name.endswith(_KNOWN_EXTRAS):
                raise EngineConfigError(f"{model} has no tensor {name}; one is there")


def load_checkpoint(
    checkpoint: Checkpoint, max_positions: int, say: Callable[[str], None], device: torch.device
) -> Llama:
    """Raises EngineConfigError."""
    parts = list(parts_of(checkpoint.shape))
    with ExitStack() as opened:
        files = CheckpointFiles(checkpoint.folder, opened)
        files.check(parts, checkpoint.architecture)
        model = build_model(checkpoint.shape, max_positions, device)
        ours = model.state_dict()
        total, done, said = sum(map(_num_elements, parts)), 0, 0
        for part in parts:
            tensor = files.tensor(part.name)
            ours[part.parameter][part.place].copy_(tensor.t() if part.is_transposed else tensor)
            done += _num_elements(part)
            if (tenths := done * 10 // total) > said:
                said = tenths
                say(f"loading {checkpoint.folder}: {tenths * 10} % of {total / 1e6:,.0f} M weights")
    return model


def _num_elements(part: Part) -> int:
    return torch.Size(part.shape).numel()
