"""The grammar: schedules are drawn at random, with weights for what lies close together.

Bugs of cancellation are races: two things meet in one step. So a schedule has one to three themes,
each a few visits that meet somewhere: at a chunk's edge of a prefill, at the last token, at a slot
that has just come free, at memory that has just run out. To add a theme: a function with `@theme`,
and a row in docs/search.md.
"""

import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from harness.records import Delivery, Way
from harness.search.schedule import MOST_VISITS, ROUTES, Feature, Leave, Phase, Schedule, Visit

_USUAL_PROMPT: Final = 32  # tokens
_RUNS_ON: Final = 0.7  # of the answers that are left: they would outlast the settle time
_MOST_BURST: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """What this server takes. `slots`: None where they are not known. `chunk`: tokens of a prompt
    that one step computes, or a guess. `long_prompt`: the longest that is asked for. `ways`: how
    its clients can leave, the usual one first."""

    slots: int | None
    chunk: int
    long_prompt: int
    long_answer: int
    features: frozenset[Feature]
    ways: tuple[Way, ...]
    fan_out: int = 1

    @property
    def crowd(self) -> int:
        return min(self.slots or _MOST_BURST, _MOST_BURST)


Theme = Callable[[random.Random, Offered], list[Visit]]
THEMES: Final[dict[str, Theme]] = {}


def theme(draws: Theme) -> Theme:
    THEMES[draws.__name__.replace("_", "-")] = draws
    return draws


def draw(seed: int, offered: Offered, themes: Collection[str] = ()) -> Schedule:
    """One to three themes at once, each begun within a few steps of the others. `themes`: the only
    ones to draw from; default: all."""
    rng = random.Random(seed)
    names = [name for name in THEMES if not themes or name in themes]
    visits: list[Visit] = []
    for name in rng.sample(names, k=min(len(names), rng.choice((1, 1, 2, 2, 3)))):
        begins = rng.choice((0.0, 0.0, rng.uniform(0, 4), rng.uniform(4, 40)))
        visits = joined(visits, THEMES[name](rng, offered), begins)
    visits = [_spiced(rng, offered, one) for one in visits[:MOST_VISITS]]
    bystanders = rng.choice((0, 0, 1, 2)) if offered.crowd > 2 else 0
    return Schedule(seed=seed, visits=tuple(visits), bystanders=bystanders)


def joined(visits: list[Visit], more: Iterable[Visit], begins: float) -> list[Visit]:
    """The visits of another theme, which begins this number of steps later, come behind."""
    first = len(visits)
    return [
        *visits,
        *(
            msgspec.structs.replace(
                one,
                at=one.at + (begins if one.after is None else 0.0),
                after=None if one.after is None else one.after + first,
                repeats=None if one.repeats is None else one.repeats + first,
            )
            for one in more
        ),
    ]


def _spiced(rng: random.Random, offered: Offered, visit: Visit) -> Visit:
    """Now and then a feature more, another way to leave, or a prefix that others share; and mostly
    an answer that is long where its client leaves."""
    features = list(visit.features)
    if offered.features and rng.random() < 0.3:
        more = rng.choice(sorted(offered.features))
        taken = more in features or (more in ROUTES and visit.route is not None)
        features += [] if taken else [more]
    leave, answer = visit.leave, visit.answer
    if leave is not None and leave.phase is not Phase.LAST and rng.random() < _RUNS_ON:
        answer = offered.long_answer
    if leave is not None and leave.way is Way.FIN and rng.random() < 0.3:
        leave = msgspec.structs.replace(leave, way=rng.choice(offered.ways))
    shared = visit.shared
    if not shared and rng.random() < 0.2:
        shared = visit.prompt // 2
    return msgspec.structs.replace(
        visit, answer=answer, features=tuple(features), leave=leave, shared=shared
    )


def _small(rng: random.Random) -> float:
    """Often nothing, else within about a step."""
    return rng.choice((0.0, 0.0, rng.uniform(0, 1), rng.uniform(0, 3)))


@theme
def alone(rng: random.Random, _: Offered) -> list[Visit]:
    """A request leaves, perhaps the only one that runs, there is silence, and another comes."""
    left = Visit(leave=Leave(at=rng.choice((1, 2, 7, 30))))
    return [left, Visit(after=0, at=rng.choice((0, 1, 2, 20, 60)), answer=8)]


@theme
def burst(rng: random.Random, offered: Offered) -> list[Visit]:
    """As many as slots, or more, leave in one step."""
    count = rng.choice((2, offered.crowd, offered.crowd + 1, 2 * offered.crowd))
    leave = Leave(phase=Phase.SENT, at=rng.choice((0, 1, 2, 5, 12)))
    visits = [Visit(leave=leave) for _ in range(min(count, _MOST_BURST))]
    return [*visits, Visit(after=0, at=_small(rng), answer=8)]


