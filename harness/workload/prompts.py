"""Readable prompts of an exact size, different for every request: pure, from a seed and a salt.

Sizes are in bytes of ASCII: the reference engine's tokenizer makes one token of each byte. On
another engine a prompt has fewer tokens than bytes; the row keeps the count of the server's usage.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import linear_regression
from typing import Final

_TEXT: Final = (
    "the river carried morning light past quiet houses while somebody counted slow boats and "
    "another person wrote letters about weather bread music stone bridges old maps patient "
    "gardens winter trains distant bells paper lanterns honest questions small kitchens salt "
    "wind northern harbours borrowed books forgotten keys gentle arguments long evenings"
)
WORDS: Final = tuple(_TEXT.split())


def prompt(
    *, seed: int, user: int, n: int, num_bytes: int, shared_bytes: int = 0, salt: str = ""
) -> str:
    """Exactly `num_bytes` ASCII characters. All requests of a seed share the first `shared_bytes`.
    Then comes a number of its own, so that no prefix cache holds more of it; with another `salt` a
    cache holds nothing of it at all."""
    rng = random.Random(f"{salt}{seed}/prefix")
    shared = _filled(f"{rng.getrandbits(40):010x}, the house rules:", rng, shared_bytes)
    rng = random.Random(f"{salt}{seed}/{user}/{n}/prompt")
    return shared + _filled(f"{rng.getrandbits(40):010x}, a letter:", rng, num_bytes - shared_bytes)


def paged_prompt(
    pages: Sequence[int], *, seed: int, page_bytes: float, num_bytes: int, salt: str = ""
) -> str:
    """Exactly `num_bytes` ASCII characters, made of numbered pages of one size; the last fills what
    is left. Two prompts begin alike as far as their pages are equal."""
    texts = []
    begin = 0
    for place, page in enumerate(pages, start=1):
        end = num_bytes if place == len(pages) else min(round(place * page_bytes), num_bytes)
        if begin < end:
            rng = random.Random(f"{salt}{seed}/page/{page}")
            texts.append(_filled(f"{rng.getrandbits(40):010x}, a page:", rng, end - begin))
        begin = end
    return "".join(texts)


def _filled(beginning: str, rng: random.Random, num_bytes: int) -> str:
    parts = [beginning]
    length = len(beginning)
    while length < num_bytes:
        word = rng.choice(WORDS)
        parts.append(word)
        length += 1 + len(word)
    return " ".join(parts)[:num_bytes]


@dataclass(frozen=True, kw_only=True)
class PromptScale:
    """tokens = `overhead_tokens` (a chat template's) + bytes / `bytes_per_token`. `samples`: the
    measured pairs (bytes, tokens)."""

    bytes_per_token: float = 1.0
    overhead_tokens: float = 0.0
    samples: list[tuple[int, int]] = field(default_factory=list)

    def num_bytes(self, tokens: int) -> int:
        return max(1, round((tokens - self.overhead_tokens) * self.bytes_per_token))


BYTES_ARE_TOKENS: Final = PromptScale()


def fit_scale(samples: Sequence[tuple[int, int]]) -> PromptScale | None:
    """The line of least squares; None with fewer than two sizes, or if tokens do not grow with the
    bytes."""
    if len({size for size, _ in samples}) < 2:
        return None
    sizes, tokens = zip(*samples, strict=True)
    slope, intercept = linear_regression(sizes, tokens)
    # Not even one token between the shortest and the longest?
    if slope * (max(sizes) - min(sizes)) < 0.5:
        return None
    return PromptScale(bytes_per_token=1 / slope, overhead_tokens=intercept, samples=list(samples))
