"""Readable prompts of an exact size, different for every request: pure, from a seed.

Sizes are in bytes of ASCII: the reference engine's tokenizer makes one token of each byte. For
another engine a prompt is shorter in tokens than planned; the row keeps what its usage said.
"""

import random
from typing import Final

_TEXT: Final = (
    "the river carried morning light past quiet houses while somebody counted slow boats and "
    "another person wrote letters about weather bread music stone bridges old maps patient "
    "gardens winter trains distant bells paper lanterns honest questions small kitchens salt "
    "wind northern harbours borrowed books forgotten keys gentle arguments long evenings"
)
_WORDS: Final = tuple(_TEXT.split())


def prompt(*, seed: int, user: int, n: int, num_bytes: int) -> str:
    """The prompt of the n-th request of a user: exactly `num_bytes` ASCII characters.

    It begins with a number of its own, so that no prefix cache can answer for an earlier request.
    """
    rng = random.Random(f"{seed}/{user}/{n}/prompt")
    parts = [f"{rng.getrandbits(40):010x}, a letter:"]
    length = len(parts[0])
    while length < num_bytes:
        word = rng.choice(_WORDS)
        parts.append(word)
        length += 1 + len(word)
    return " ".join(parts)[:num_bytes]
