"""A made-up gauge whose truth is known: other users who come and go, and leaves of ours."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.experiments.averaged import Leave

Array = NDArray[np.float64]
STEP_S = 0.02
_CYCLE_S = 5.0
_TURN_S = 3.0


class World(NamedTuple):
    leaves: list[Leave]
    times_s: Array
    values: Array


def other_users(rng: np.random.Generator, seconds: float, users: int, think_s: float) -> Array:
    """How many run in each step. Answers have 20 to 250 tokens; of ten users three leave early."""
    steps = int(seconds / STEP_S) + 1
    change = np.zeros(steps + 1)
    for _ in range(users):
        now_s = -rng.uniform(0, 5)
        while now_s < seconds:
            lasts_s = rng.integers(20, 251) * STEP_S
            if rng.random() < 0.3:
                lasts_s *= rng.random()
            first, end = (int(np.ceil(max(0.0, at) / STEP_S)) for at in (now_s, now_s + lasts_s))
            change[min(first, steps)] += 1
            change[min(end, steps)] -= 1
            now_s += lasts_s + rng.exponential(think_s)
    running: Array = np.cumsum(change)[:steps]
    return running


def watched(
    rng: np.random.Generator,
    leaves: int,
    held_s: Callable[[], float],
    *,
    ghosts: float = 0.0,
    streams: int = 1,
    poll_s: float = 0.05,
    users: int = 12,
    ramp: float = 0.0,
) -> World:
    """A slot is given back at the first step that begins `held_s` after the leave; of ghosts when
    their answer ends, 2.2 to 2.6 s after it. `ramp`: more users a second."""
    seconds = leaves * _CYCLE_S + 5
    running = other_users(rng, seconds, users, think_s=1.0)
    running += np.floor(ramp * STEP_S * np.arange(len(running)))
    ours = []
    for number in range(leaves):
        began_s = 2 + number * _CYCLE_S
        t0_s = began_s + rng.uniform(0.8, 1.8)
        ours.append(Leave(began_s, began_s, t0_s, streams))
        for _ in range(streams):
            lasts_s = rng.uniform(2.2, 2.6) if rng.random() < ghosts else held_s()
            first, end = (int(np.ceil(at / STEP_S)) for at in (began_s, t0_s + lasts_s))
            running[first:end] += 1
    pauses = rng.uniform(0.75, 1.25, int(seconds / poll_s * 1.2)) * poll_s
    times: Array = pauses.cumsum()
    times = times[times < seconds - STEP_S]
    return World(ours, times, running[(times / STEP_S).astype(int)])


def seeds(number: int) -> list[Any]:
    return [np.random.default_rng(seed) for seed in range(number)]


class Twin(NamedTuple):
    """Our leaves and natural ends in turn, and the pace of a stream of ours that stays."""

    leaves: list[Leave]
    ends: list[Leave]
    times_s: Array
    paces_s: Array


def twin(rng: np.random.Generator, moments: int, *, ghosts: float, users: int = 12) -> Twin:
    """A step takes 10 ms and 1 ms for each stream; tokens are read up to some ms late."""
    seconds = 2 * moments * _TURN_S + 5
    running = other_users(rng, seconds, users, think_s=1.0) + 1
    leaves: list[Leave] = []
    ends: list[Leave] = []
    for number in range(2 * moments):
        began_s = 2 + number * _TURN_S
        t0_s = began_s + rng.uniform(0.6, 1.6)
        is_leave = number % 2 == 0
        (leaves if is_leave else ends).append(Leave(began_s, began_s, t0_s))
        held_s = 0.013 * is_leave
        if is_leave and rng.random() < ghosts:
            held_s = rng.uniform(1.3, 1.4)
        first, end = (int(np.ceil(at / STEP_S)) for at in (began_s, t0_s + held_s))
        running[first:end] += 1
    now_s, times = 0.0, [0.0]
    while now_s < seconds - 1:
        now_s += 0.01 + 0.001 * running[int(now_s / STEP_S)]
        times.append(now_s + abs(rng.normal(0, 0.001)))
    gaps = np.diff(times)
    return Twin(leaves, ends, np.array(times[:-1]) + gaps / 2, gaps)
