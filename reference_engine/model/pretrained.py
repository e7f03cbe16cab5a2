"""A checkpoint's tokenizer: tokenizer.json, and the template that makes a prompt of a chat.

The template is rendered as transformers does it, in Jinja's sandbox:
https://huggingface.co/docs/transformers/chat_templating
"""

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec
import tokenizers
from jinja2 import Template, TemplateError
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers.decoders import DecodeStream

from reference_engine.config import EngineConfigError
from reference_engine.model.checkpoint import Checkpoint, read_json
from reference_engine.model.tokenizer import ChatError, Message, TextStream

_PRIMING: Final = 8  # tokens of the prompt that decide how the answer's first one is written


class PretrainedTokenizer:
    def __init__(self, checkpoint: Checkpoint, now: Callable[[], datetime]) -> None:
        """Raises EngineConfigError. `now` is for templates that name the day."""
        path = checkpoint.folder / "tokenizer.json"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower type
            raise EngineConfigError(f"{path}: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        settings = _Settings.read(checkpoint.folder)
        self._special = settings.special_tokens()
        self._template = _template(checkpoint.folder, settings, now)
        self.vocab_size = checkpoint.shape.vocab_size
        num_tokens = 1 + max(self._tokenizer.get_vocab().values(), default=-1)
        # The rest of the model's vocabulary pads it to a round number.
        self.sampled_ids = range(num_tokens)
        end = self._tokenizer.token_to_id(self._special.get("eos_token", ""))
        self.eos_token_ids = checkpoint.eos_token_ids | ({end} if end is not None else set())
        if num_tokens > self.vocab_size or not self.eos_token_ids.issubset(self.sampled_ids):
            raise EngineConfigError(
                f"{path}: the tokenizer of another model: its ids go to {num_tokens - 1}, the "
                f"model's to {self.vocab_size - 1}, and its sequences end with "
                f"{sorted(self.eos_token_ids)}"
            )

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        if self._template is None:
            raise ChatError("this model has no chat template; use /v1/completions")
        chat = [{"role": role, "content": text} for role, text in messages]
        try:
            prompt = self._template.render(
                messages=chat,
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special,
            )
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise ChatError(f"the model's chat template refuses them: {error}") from error
        ids: list[int] = self._tokenizer.encode(prompt, add_special_tokens=False).ids
        return ids

    def text_stream(self, prompt_token_ids: list[int], /) -> TextStream:
        """Special tokens have no text. An incomplete character is never shown."""
        stream = DecodeStream(ids=prompt_token_ids[-_PRIMING:], skip_special_tokens=True)

        def text_of(token_id: int) -> str:
            nonlocal stream
            try:
                return stream.step(self._tokenizer, token_id) or ""
            except Exception:  # noqa: BLE001 the library's only type: text that it has shown changes
                stream = DecodeStream(skip_special_tokens=True)
                return stream.step(self._tokenizer, token_id) or ""

        return text_of


class _Settings(msgspec.Struct):
    """tokenizer_config.json. A token is its text, or an object with it."""

    chat_template: str | list[dict[str, str]] | None = None
    bos_token: Any = None
    eos_token: Any = None
    unk_token: Any = None
    pad_token: Any = None

    @classmethod
    def read(cls, folder: Path) -> "_Settings":
        path = folder / "tokenizer_config.json"
        return read_json(path, cls) if path.exists() else cls()

    def special_tokens(self) -> dict[str, str]:
        found = {}
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            token = getattr(self, name)
            text = token.get("content") if isinstance(token, dict) else token
            if isinstance(text, str):
                found[name] = text
        return found


def _template(folder: Path, settings: _Settings, now: Callable[[], datetime]) -> Template | None:
    """A template in its own file goes first; of several templates, the one named default."""
    path, source = folder / "chat_template.jinja", settings.chat_template
    if isinstance(source, list):
        named = {one.get("name"): one.get("template") for one in source}
        source = named.get("default")
    try:
        if path.exists():
            source = path.read_text()
        return None if source is None else _environment(now).from_string(source)
    except (TemplateError, OSError, ValueError) as error:
        raise EngineConfigError(f"{folder}: its chat template: {error}") from error


class _Generation(Extension):
    """`{% generation %}` marks what training learns; a prompt takes it as it is."""

    tags = {"generation"}  # noqa: RUF012 as the base class has it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: object, **settings: Any) -> str:
    """JSON without Jinja's escapes for HTML."""
    return json.dumps(value, **{"ensure_ascii": False, **settings})
