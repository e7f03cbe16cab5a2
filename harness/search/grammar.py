"""The grammar: schedules are drawn at random, with weights for what lies close together.

Bugs of cancellation are races: two things meet in one step. So a schedule has one to three themes,
each a few visits that meet somewhere: at a chunk's edge of a prefill, at the last token, at a slot
that has just come free, at memory that has just run out. And most of its visits have a few habits
in common: a feature, several answers, a way to leave. Two rare things would hardly ever meet if
each visit drew its own. Each theme meets each habit once before any of these pairs comes again.

To add a theme: a function with `@theme`, and a row in docs/search.md. To add a habit: `habits_of`.
"""

import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec

from harness.records import Delivery, Way
from harness.search.schedule import (
    MOST_STEPS,
    MOST_VISITS,
    ROUTES,
    Feature,
    Leave,
    Phase,
    Schedule,
    Visit,
)

_USUAL_PROMPT: Final = 32  # tokens
_RUNS_ON: Final = 0.7  # of the answers that are left: they would outlast the settle time
_HAVE_HABIT: Final = (1.0, 0.8, 0.5)  # of the visits of a schedule: all, most, or half
_RETRIES: Final = 0.85  # of the visits that come again after a leave: the same request
_TWINS: Final = 0.4  # of those that run beside one with the same prompt, likewise
_SOME: Final = 16  # clients at once, where the slots are not known
_MOST_CROWD: Final = 40  # of the slots that are filled: a schedule has room for more visits
PAST_EDGE: Final = 9  # tokens of a prompt, at most, that ends behind the edge of a chunk
_SEEDS: Final = 1_000_003  # between the schedules of one seed and the next


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """What this server takes. `slots`: None where they are not known. `chunks`: tokens of a prompt
    that one step may compute: guesses, the least first. `long_prompt`: the longest that is asked
    for often; `longest_prompt`: the longest of all. `token_steps`: steps that a token of a prompt
    takes; 0 if that is not known. `filling_prompt`: the longest of which one per slot fits into
    memory; None: that is not known. `ways`: how its clients can leave, the usual one first."""

    slots: int | None
    chunks: tuple[int, ...]
    long_prompt: int
    longest_prompt: int
    long_answer: int
    features: frozenset[Feature]
    ways: tuple[Way, ...]
    fan_out: int = 1
    filling_prompt: int | None = None
    token_steps: float = 0.0

    @property
    def crowd(self) -> int:
        return min(self.slots or _SOME, _MOST_CROWD)

    @property
    def chunk(self) -> int:
        return self.chunks[0]


Theme = Callable[[random.Random, Offered], list[Visit]]
THEMES: Final[dict[str, Theme]] = {}


def theme(draws: Theme) -> Theme:
    THEMES[draws.__name__.replace("_", "-")] = draws
    return draws


# What a visit has in common with others of its schedule.
Habit = Callable[[Visit], Visit]


