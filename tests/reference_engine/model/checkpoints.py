"""Made-up checkpoints, written by transformers as it writes real ones."""

import importlib
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import float32, manual_seed

TEXTS = [
    "The cat sat on the mat, and the dog sat on the cat.",
    "Many users leave before the answer has ended 🚪🏃.",
    "日本語の文字は三バイト。Ωμέγα, naïve, café.",
]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'developer' %}{{ raise_exception('no developers') }}{% endif %}"
    "<|{{ message['role'] }}|>\n    {{ message['content'] | trim }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
VOCAB_SIZE = 400  # of the models: the tokenizer has fewer
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 96,
    "bos_token_id": 0,
    "eos_token_id": [1, 2],
}
_THETA = {"rope_type": "default", "rope_theta": 1e5}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# Names of configurations, with what each changes.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"rope_parameters": _LLAMA3}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True, "rope_parameters": _THETA}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3-tied": ("Qwen3Config", {"tie_word_embeddings": True, "head_dim": 16}),
}


def oracle() -> Any:
    """transformers, which takes seconds to import, and has no types."""
    return importlib.import_module("transformers")


def write_checkpoint(folder: Path, name: str, *, max_shard_size: str = "1GB") -> None:
    """The weights are large enough for logits to differ."""
    kind, changes = CONFIGS[name]
    config = getattr(oracle(), kind)(**_SHAPE | changes)
    manual_seed(7)
    model = oracle().AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        weight.data.normal_(mean=float(weight.dim() == 1), std=0.2)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    fast_tokenizer().save_pretrained(folder)


def their_model(folder: Path) -> Any:
    return oracle().AutoModelForCausalLM.from_pretrained(folder, dtype=float32)


def fast_tokenizer() -> Any:
    """Byte-level BPE with two special tokens, which puts `<s>` before a text, as Llama's does."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return oracle().PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE,
    )
