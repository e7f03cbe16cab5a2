"""From a request's body to a `Generation`: token ids, sampling, and the form of the answer.

A refusal names the field as the client spelled it.
"""

import re
from itertools import chain
from typing import Final, TypeVar

import msgspec

from reference_engine.api.bodies import (
    NEUTRAL,
    Body,
    ChatBody,
    CompletionBody,
    EarlyStopBody,
    StreamOptions,
)
from reference_engine.api.schemas import ApiError
from reference_engine.config import EngineConfig
from reference_engine.core.early_stop import EarlyStopping, LowConfidence, Repetition, Task
from reference_engine.core.request import Sampling
from reference_engine.model.tokenizer import ChatError, Message, Tokenizer

TOO_LONG: Final = "context_length_exceeded"  # the code of a refusal
MAX_PROMPT_SHOWN: Final = 4096  # characters; most are a byte each
_COMPLETION_DEFAULT_TOKENS: Final = 16  # OpenAI's default for /v1/completions
_MAX_SHOWN: Final = 300  # characters of what a client sent that an error repeats
_FIELD: Final = re.compile(r"unknown field `(\w{1,64})`$|required field `(\w+)`$|`\$\.(\w+)[^`]*`$")


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """A request within the engine's limits, for `n` answers.

    A smaller `priority` is more important. The request is ended `deadline_s` after its arrival,
    complete or not. The client has promised a ping at least every `keep_alive_s`. `prompt` is what
    can be shown of the prompt, at most MAX_PROMPT_SHOWN characters. With a `tool` the answer is the
    arguments of its call.
    """

    chat: bool
    model: str
    prompt_token_ids: list[int]
    sampling: Sampling
    stream: bool
    include_usage: bool
    continuous_usage: bool
    n: int = 1
    priority: int = 0
    deadline_s: float | None = None
    keep_alive_s: float | None = None
    prompt: str = ""
    tool: str | None = None


def read_completion(data: bytes, config: EngineConfig, tokenizer: Tokenizer) -> Generation:
    body = decode_body(data, CompletionBody)
    check_model(body.model, config)
    given = _one_prompt(body.prompt)
    prompt = tokenizer.encode(given) if isinstance(given, str) else given
    _check_prompt(prompt, "prompt", config)
    if any(not 0 <= token < tokenizer.vocab_size for token in prompt):
        raise _wrong("prompt", f"token ids go from 0 to {tokenizer.vocab_size - 1}")
    max_tokens = _COMPLETION_DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
    _check_neutral(body)
    _check_length("prompt", prompt, "max_tokens", max_tokens, config)
    shown = given if isinstance(given, str) else str(given)
    return _generation(body, shown, prompt, max_tokens, config, tokenizer.vocab_size)


def read_chat(data: bytes, config: EngineConfig, tokenizer: Tokenizer) -> Generation:
    body = decode_body(data, ChatBody)
    check_model(body.model, config)
    messages = [Message(one.role, one.text) for one in body.messages]
    try:
        prompt = tokenizer.encode_chat(messages)
    except ChatError as error:
        raise _wrong("messages", str(error)) from error
    _check_prompt(prompt, "messages", config)
    wanted, name = body.max_completion_tokens, "max_completion_tokens"
    if wanted is None:  # the newer name goes first
        wanted, name = body.max_tokens, "max_tokens"
    max_tokens = config.max_model_len - len(prompt) if wanted is None else wanted
    _check_neutral(body)
    _check_length("messages", prompt, name, max_tokens, config)
    shown = "\n".join(f"{one.role}: {one.text}" for one in messages)
    return _generation(body, shown, prompt, max_tokens, config, tokenizer.vocab_size)


def check_model(model: str, config: EngineConfig) -> None:
    if model != config.model:
        raise ApiError(
            404,
            f"the model `{model[:_MAX_SHOWN]}` does not exist; this engine serves `{config.model}`",
            param="model",
            code="model_not_found",
        )


_StructT = TypeVar("_StructT")


def decode_body(data: bytes, kind: type[_StructT]) -> _StructT:
    try:
        return msgspec.json.decode(data, type=kind)
    except UnicodeDecodeError as error:
        raise ApiError(400, f"request body: not UTF-8 ({error.reason})") from error
    except (msgspec.DecodeError, RecursionError) as error:
        text = str(error)
        if text == "Input data was truncated":  # msgspec's words for an unpaired surrogate, too
            text = "JSON that ends too early, or half of a surrogate pair"
        found = _FIELD.search(text)
        field = next(filter(None, found.groups()), None) if found else None
        shown = text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."
        raise ApiError(400, f"request body: {shown}", param=field) from error


def _one_prompt(prompt: str | list[int | str | list[int]]) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    token_ids = [item for item in prompt if isinstance(item, int)]
    if len(token_ids) == len(prompt):
        return token_ids
    [first, *others] = prompt
    if others or isinstance(first, int):
        raise _wrong("prompt", f"one prompt a request, not a list of {len(prompt)}")
    return first


