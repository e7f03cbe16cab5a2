"""OpenAI's request bodies: what is accepted, what it means, and what is refused by name.

A body becomes a `Generation`: token ids, sampling, and how the answer is wanted. Fields that this
engine does not implement are accepted only with the value that changes nothing.
"""

from typing import Any, Final, TypeVar

import msgspec

from reference_engine.config import EngineConfig
from reference_engine.frontend.errors import ApiError
from reference_engine.model.tokenizer import Tokenizer
from reference_engine.request import Sampling

MAX_BODY_BYTES: Final = 1024 * 1024
MAX_STOP_STRINGS: Final = 4
MAX_STOP_BYTES: Final = 256
MAX_TEMPERATURE: Final = 2.0
_COMPLETION_DEFAULT_TOKENS: Final = 16  # OpenAI's default for /v1/completions
_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "n": (1, None),
    "best_of": (1, None),
    "echo": (False, None),
    "logprobs": (False, None),
    "top_p": (1, None),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "suffix": (None, ""),
    "logit_bias": (None, {}),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "top_logprobs": (None, 0),
    "response_format": (None, {"type": "text"}),
}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What both endpoints share."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = False
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    n: Any = None
    best_of: Any = None
    echo: Any = None
    logprobs: Any = None
    top_p: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    suffix: Any = None
    logit_bias: Any = None
    tools: Any = None
    tool_choice: Any = None
    top_logprobs: Any = None
    response_format: Any = None


class CompletionBody(Body):
    prompt: str | list[int]


class TextPart(msgspec.Struct, tag="text"):
    text: str


class ChatMessage(msgspec.Struct):
    role: str
    content: str | list[TextPart] | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class ChatBody(Body):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to be generated, checked against the engine's limits."""

    chat: bool
    model: str
    prompt_token_ids: list[int]
    sampling: Sampling
    stream: bool
    include_usage: bool
    continuous_usage: bool


def read_completion(data: bytes, config: EngineConfig, tokenizer: Tokenizer) -> Generation:
    """Body of /v1/completions. Raises ApiError."""
    body = _decode(data, CompletionBody)
    if isinstance(body.prompt, str):
        prompt = tokenizer.encode(body.prompt)
    else:
        prompt = body.prompt
        if any(not 0 <= token < tokenizer.vocab_size for token in prompt):
            raise ApiError(
                400, f"prompt: token ids go from 0 to {tokenizer.vocab_size - 1}", param="prompt"
            )
    max_tokens = _COMPLETION_DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    return _generation(body, prompt, max_tokens, config, chat=False)


def read_chat(data: bytes, config: EngineConfig, tokenizer: Tokenizer) -> Generation:
    """Body of /v1/chat/completions. Raises ApiError. Default length: what the context holds."""
    body = _decode(data, ChatBody)
    if not body.messages:
        raise ApiError(400, "messages: at least one message is needed", param="messages")
    lines = [f"{message.role}: {message.text}\n" for message in body.messages]
    prompt = tokenizer.encode("".join(lines) + "assistant:")
    wanted = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    max_tokens = config.max_model_len - len(prompt) if wanted is None else wanted
    return _generation(body, prompt, max_tokens, config, chat=True)


_BodyT = TypeVar("_BodyT", bound=Body)


def _decode(data: bytes, kind: type[_BodyT]) -> _BodyT:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"request body: {error}") from error


def _generation(
    body: Body, prompt: list[int], max_tokens: int, config: EngineConfig, *, chat: bool
) -> Generation:
    check_model(body.model, config)
    _check_neutral(body)
    _check_lengths(len(prompt), max_tokens, config.max_model_len)
    options = body.stream_options or StreamOptions()
    return Generation(
        chat=chat,
        model=body.model,
        prompt_token_ids=prompt,
        sampling=Sampling(
            max_tokens=max_tokens,
            temperature=_checked_temperature(body.temperature),
            seed=_checked_seed(body.seed, config.seed, prompt),
            ignore_eos=bool(body.ignore_eos),
            stop=_checked_stop(body.stop),
        ),
        stream=bool(body.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
    )


def check_model(model: str, config: EngineConfig) -> None:
    """Raises ApiError 404 for a model that this engine does not serve."""
    if model != config.model:
        raise ApiError(
            404,
            f"the model `{model}` does not exist; this engine serves `{config.model}`",
            param="model",
            code="model_not_found",
        )


def _check_neutral(body: Body) -> None:
    for name, neutral in _NEUTRAL.items():
        if (value := getattr(body, name)) is not None and value not in neutral:
            only = msgspec.json.encode(neutral[0]).decode()
            raise ApiError(400, f"{name}: this engine supports only {only}", param=name)


def _check_lengths(num_prompt_tokens: int, max_tokens: int, max_model_len: int) -> None:
    if num_prompt_tokens == 0:
        raise ApiError(400, "prompt: must not be empty", param="prompt")
    if num_prompt_tokens >= max_model_len:
        raise ApiError(
            400,
            f"this model's context holds {max_model_len} tokens; the prompt has "
            f"{num_prompt_tokens}, which leaves none for an answer",
            param="prompt",
            code="context_length_exceeded",
        )
    if max_tokens < 1:
        raise ApiError(400, f"max_tokens: must be at least 1, not {max_tokens}", param="max_tokens")
    if num_prompt_tokens + max_tokens > max_model_len:
        raise ApiError(
            400,
            f"this model's context holds {max_model_len} tokens; the prompt has "
            f"{num_prompt_tokens} and max_tokens asks for {max_tokens} more",
            param="max_tokens",
            code="context_length_exceeded",
        )


def _checked_temperature(temperature: float | None) -> float:
    if temperature is None:
        return 1.0
    if not 0.0 <= temperature <= MAX_TEMPERATURE:
        raise ApiError(
            400, f"temperature: from 0 to {MAX_TEMPERATURE}, not {temperature}", param="temperature"
        )
    return temperature


def _checked_seed(seed: int | None, engine_seed: int, prompt: list[int]) -> int:
    """Without a seed, the engine's and the prompt are it: equal requests get equal answers."""
    if seed is None:
        return hash((engine_seed, *prompt)) & (2**63 - 1)
    if not -(2**63) <= seed < 2**63:
        raise ApiError(400, "seed: a 64-bit integer", param="seed")
    return seed


def _checked_stop(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > MAX_STOP_STRINGS:
        raise ApiError(400, f"stop: at most {MAX_STOP_STRINGS} strings", param="stop")
    if any(not 1 <= len(text.encode(errors="replace")) <= MAX_STOP_BYTES for text in strings):
        raise ApiError(400, f"stop: each string has 1 to {MAX_STOP_BYTES} bytes", param="stop")
    return strings
