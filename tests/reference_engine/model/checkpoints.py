"""Made-up checkpoints, written by transformers as it writes real ones."""

from pathlib import Path
from typing import Any

import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import manual_seed

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
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**_SHAPE, rope_parameters=_LLAMA3),
    "llama-tied": transformers.LlamaConfig(
        **_SHAPE,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    ),
    "qwen2": transformers.Qwen2Config(**_SHAPE),
    "qwen3-tied": transformers.Qwen3Config(**_SHAPE, head_dim=16, tie_word_embeddings=True),
}


def write_checkpoint(folder: Path, name: str, *, max_shard_size: str = "1GB") -> Any:
    """Returns transformers' model. Its weights are large enough for its logits to differ."""
    manual_seed(7)
    factory: Any = transformers.AutoModelForCausalLM  # it has no types
    model = factory.from_config(CONFIGS[name])
    for weight in model.parameters():
        weight.data.normal_(mean=float(weight.dim() == 1), std=0.2)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    fast_tokenizer().save_pretrained(folder)
    return model.eval()


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
    factory: Any = transformers.PreTrainedTokenizerFast
    return factory(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE,
    )
