"""How many bytes make how many tokens on a server: a straight line through what it counted; pure.

The bundled engine counts bytes. Every other tokenizer is unknown here, so a few prompts are sent
before a load and the server's own count of them decides how long the load's prompts are to be.
"""

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np


class PromptScale(msgspec.Struct, kw_only=True, frozen=True):
    """tokens = `overhead_tokens` + bytes / `bytes_per_token`.

    The overhead is what the server adds itself (a chat template). `samples` are the (bytes, tokens)
    pairs that it rests on.
    """

    bytes_per_token: float = 1.0
    overhead_tokens: float = 0.0
    samples: list[tuple[int, int]] = []

    def num_bytes(self, tokens: int) -> int:
        """The size of a prompt that should be so many tokens; at least one byte."""
        return max(1, round((tokens - self.overhead_tokens) * self.bytes_per_token))


BYTES_ARE_TOKENS: Final = PromptScale()


def fit_scale(samples: Sequence[tuple[int, int]]) -> PromptScale | None:
    """The line of least squares; None where more bytes do not make more tokens, or too few tell."""
    if len({size for size, _ in samples}) < 2:
        return None
    sizes, tokens = np.array(samples, dtype=float).T
    slope, intercept = np.polyfit(sizes, tokens, 1)
    if slope * np.ptp(sizes) < 0.5:  # not even one token between the shortest and the longest
        return None
    return PromptScale(
        bytes_per_token=float(1 / slope),
        overhead_tokens=float(intercept),
        samples=list(samples),
    )
