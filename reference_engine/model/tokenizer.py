"""From text to tokens and back: the protocol, and the tokenizer of the random models.

That one is byte-level, and its output is always readable:

    0 <pad>   1 <s>   2 </s>   |   3..258 the 256 bytes   |   259.. words made of syllables

A prompt becomes its UTF-8 bytes, one token each. The model samples words and </s> only.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Final, NamedTuple, Protocol

EOS_TOKEN_ID: Final = 2
_FIRST_BYTE: Final = 3
FIRST_WORD: Final = _FIRST_BYTE + 256
_SYLLABLES: Final = [a + b for a, b in product("bdfgklmnprstvz", "aeiou")]

# The text that each next token of one answer adds; "" while a character is incomplete.
TextStream = Callable[[int], str]


class Message(NamedTuple):
    role: str
    text: str


class Tokenizer(Protocol):
    """Ids go from 0 to `vocab_size - 1`; `sampled_ids` and ends of a sequence can be sampled."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def sampled_ids(self) -> range: ...

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The prompt up to where the assistant's answer begins. Raises ChatError."""

    def text_stream(self, prompt_token_ids: list[int], /) -> TextStream: ...


class ChatError(ValueError):
    """The model has no chats, or none of this form."""


class WordTokenizer:
    eos_token_ids = frozenset({EOS_TOKEN_ID})

    def __init__(self, vocab_size: int, more_words: Sequence[str] = ()) -> None:
        """`more_words` have the ids from `vocab_size` on."""
        if vocab_size <= FIRST_WORD:
            raise ValueError(f"a vocabulary has at least {FIRST_WORD + 1} tokens")
        words = [f" {a}{b}" for a, b in product(_SYLLABLES, _SYLLABLES)]
        # A stride coprime to the number of words, so that neighbouring ids do not look alike.
        self._words = [words[i * 1301 % len(words)] for i in range(vocab_size - FIRST_WORD)]
        self._words += more_words
        self.vocab_size = vocab_size + len(more_words)
        self.sampled_ids = range(FIRST_WORD, self.vocab_size)

    def encode(self, text: str) -> list[int]:
        return encode_bytes(text)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        lines = [f"{role}: {text}\n" for role, text in messages]
        return encode_bytes("".join(lines) + "assistant:")

    def text_of(self, token_id: int) -> str:
        return self._words[token_id - FIRST_WORD] if token_id >= FIRST_WORD else ""

    def text_stream(self, _: list[int], /) -> TextStream:
        return self.text_of


def encode_bytes(text: str) -> list[int]:
    """One token a byte; lone surrogates become question marks."""
    return [_FIRST_BYTE + byte for byte in text.encode("utf-8", errors="replace")]
