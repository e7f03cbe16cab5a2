"""Lags drawn from distributions that are given by their quantiles."""

from array import array
from collections.abc import Sequence
from random import Random
from typing import Final

import numpy as np
from numpy.typing import NDArray

from harness.simulate.machine import Growth

_TABLE: Final = 1 << 14  # lags drawn beforehand, for tokens

NS: Final = 1_000_000_000


class Lag:
    """A distribution by equally spaced quantiles; between two of them it is uniform."""

    def __init__(self, quantiles_s: Sequence[float]) -> None:
        self._ns = [one * NS for one in quantiles_s]
        self._last = len(quantiles_s) - 1
        self._is_constant = quantiles_s[0] == quantiles_s[-1]

    def at(self, share: float) -> int:
        """The quantile in ns; `share` is from 0 to 1, 1 excluded."""
        place = share * self._last
        below = int(place)
        low, high = self._ns[below], self._ns[below + 1]
        return round(low + (place - below) * (high - low))

    def draw(self, random: Random) -> int:
        return round(self._ns[0]) if self._is_constant else self.at(random.random())


NO_LAG: Final = Lag([0.0, 0.0])


class TokenLags:
    """The lags of the tokens of each answer: a piece of one long table, from a place of its own.
    Each grows with the tokens of its step.

    So the lag of any token can be asked for at any time, and is always the same.
    """

    def __init__(self, lag: Lag, random: Random, *, growth: Growth) -> None:
        drawn = [lag.draw(random) for _ in range(_TABLE)]
        self._growth = growth
        self._table = np.array(drawn + drawn, dtype=np.int64)

    def read_ns(
        self, place: int, made_ns: "array[int]", step_tokens: "array[int]"
    ) -> NDArray[np.int64]:
        """The times at which the tokens of an answer are read, each after the one before.
        `made_ns`: when each was made; `step_tokens`: how many tokens its step sampled."""
        made = np.asarray(made_ns, dtype=np.int64)
        lag_ns = self._table[(place + np.arange(len(made))) % _TABLE]
        if self._growth.deliver_token:
            tokens = np.minimum(step_tokens, self._growth.up_to)
            lag_ns = (lag_ns * (1 + self._growth.deliver_token * tokens)).astype(np.int64)
        read: NDArray[np.int64] = np.maximum.accumulate(made + lag_ns)
        return read