def _check_prompt(prompt: list[int], name: str, config: EngineConfig) -> None:
    if not prompt:
        raise _wrong(name, "must not be empty")
    if len(prompt) >= config.max_model_len:
        has = f"the prompt has {len(prompt)}, which leaves none for an answer"
        raise _too_long(name, has, config)


def _check_length(
    prompt_name: str, prompt: list[int], name: str, max_tokens: int, config: EngineConfig
) -> None:
    if len(prompt) + max_tokens > config.max_model_len:
        has = f"the prompt ({prompt_name}) has {len(prompt)} and {max_tokens} more are asked for"
        raise _too_long(name, has, config)


def _generation(
    body: Body,
    shown: str,
    prompt: list[int],
    max_tokens: int,
    config: EngineConfig,
    vocab_size: int,
) -> Generation:
    options = body.stream_options or StreamOptions()
    n = body.n or 1
    if body.best_of not in (None, n):
        raise _wrong("best_of", f"this engine supports only n, which is {n}")
    return Generation(
        chat=isinstance(body, ChatBody),
        model=body.model,
        prompt_token_ids=prompt,
        sampling=Sampling(
            max_tokens=max_tokens,
            temperature=1.0 if body.temperature is None else body.temperature,
            seed=_seed(body.seed, config.seed, prompt),
            ignore_eos=bool(body.ignore_eos),
            stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
            early_stopping=_early_stopping(body, vocab_size),
        ),
        stream=bool(body.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
        n=n,
        priority=body.priority or 0,
        deadline_s=body.deadline_s,
        keep_alive_s=body.keep_alive_s,
        prompt=shown[:MAX_PROMPT_SHOWN],
        tool=_tool_called(body),
    )


def _tool_called(body: Body) -> str | None:
    if not isinstance(body, ChatBody) or body.tool_choice != "required":
        return None
    if not body.tools:
        raise _wrong("tool_choice", "`required` needs a tool in `tools`")
    return body.tools[0].function.name


def _early_stopping(body: Body, vocab_size: int) -> EarlyStopping | None:
    wanted = body.early_stop or EarlyStopBody()
    stopping = EarlyStopping(
        stop_token_ids=tuple(body.stop_token_ids or ()),
        stop_token_sequences=tuple(map(tuple, body.stop_token_sequences or ())),
        repetition=_condition(wanted.repetition, Repetition),
        low_confidence=_condition(wanted.low_confidence, LowConfidence),
        task=wanted.task,
        labels=tuple(wanted.labels or ()),
    )
    for name, tokens in (
        ("stop_token_ids", stopping.stop_token_ids),
        ("stop_token_sequences", chain(*stopping.stop_token_sequences)),
    ):
        if any(token >= vocab_size for token in tokens):
            raise _wrong(name, f"token ids go from 0 to {vocab_size - 1}")
    if stopping.labels and stopping.task is not Task.CLASSIFICATION:
        raise _wrong("early_stop", 'labels need the task "classification"')
    loops = stopping.repetition
    if loops and loops.min_pattern > loops.max_pattern:
        raise _wrong("early_stop", "repetition: min_pattern is above max_pattern")
    if loops and loops.min_pattern * (loops.repeats + 1) > loops.window:
        raise _wrong("early_stop", "repetition: the window holds no pattern and its copies")
    return None if stopping == EarlyStopping() else stopping


def _condition(wanted: object, kind: type[_StructT]) -> _StructT | None:
    """`true` stands for the defaults."""
    if isinstance(wanted, msgspec.Struct):
        return kind(**msgspec.structs.asdict(wanted))
    return kind() if wanted else None


def _seed(seed: int | None, engine_seed: int, prompt: list[int]) -> int:
    """A request without a seed gets one from engine and prompt, so equal requests agree."""
    return hash((engine_seed, *prompt)) & (2**63 - 1) if seed is None else seed


def _check_neutral(body: Body) -> None:
    for name, neutral in NEUTRAL[type(body)].items():
        value = getattr(body, name)
        if value is not None and not any(_is_same(value, other) for other in neutral):
            only = " or ".join(msgspec.json.encode(value).decode() for value in neutral)
            raise _wrong(name, f"this engine supports only {only}")


def _is_same(value: object, other: object) -> bool:
    """Equal as JSON, where true is not 1 and false is not 0."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _too_long(name: str, has: str, config: EngineConfig) -> ApiError:
    text = f"{name}: this model's context holds {config.max_model_len} tokens; {has}"
    return ApiError(400, text, param=name, code=TOO_LONG)


def _wrong(name: str, why: str) -> ApiError:
    return ApiError(400, f"{name}: {why}", param=name)