def draw(seed: int, number: int, offered: Offered, themes: Collection[str] = ()) -> Schedule:
    """The schedule `number` of a search: one to three themes at once, each begun within a few steps
    of the others. `themes`: the only ones to draw from; default: all."""
    rng = random.Random(seed * _SEEDS + number)
    names = [name for name in THEMES if not themes or name in themes]
    habits = habits_of(offered)
    pairs = [(name, habit) for name in names for habit in habits]
    random.Random(seed * _SEEDS + number // len(pairs)).shuffle(pairs)
    first, habit = pairs[number % len(pairs)]
    others = [name for name in names if name != first]
    more = rng.sample(others, k=min(len(others), rng.choice((0, 0, 1, 1, 2))))
    visits: list[Visit] = []
    for name in (first, *more):
        begins = rng.choice((0.0, 0.0, rng.uniform(0, 4), rng.uniform(4, 40)))
        visits = joined(visits, THEMES[name](rng, offered), begins)
    way = rng.choice((offered.ways[0], *offered.ways))  # of most that leave
    chosen = [habit, *rng.sample(habits, k=min(len(habits), rng.choice((0, 1, 1, 2))))]
    chosen.append(partial(_leaving_by, way))
    return Schedule(
        seed=seed * _SEEDS + number,
        visits=tuple(_spiced(rng, offered, visits[:MOST_VISITS], chosen)),
        bystanders=rng.choice((0, 0, 1, 2)) if offered.crowd > 2 else 0,
    )


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


def habits_of(offered: Offered) -> list[Habit]:
    habits: list[Habit] = [_in_one_piece, _with_shared_prefix]
    for feature in sorted(offered.features):
        needs_chat = feature is Feature.TOOLS and Feature.CHAT in offered.features
        habits.append(partial(_with, (feature, Feature.CHAT) if needs_chat else (feature,)))
    habits += [partial(_with_answers, n) for n in {2, offered.fan_out} if n <= offered.fan_out]
    return habits


def _with(more: tuple[Feature, ...], visit: Visit) -> Visit:
    features = list(visit.features)
    for one in more:
        has_route = one in ROUTES and any(other in ROUTES for other in features)
        features += [] if one in features or has_route else [one]
    return msgspec.structs.replace(visit, features=tuple(features))


def _leaving_by(way: Way, visit: Visit) -> Visit:
    leave = None if visit.leave is None else msgspec.structs.replace(visit.leave, way=way)
    return msgspec.structs.replace(visit, leave=leave)


def _with_answers(n: int, visit: Visit) -> Visit:
    return msgspec.structs.replace(visit, n=max(visit.n, n))


def _with_shared_prefix(visit: Visit) -> Visit:
    return msgspec.structs.replace(visit, shared=visit.shared or visit.prompt // 2)


def _in_one_piece(visit: Visit) -> Visit:
    """Its client reads no token before the end: it leaves after about as many steps."""
    leave, at = visit.leave, 0.0 if visit.leave is None else visit.leave.at
    if leave is not None and leave.phase in (Phase.TOKEN, Phase.LAST):
        at = at if leave.phase is Phase.TOKEN else max(0.0, visit.answer - at)
        leave = msgspec.structs.replace(leave, phase=Phase.SENT, at=at)
    return msgspec.structs.replace(visit, delivery=Delivery.UNARY, leave=leave)


def _spiced(
    rng: random.Random, offered: Offered, visits: Iterable[Visit], habits: Collection[Habit]
) -> list[Visit]:
    """The habits, as most visits have them; mostly an answer that is long where its client leaves;
    and where a prompt is sent again, often the same request."""
    spiced = list[Visit]()
    shares = [rng.choice(_HAVE_HABIT) for _ in habits]
    for visit in visits:
        one, leave = visit, visit.leave
        if leave is not None and leave.phase in (Phase.TOKEN, Phase.LAST):
            leave = msgspec.structs.replace(leave, late=_small(rng))  # else a step has just begun
            one = msgspec.structs.replace(one, leave=leave)
        if leave is not None and leave.phase is not Phase.LAST and rng.random() < _RUNS_ON:
            one = msgspec.structs.replace(one, answer=offered.long_answer)
        for habit, share in zip(habits, shares, strict=True):
            one = habit(one) if rng.random() < share else one
        is_same = rng.random() < (_TWINS if one.after is None else _RETRIES)
        if one.repeats is not None and is_same:
            first = spiced[one.repeats]
            one = msgspec.structs.replace(one, features=first.features, n=first.n)
        spiced.append(one)
    return spiced


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
    most = max(_SOME, offered.crowd + 1)
    visits = [Visit(leave=leave) for _ in range(min(count, most))]
    return [*visits, Visit(after=0, at=_small(rng), answer=8)]


@theme
def chunk_edge(rng: random.Random, offered: Offered) -> list[Visit]:
    """A long prompt is left around the edge of a chunk of its prefill."""
    chunk, longest = rng.choice(offered.chunks), offered.longest_prompt
    chunks = min(rng.choice((1, 2, 3)), max(1, longest // chunk))
    prompt = min(longest, chunks * chunk + rng.choice((-1, 0, 1, PAST_EDGE)))
    prompt = max(prompt, _USUAL_PROMPT)
    edge = rng.choice((0, 1, 2, chunks)) + rng.uniform(-0.3, 0.3)
    steps = edge * max(1.0, chunk * offered.token_steps)
    leave = Leave(phase=Phase.SENT, at=min(max(0.0, steps), MOST_STEPS))
    left = Visit(prompt=prompt, shared=rng.choice((0, prompt // 2)), leave=leave)
    again = Visit(
        after=0,
        at=_small(rng),
        repeats=0,
        prompt=prompt,
        shared=left.shared,
        answer=8,
        leave=rng.choice((None, leave)),
    )
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
    prompt = rng.choice((_USUAL_PROMPT, offered.chunk, offered.long_prompt))
    leave = Leave(phase=Phase.SENT, at=rng.choice((0, 1, 2)))
    leave = rng.choice((leave, leave, Leave(at=3)))
    is_same = rng.random() < 0.7
    visits = [Visit(prompt=prompt, leave=leave)]
    for number in range(rng.choice((1, 2, 5))):
        stays = rng.random() < 0.5
        visits.append(
            Visit(
                after=number,
                at=_small(rng),
                repeats=0,
                same_id=is_same,
                prompt=prompt,
                answer=16,
                leave=None if stays else leave,
            )
        )
    return visits


@theme
def twins(rng: random.Random, offered: Offered) -> list[Visit]:
    """Some requests with one prompt run, and the first of them leaves, perhaps others, too."""
    prompt = rng.choice((_USUAL_PROMPT, min(offered.long_prompt, 2 * offered.chunk)))
    leave = rng.choice((Leave(phase=Phase.SENT, at=rng.choice((0, 1, 2))), Leave(at=2)))
    first = Visit(prompt=prompt, answer=32, leave=leave)
    others = [
        Visit(
            at=_small(rng),
            repeats=0,
            prompt=prompt,
            answer=32,
            leave=rng.choice((None, None, leave)),
        )
        for _ in range(rng.choice((1, 2, 3)))
    ]
    return [first, *others]


@theme
def pressure(rng: random.Random, offered: Offered) -> list[Visit]:
    """Long requests take the memory, so that some are preempted, mostly those that came last; then
    some leave, perhaps while they stand still."""
    prompt = offered.long_prompt // rng.choice((1, 2, 4))
    if offered.filling_prompt is not None:
        prompt = int(offered.filling_prompt * rng.choice((0.8, 0.9, 1.0)))
    prompt = max(_USUAL_PROMPT, prompt)
    early = Leave(at=rng.choice((1, 8, 40)))
    visits = [
        Visit(prompt=prompt, answer=offered.long_answer, leave=rng.choice((*[None] * 5, early)))
        for _ in range(offered.crowd)
    ]
    late = Leave(phase=Phase.SENT, at=rng.uniform(0, offered.long_answer))
    for number in range(-rng.choice((1, 1, 2)), 0):
        visits[number] = msgspec.structs.replace(
            visits[number], leave=rng.choice((late, late, early))
        )
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
def whole(rng: random.Random, offered: Offered) -> list[Visit]:
    """Answers in one piece, which no client sees before they are over; some may wait for a slot."""
    leave = Leave(phase=Phase.SENT, at=rng.choice((0, 1, 5, 20)))
    count = rng.choice((1, 2, 4, offered.crowd + 2))
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
