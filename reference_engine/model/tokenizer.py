"""A byte-level tokenizer whose output is always readable.

    0 <pad>   1 <s>   2 </s>   |   3..258 the 256 bytes   |   259.. words made of syllables

A prompt becomes its UTF-8 bytes, one token each. The model samples words and </s> only.
"""

from collections.abc import Sequence
from itertools import product
from typing import Final

EOS_TOKEN_ID: Final = 2
_FIRST_BYTE: Final = 3
FIRST_WORD: Final = _FIRST_BYTE + 256
_SYLLABLES: Final = [a + b for a, b in product("bdfgklmnprstvz", "aeiou")]


class Tokenizer:
    def __init__(self, vocab_size: int, more_words: Sequence[str] = ()) -> None:
        """`more_words` have the ids from `vocab_size` on."""
        if vocab_size <= FIRST_WORD:
            raise ValueError(f"a vocabulary has at least {FIRST_WORD + 1} tokens")
        words = [f" {a}{b}" for a, b in product(_SYLLABLES, _SYLLABLES)]
        # A stride coprime to the number of words, so that neighbouring ids do not look alike.
        self._words = [words[i * 1301 % len(words)] for i in range(vocab_size - FIRST_WORD)]
        self._words += more_words
        self.vocab_size = vocab_size + len(more_words)

    def encode(self, text: str) -> list[int]:
        return encode_bytes(text)

    def text_of(self, token_id: int) -> str:
        return self._words[token_id - FIRST_WORD] if token_id >= FIRST_WORD else ""


def encode_bytes(text: str) -> list[int]:
    """One token a byte; lone surrogates become question marks."""
    return [_FIRST_BYTE + byte for byte in text.encode("utf-8", errors="replace")]
