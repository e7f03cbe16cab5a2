"""From text to tokens and back: the protocol, and the tokenizer of the random models.

That one is byte-level, and its output is always readable:

    0 <pad>   1 <s>   2 </s>   |   3..258 the 256 bytes   |   259.. words made of syllables

A prompt becomes its UTF-8 bytes, one token each. The model samples words and </s> only. In a chat
the assistant's words become the tokens again that they were, so that the next turn's prompt begins
with the tokens of the last prompt and of its answer.
"""

import re
from collections.abc import Callable, Sequence
from itertools import product
from typing import Final, NamedTuple, Protocol

EOS_TOKEN_ID: Final = 2
_FIRST_BYTE: Final = 3
FIRST_WORD: Final = _FIRST_BYTE + 256
_WORD_OR_REST: Final = re.compile(r" [a-z]+(?![a-z])|[^ ]+| ")
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
        self._ids = {word: FIRST_WORD + at for at, word in enumerate(self._words)}
        self.vocab_size = vocab_size + len(more_words)
        self.sampled_ids = range(FIRST_WORD, self.vocab_size)

    def encode(self, text: str) -> list[int]:
        return encode_bytes(text)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        tokens = list[int]()
        for role, text in messages:
            if role == "assistant":
                tokens += [*encode_bytes("assistant:"), *self._encode_answer(text)]
            else:
                tokens += encode_bytes(f"{role}: {text}")
            tokens += encode_bytes("\n")
        return tokens + encode_bytes("assistant:")

    def _encode_answer(self, text: str) -> list[int]:
        """Words and the spaces before them as the model says them, all else as bytes."""
        parts = _WORD_OR_REST.findall(text if text.startswith(" ") else f" {text}")
        found = ((part, self._ids.get(part)) for part in parts)
        return [
            token
            for part, word in found
            for token in (encode_bytes(part) if word is None else [word])
        ]

    def text_of(self, token_id: int) -> str:
        return self._words[token_id - FIRST_WORD] if token_id >= FIRST_WORD else ""

    def text_stream(self, _: list[int], /) -> TextStream:
        return self.text_of


def encode_bytes(text: str) -> list[int]:
    """One token a byte; lone surrogates become question marks."""
    return [_FIRST_BYTE + byte for byte in text.encode("utf-8", errors="replace")]
