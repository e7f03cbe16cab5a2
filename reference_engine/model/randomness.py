"""Random numbers that depend on a seed and a position, and on nothing else.

A request's n-th token is drawn with the same number whatever else is in the batch, and again after
a preemption, because the number is computed from (seed, position) instead of taken from a stream.
"""

from typing import Final

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15


def mix(seed: int, position: int) -> int:
    """64 well-mixed bits: the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    z = (seed + (position + 1) * _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1)."""
    return (mix(seed, position) >> 11) * 2.0**-53
