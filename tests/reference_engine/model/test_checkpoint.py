"""Checkpoints against transformers: logits in peace and in trouble, tokens, chats."""

import json
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the extra `engine` (torch)")

import torch
from safetensors.torch import load_file, save_file

from reference_engine.config import EngineConfig, EngineConfigError
from reference_engine.core.request import Request, Sampling
from reference_engine.core.scheduler import Scheduler
from reference_engine.model.checkpoint import choose_context, read_checkpoint
from reference_engine.model.llama import build_model
from reference_engine.model.pretrained import PretrainedTokenizer
from reference_engine.model.shapes import num_weights
from reference_engine.model.tokenizer import ChatError, Message
from reference_engine.model.torch_runner import TorchRunner, free_memory
from tests.reference_engine.conftest import run_to_the_end
from tests.reference_engine.model.checkpoints import (
    CONFIGS,
    TEXTS,
    VOCAB_SIZE,
    oracle,
    their_model,
    write_checkpoint,
)

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)
HARD_TEXTS = [
    *TEXTS,
    "<s>user</s> wrote <|end|> in the middle</s>",
    "👩‍👩‍👧‍👦 family, flag 🇯🇵, skin 👍🏽; \u0627\u0644\u0639 ١٢٣; tabs\t\tand  spaces ",
    "漢字かな交じり文 mixed with English, 中文。",
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each architecture, written once; the untied Llama in many shards."""
    made = {}
    for name in CONFIGS:
        made[name] = tmp_path_factory.mktemp(name)
        write_checkpoint(made[name], name, max_shard_size="20KB" if name == "llama" else "1GB")
    return made


class Watched:
    """A runner on the CPU, its scheduler, and the logits of each sampled row."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        sizes: dict[str, Any] = {"num_blocks": 64, "block_size": 4, "max_model_len": 96}
        config = EngineConfig(**{"model": str(folder), "device": "cpu"} | sizes | settings)
        self.said: list[str] = []
        self.runner = TorchRunner(config, self.said.append)
        self.scheduler = Scheduler(config, self.runner.tokenizer.eos_token_ids)
        self.logits: dict[tuple[Request, int], Any] = {}
        self.runner.model.register_forward_hook(self._keep)

    def _keep(self, module: Any, arguments: Any, logits: Any) -> None:
        for request, row in zip(arguments[0].sampling_requests, logits, strict=True):
            self.logits[request, request.num_tokens] = row.clone()

    def answer(self, *prompts: list[int], max_tokens: int = 12) -> list[Request]:
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        first = len(self.logits)
        requests = [Request(f"{first}-{at}", one, sampling) for at, one in enumerate(prompts)]
        for request in requests:
            self.scheduler.add(request)
        run_to_the_end(self.scheduler, self.runner)
        return requests

    def error(self, theirs: Any) -> float:
        """The largest difference to the logits of transformers, as a share of the largest."""
        worst = 0.0
        for request in {request for request, _ in self.logits}:
            with torch.inference_mode():
                expected = theirs(torch.tensor([request.token_ids])).logits[0]
            for (owner, num_tokens), row in self.logits.items():
                if owner is request:
                    wanted = expected[num_tokens - 1]
                    worst = max(worst, float((row - wanted).abs().max() / wanted.abs().max()))
        return worst


def prompt(length: int, first: int = 3) -> list[int]:
    return [3 + (first * 31 + 7 * at) % 290 for at in range(length)]


def whole(folder: Path) -> Watched:
    engine = Watched(folder)
    engine.answer(prompt(40), prompt(11, first=5))
    return engine


def chunked(folder: Path) -> Watched:
    engine = Watched(folder, max_num_batched_tokens=9)
    engine.answer(prompt(40), prompt(11, first=5))
    return engine


def after_a_prefix_hit(folder: Path) -> Watched:
    engine = Watched(folder)
    engine.answer(prompt(40))
    (again,) = engine.answer(prompt(40))
    assert again.num_cached_tokens >= 36
    return engine


def after_preemption(folder: Path) -> Watched:
    engine = Watched(folder, num_blocks=24, enable_prefix_caching=False)
    engine.answer(*(prompt(24, first=at) for at in range(3)), max_tokens=20)
    assert engine.scheduler.counters.preemptions > 0
    return engine


def after_a_swap(folder: Path) -> Watched:
    engine = Watched(folder, num_blocks=24, enable_prefix_caching=False, preemption="swap")
    engine.answer(*(prompt(24, first=at) for at in range(3)), max_tokens=20)
    assert engine.scheduler.counters.swapped_in_blocks > 0
    return engine


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "run", [whole, chunked, after_a_prefix_hit, after_preemption, after_a_swap]
)
def test_logits_equal_those_of_transformers(
    run: Callable[[Path], Watched], name: str, folders: dict[str, Path]
) -> None:
    engine = run(folders[name])
    assert len(engine.logits) >= 24
    assert engine.error(their_model(folders[name])) < 1e-4