@theme
def chunk_edge(rng: random.Random, offered: Offered) -> list[Visit]:
    """A long prompt is left around the edge of a chunk of its prefill."""
    chunks = rng.choice((1, 2, 3))
    prompt = min(offered.long_prompt, chunks * offered.chunk + rng.choice((-1, 0, 1, 9)))
    prompt = max(prompt, _USUAL_PROMPT)
    edge = rng.choice((0, 1, 2, chunks)) + rng.uniform(-0.3, 0.3)
    leave = Leave(phase=Phase.SENT, at=max(0.0, edge))
    left = Visit(prompt=prompt, shared=rng.choice((0, prompt // 2)), leave=leave)
    again = Visit(after=0, at=_small(rng), repeats=0, prompt=prompt, shared=left.shared, answer=8)
    return [left, again] if rng.random() < 0.6 else [left]


@theme
def last_token(rng: random.Random, _: Offered) -> list[Visit]:
    """An answer is left as its last token is made."""
    answer = rng.choice((1, 2, 3, 8, 16))
    leave = Leave(phase=Phase.LAST, at=min(answer, rng.choice((0, 1, 1, 2))))
    return [Visit(answer=answer, leave=leave) for _ in range(rng.choice((1, 2, 4)))]


@theme
def fan_out(rng: random.Random, offered: Offered) -> list[Visit]:
    """One request with several answers is left: before them, between them, or with all."""
    n = rng.choice((2, min(4, offered.fan_out), offered.fan_out))
    if offered.fan_out < 2:
        return burst(rng, offered)
    leave = rng.choice(
        (
            Leave(phase=Phase.SENT, at=rng.choice((0, 1, 2))),
            Leave(at=rng.choice((1, n, 3 * n))),
            Leave(phase=Phase.LAST, at=rng.choice((0, 1, n))),
        )
    )
    left = Visit(n=n, answer=rng.choice((8, 64)), leave=leave)
    return [left, Visit(after=0, at=_small(rng), answer=8)]


@theme
def again(rng: random.Random, offered: Offered) -> list[Visit]:
    """The same prompt comes again right after it was left, perhaps under the same id, several times
    over."""
    prompt = rng.choice((_USUAL_PROMPT, min(offered.long_prompt, offered.chunk)))
    leave = rng.choice((Leave(phase=Phase.SENT, at=rng.choice((0, 1, 2))), Leave(at=3)))
    is_same = rng.random() < 0.5
    visits = [Visit(prompt=prompt, leave=leave)]
    for number in range(rng.choice((1, 2, 5))):
        is_last = number and rng.random() < 0.5
        visits.append(
            Visit(
                after=number,
                at=_small(rng),
                repeats=0,
                same_id=is_same,
                prompt=prompt,
                answer=16,
                leave=None if is_last else leave,
            )
        )
    return visits


@theme
def twins(rng: random.Random, offered: Offered) -> list[Visit]:
    """Two requests with one prompt run, and one of them leaves."""
    prompt = rng.choice((_USUAL_PROMPT, min(offered.long_prompt, 2 * offered.chunk)))
    leave = rng.choice((Leave(phase=Phase.SENT, at=rng.choice((0, 1, 2))), Leave(at=2)))
    first = Visit(prompt=prompt, answer=32, leave=leave)
    second = Visit(at=_small(rng), repeats=0, prompt=prompt, answer=32)
    return [first, second]


@theme
def pressure(rng: random.Random, offered: Offered) -> list[Visit]:
    """Long requests take the memory, so that some are preempted; then some leave."""
    count = min(_MOST_BURST, offered.crowd)
    prompt = max(_USUAL_PROMPT, offered.long_prompt // rng.choice((1, 2, 4)))
    visits = []
    for _ in range(count):
        leave = None if rng.random() < 0.4 else Leave(at=rng.choice((1, 8, 40)))
        visits.append(Visit(prompt=prompt, answer=48, leave=leave))
    return visits


@theme
def queued(rng: random.Random, offered: Offered) -> list[Visit]:
    """Requests that wait behind full slots leave before they get one, or as they get it."""
    holders = [
        Visit(answer=rng.choice((24, 48)), leave=rng.choice((None, Leave(at=12))))
        for _ in range(offered.crowd)
    ]
    first = len(holders)
    waiting = [
        Visit(at=2.0, leave=Leave(phase=Phase.SENT, at=rng.choice((0, 1, 10, 22, 23, 24))))
        for _ in range(rng.choice((1, 2, 4)))
    ]
    return [*holders, *waiting, Visit(after=first, at=_small(rng), answer=8)]


@theme
def whole(rng: random.Random, _: Offered) -> list[Visit]:
    """Answers in one piece, which no client sees before they are over."""
    leave = Leave(phase=Phase.SENT, at=rng.choice((0, 1, 5, 20)))
    count = rng.choice((1, 2, 4))
    return [Visit(delivery=Delivery.UNARY, answer=48, leave=leave) for _ in range(count)]


@theme
def strangers(rng: random.Random, offered: Offered) -> list[Visit]:
    """Anything at any time."""
    visits = []
    for _ in range(rng.choice((2, 4, 8))):
        phase = rng.choice(list(Phase))
        at = rng.uniform(0, 1) if phase is Phase.PREFILL else float(rng.choice((0, 1, 2, 5, 20)))
        is_unary = rng.random() < 0.2 and phase in (Phase.SENT, Phase.PREFILL)
        visits.append(
            Visit(
                at=rng.uniform(0, 30),
                prompt=rng.choice((8, _USUAL_PROMPT, offered.chunk, offered.long_prompt)),
                answer=rng.choice((4, 32, 96)),
                n=rng.choice((1, 1, 1, offered.fan_out)),
                delivery=Delivery.UNARY if is_unary else Delivery.STREAM,
                leave=None if rng.random() < 0.3 else Leave(phase=phase, at=at),
            )
        )
    return visits
