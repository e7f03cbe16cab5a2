"""What an event of a stream says, and the quick reader of it: typed, for the shape of nearly every
token. It skips fields that are not declared here without building them, and runs for every token.
Where it finds no text, or fails, `harness.client.loose` takes the event apart.
"""

from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec

DONE: Final = b"[DONE]"
ABORT: Final = "abort"  # vLLM's finish reason of a request that was cancelled
EXPIRED: Final = "client_timeout"  # the bundled engine's reason: the request's deadline passed
MAX_CHARS: Final = 300  # of a server's own words, which go into rows and files

LARGEST_COUNT: Final = 2**31 - 1  # of tokens
LARGEST_ANSWER: Final = 1023  # number of an answer
Count = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_COUNT)]
AnswerNumber = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_ANSWER)]
Reason = Annotated[str, msgspec.Meta(max_length=MAX_CHARS)]


class TokenDetails(msgspec.Struct):
    reasoning_tokens: Count | None = None


class PromptDetails(msgspec.Struct):
    cached_tokens: Count | None = None


class UsageCounts(msgspec.Struct):
    """Token counts; with continuous usage, of the answer so far."""

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    total_tokens: Count | None = None
    reasoning_tokens: Count | None = None
    completion_tokens_details: TokenDetails | None = None
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        details = self.prompt_tokens_details
        return None if details is None else details.cached_tokens

    @property
    def reasoning(self) -> int:
        """The tokens of reasoning in `completion_tokens`. Some servers count them apart: the total
        is then the sum of all three."""
        details = self.completion_tokens_details
        reasoning = (None if details is None else details.reasoning_tokens) or self.reasoning_tokens
        if not reasoning or reasoning > (completion := self.completion_tokens or 0):
            return 0
        if self.prompt_tokens is None or self.total_tokens is None:
            return reasoning
        is_apart = self.total_tokens >= self.prompt_tokens + completion + reasoning
        return 0 if is_apart else reasoning


class Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct):
    function: Function | None = None

    def shown(self) -> str:
        function = self.function or Function()
        return f"{function.name or ''}{function.arguments or ''}"


class Delta(msgspec.Struct):
    """The text that a chat chunk adds, or a whole message. Reasoning is generated text too."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None

    def all_but_content(self) -> str:
        calls = "".join(call.shown() for call in self.tool_calls or ())
        return f"{self.reasoning_content or self.reasoning or ''}{calls}"


class Choice(msgspec.Struct):
    """More of one answer, or the whole of it: `text` in completions; in chat `delta`, `message`."""

    index: AnswerNumber = 0
    text: str | None = None
    delta: Delta | None = None
    message: Delta | None = None
    finish_reason: Reason | None = None
    token_ids: list[Any] | None = None

    def has_text(self) -> bool:
        if self.text:
            return True
        delta = self.delta or self.message
        if delta is None:
            return False
        if delta.content or delta.reasoning_content or delta.reasoning:
            return True
        return delta.tool_calls is not None and any(call.shown() for call in delta.tool_calls)

    def shown(self) -> str:
        """Together sends each text twice: as `text` and in the delta."""
        delta = self.delta or self.message or Delta()
        own = "" if self.text == delta.content else self.text or ""
        return f"{own}{delta.all_but_content()}{delta.content or ''}"

    @property
    def is_call(self) -> bool:
        delta = self.delta or self.message
        return delta is not None and any(call.shown() for call in delta.tool_calls or ())

    @property
    def is_reasoning(self) -> bool:
        """Text has come, and none of it is the answer itself."""
        delta = self.delta or self.message
        return not self.text and delta is not None and not delta.content and self.has_text()


class CancellationReason(msgspec.Struct):
    reason: Reason | None = None


class Chunk(msgspec.Struct):
    choices: list[Choice] = []
    usage: UsageCounts | None = None
    error: Any = None
    cancellation_info: CancellationReason | None = None


class Look(Chunk):
    """What the thorough reader found. `error`: the server's words; `is_plain`: as plain text, which
    belongs to no event. `is_done`: the stream says that it has ended, as by `[DONE]`; `ends`: by
    another word, which text may follow. `unread`: the data that made no sense, shortened, and why.
    `notice`: a message that is neither an error nor text of the answer. `repeats`: the choices'
    messages are the whole answer once more, if it had text before. `response_id`: of a whole
    response, by which a server may have kept it."""

    is_done: bool = False
    ends: bool = False
    unread: str | None = None
    notice: str | None = None
    is_plain: bool = False
    repeats: bool = False
    response_id: str | None = None


# Decoding an event of the two older dialects raises ValueError (of several kinds) for invalid
# UTF-8, JSON or fields, and RecursionError for endless nesting.
NONSENSE: Final = (ValueError, RecursionError)
decode_chunk: Final[Callable[[bytes], Chunk]] = msgspec.json.Decoder(Chunk).decode