def test_bfloat16_is_near(folders: dict[str, Path]) -> None:
    engine = Watched(folders["qwen3-tied"], dtype="bfloat16")
    engine.answer(prompt(40))
    assert 1e-4 < engine.error(their_model(folders["qwen3-tied"])) < 0.05


def test_the_padding_of_the_vocabulary_is_never_sampled(folders: dict[str, Path]) -> None:
    engine = Watched(folders["llama"])
    num_tokens = engine.runner.tokenizer.sampled_ids.stop
    assert num_tokens < VOCAB_SIZE

    def prefer_the_padding(module: Any, arguments: Any, logits: Any) -> None:
        logits[:, num_tokens:] = 1e4

    engine.runner.model.register_forward_hook(prefer_the_padding)
    (request,) = engine.answer(prompt(5))
    assert max(request.token_ids) < num_tokens


def test_loading_says_how_far_it_is(folders: dict[str, Path]) -> None:
    assert "100 %" in Watched(folders["llama"]).said[-1]


@pytest.fixture(scope="module")
def tokenizer(folders: dict[str, Path]) -> PretrainedTokenizer:
    checkpoint = read_checkpoint(folders["llama"], "float32")
    return PretrainedTokenizer(checkpoint, lambda: NOON)


@pytest.fixture(scope="module")
def theirs(folders: dict[str, Path]) -> Any:
    return oracle().AutoTokenizer.from_pretrained(folders["llama"])


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_tokens_equal_those_of_transformers(
    text: str, tokenizer: PretrainedTokenizer, theirs: Any
) -> None:
    assert tokenizer.encode(text) == theirs(text)["input_ids"]
    chat = [Message("system", "Be brief."), Message("user", text)]
    wanted = theirs.apply_chat_template(
        [{"role": role, "content": text} for role, text in chat],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert tokenizer.encode_chat(chat) == wanted


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_a_stream_of_tokens_makes_the_text(
    text: str, tokenizer: PretrainedTokenizer, theirs: Any
) -> None:
    ids = tokenizer.encode(text)[1:]
    pieces = list(map(tokenizer.text_stream(tokenizer.encode("Ω")), ids))
    assert len(pieces) < len(text.encode()), "some tokens have several bytes, some only a part"
    assert "".join(pieces) == theirs.decode(ids, skip_special_tokens=True)
    assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_that_are_no_text_become_replacement_characters_and_end(
    tokenizer: PretrainedTokenizer,
) -> None:
    lead = tokenizer.encode("\u00e9")[1]  # the first of two bytes
    text_of = tokenizer.text_stream([lead])
    pieces = [text_of(lead), text_of(lead), *map(text_of, tokenizer.encode("ab")[1:])]
    assert "".join(pieces).endswith("ab")


def test_ends_of_a_sequence_are_those_of_the_generation_config(
    tokenizer: PretrainedTokenizer,
) -> None:
    assert tokenizer.eos_token_ids == {1, 2}


def test_a_template_may_refuse_a_chat(tokenizer: PretrainedTokenizer) -> None:
    with pytest.raises(ChatError, match="no developers"):
        tokenizer.encode_chat([Message("developer", "hm")])


def test_templates_may_name_the_day_and_print_json(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders["qwen2"], tmp_path / "model")
    template = "{{ strftime_now('%d %B') }} {{ ['<é>'] | tojson }}"
    marked = f"{{% generation %}}{template}{{% endgeneration %}}"
    (folder / "chat_template.jinja").write_text(marked)
    tokenizer = PretrainedTokenizer(read_checkpoint(folder, "float32"), lambda: NOON)
    ids = tokenizer.encode_chat([Message("user", "hm")])
    assert "".join(map(tokenizer.text_stream([]), ids)) == '23 November ["<é>"]'


def test_the_context_is_the_checkpoints_as_far_as_the_cache_holds_it(
    folders: dict[str, Path],
) -> None:
    model = str(folders["llama"])
    assert choose_context(model, None, 1000) == 96
    assert choose_context(model, None, 64) == 64
    assert choose_context(model, 32, 1000) == 32
    assert choose_context("tiny", None, 64) == EngineConfig().max_model_len
    with pytest.raises(EngineConfigError, match=r"max_model_len \(97\) is beyond"):
        choose_context(model, 97, 1000)


def with_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def with_tensors(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return apply


def with_index(text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(text)


def cut_off(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def of_another_model(folder: Path) -> None:
    with_config(vocab_size=200)(folder)
    name = "model.embed_tokens.weight"
    with_tensors(lambda tensors: tensors.update({name: tensors[name][:200].clone()}))(folder)


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no Hugging Face checkpoint"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json: Input data"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors"),
        (with_index("[]"), "index.json: Expected `object`, got `array`"),
        (with_index('{"weight_map": {"a": 5}}'), "index.json: Expected `str`, got `int`"),
        (lambda folder: (folder / "chat_template.jinja").write_text("{% if %}"), "chat template"),
        (cut_off, "no whole safetensors file"),
        (of_another_model, "tokenizer of another model"),
        (with_config(eos_token_id=350), r"end with \[1, 350\]"),
        (with_config(architectures=["GPT2LMHeadModel"]), "architectures is GPT2LMHeadModel"),
        (with_config(architectures=None), "Expected `array`, got `null`"),
        (with_config(hidden_size="48"), r"Expected `int`, got `str` - at `\$.hidden_size`"),
        (with_config(hidden_act="gelu"), "hidden_act is gelu"),
        (with_config(num_key_value_heads=4), "num_key_value_heads is 4"),
        (with_config(use_sliding_window=True), "use_sliding_window is True"),
        (with_config(rope_parameters={"rope_type": "yarn", "factor": 2}), "rope_type is yarn"),
        (with_config(rope_parameters={"rope_type": "llama3"}), r"llama3: .*`factor`"),
        (with_config(quantization_config={"quant_method": "awq"}), "quantization_config is awq"),
        (with_config(vocab_size=10**30), "do not fit into the"),
        (with_config(num_hidden_layers=10**6), "do not fit into the"),
        (
            with_config(intermediate_size=81),
            r"mlp.gate_proj.weight of the shape \[81, 48\], not \[80, 48\]",
        ),
        (with_config(num_hidden_layers=3), "layers.2.self_attn.q_proj.weight; it is missing"),
        (with_config(num_hidden_layers=1), "no tensor model.layers.1.input_layernorm"),
        (with_tensors(lambda tensors: tensors.pop(NORM)), "model.norm.weight; it is missing"),
        (
            with_tensors(
                lambda tensors: tensors.update({NORM: tensors[NORM].to(torch.float8_e4m3fn)})
            ),
            "model.norm.weight is F8_E4M3",
        ),
    ],
)
def test_a_bad_folder_is_refused_in_one_sentence(
    spoil: Callable[[Path], Any], message: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders["llama-tied"], tmp_path / "model")
    if "end with" in message:
        (folder / "generation_config.json").unlink()
    spoil(folder)
    with pytest.raises(EngineConfigError, match=message) as refused:
        Watched(folder)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_number_of_weights_is_that_of_the_model(name: str, folders: dict[str, Path]) -> None:
    shape = read_checkpoint(folders[name], "float32").shape
    model = build_model(shape, 1, torch.device("cpu"))
    assert num_weights(shape) == sum(weight.numel() for weight in model.parameters())


def test_a_model_that_does_not_fit_into_memory_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(EngineConfigError, match="do not fit into the"):
        Watched(folders["llama"], num_blocks=10**11)


def test_the_limit_of_a_container_is_a_limit_of_memory(tmp_path: Path) -> None:
    on_cpu = torch.device("cpu")
    free = free_memory(on_cpu, tmp_path)  # of no container
    (tmp_path / "memory.stat").write_text("anon 900\ninactive_file 300\n")
    (tmp_path / "memory.current").write_text("1200\n")
    (tmp_path / "memory.max").write_text("5000\n")
    assert free_memory(on_cpu, tmp_path) == 4100 < free
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(on_cpu, tmp_path) > 4100
