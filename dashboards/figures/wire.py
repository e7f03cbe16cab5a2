"""A wire log as a drawing: a lane for each stream, time from left to right, t0 as a line.

Places are percentages, so one drawing fits a wide screen and a phone. A case's slowest tries are
drawn: the tries whose probe waited longest after the act or, where checks follow the leaving
streams at once, the tries with the slowest check.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final

from harness.formatting import quantity
from harness.store.conform_result import WireEvent

SHOWN_TRIES: Final = 2
SHOWN_LANES: Final = 12
SHOWN_MOMENTS: Final = 80
MOMENTS_BEFORE: Final = 20  # t0, where not all are shown
PROBE, CHECK = "probe", "check"
LANE_PX: Final = 40
TOP_PX: Final = 24
TICKS: Final = 5
LABEL: Final = 24  # characters of a mark in the drawing
TEXT: Final = 300  # and of what was sent or read, in words
SHAPES: Final = {"connect": "circle", "write": "triangle", "act": "cross", "end": "bar"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyph:
    shape: str
    x: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """`reads`: an SVG path with a stroke for each read; the lane is 1,000 units long."""

    name: str
    y: int
    start: float
    end: float
    reads: str
    glyphs: list[Glyph]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """`hidden`: streams without a lane. `ticks`: places, with milliseconds after t0."""

    caption: str
    height: int
    lanes: list[Lane]
    t0: float | None
    ticks: list[tuple[float, str]]
    hidden: int


@dataclass(frozen=True, slots=True)
class DrawnTry:
    """A part of the log, which other tries may overlap: streams live on from try to try. `number`
    counts from 1. `t0_ns`: its first act. `left`, `asked`: streams that leave, and the probes or
    checks after them. `answer`: the first token of a probe, or of the last check, after t0."""

    number: int
    events: list[WireEvent]
    t0_ns: int | None = None
    left: int = 0
    asked: tuple[str, ...] = ()
    answer: WireEvent | None = None
    unanswered: int = 0

    @property
    def wait_s(self) -> float | None:
        """Infinite without an answer, None if nothing waits for one."""
        if self.t0_ns is None or not self.asked:
            return None
        return math.inf if self.answer is None else (self.answer.t_ns - self.t0_ns) / 1e9

    @property
    def title(self) -> str:
        if self.t0_ns is None:
            return f"Try {self.number}, in which no stream leaves"
        leave = f"{quantity(self.left, 'streams')} {'leaves' if self.left == 1 else 'leave'}"
        if not self.asked:
            return f"Try {self.number}: {leave}"
        is_probe = _is_probe(self.asked)
        if self.answer is None and is_probe:
            return f"Try {self.number}: no probe got its first token after t0"
        if self.answer is None:
            none = f"{self.unanswered} of {quantity(len(self.asked), 'checks')} got no first token"
            return f"Try {self.number}: {leave}; {none}"
        wait = quantity(self.wait_s, "s")
        if is_probe:
            whose = f"the first token of {self.answer.stream} came"
        else:
            last = f"the last of {quantity(len(self.asked), 'checks')} got its first token"
            whose = f"{leave}; {last}"
        return f"Try {self.number}: {whose} {wait} after t0"

    @property
    def drawings(self) -> list[Drawing]:
        """The whole try, and before it the part around t0 where that is much shorter."""
        start, end = self.events[0].t_ns, max(self.events[-1].t_ns, self.events[0].t_ns + 1)
        whole = _draw(self, start, end, "The whole try")
        if self.t0_ns is None or self.answer is None:
            return [whole]
        span = self.answer.t_ns - self.t0_ns
        near = max(start, self.t0_ns - span), min(end, self.answer.t_ns + span)
        if 3 * (near[1] - near[0]) > end - start:
            return [whole]
        return [_draw(self, *near, "Around the act of leaving"), whole]

    @property
    def moments(self) -> tuple[int, list[tuple[str, str, str]], int]:
        """The drawing in words: when, which stream, what; and how many moments before and after
        are left out. Reads in a row are one moment. Checks stand at the end of their part."""
        origin = self.events[0].t_ns if self.t0_ns is None else self.t0_ns

        def kind(event: WireEvent) -> tuple[object, ...]:
            return event.stream, event.t_ns > origin, event.what == "read" or id(event)

        by_stream = sorted(self.events, key=lambda event: event.stream)
        runs = [list(run) for _, run in groupby(by_stream, kind)]
        runs.sort(key=lambda run: run[0].t_ns)
        after_t0 = sum(run[0].t_ns < origin for run in runs) if _is_probe(self.asked) else len(runs)
        first = max(0, min(after_t0 - MOMENTS_BEFORE, len(runs) - SHOWN_MOMENTS))
        shown = [
            (f"{(run[0].t_ns - origin) / 1e6:+,.1f} ms", run[0].stream, _in_words(run, origin))
            for run in runs[first : first + SHOWN_MOMENTS]
        ]
        return first, shown, len(runs) - first - len(shown)


def tries(events: Iterable[WireEvent]) -> list[DrawnTry]:
    """The slowest first. Without any act, the whole log is one try."""
    log = sorted(events, key=lambda event: event.t_ns)
    acts = [event for event in log if event.what == "act"]
    waits = {name: _first_token(own) for name, own in _by_stream(log).items() if _waits(name)}
    # Fillers close when a case is over, too.
    left = [act for act in acts if not act.stream.startswith("filler")] or acts
    groups = list(_acts_of_each_try(left, [token for token in waits.values() if token]))
    if not groups:
        return [DrawnTry(1, log)] if log else []
    ends = [*(group[0].t_ns for group in groups[1:]), log[-1].t_ns + 1]
    found = [
        _try(number, log, group, until, waits)
        for number, (group, until) in enumerate(zip(groups, ends, strict=True), 1)
    ]
    return sorted(found, key=lambda one: one.wait_s or 0.0, reverse=True)


def _waits(name: str) -> bool:
    return name.startswith((PROBE, CHECK))


def _is_probe(asked: Sequence[str]) -> bool:
    return bool(asked) and asked[0].startswith(PROBE)


def _acts_of_each_try(
    acts: Sequence[WireEvent], first_tokens: Sequence[WireEvent]
) -> Iterator[list[WireEvent]]:
    """A try ends with the first token that comes after its first act, or with its attempt."""
    group: list[WireEvent] = []
    for act in acts:
        is_answered = group and any(group[0].t_ns < one.t_ns < act.t_ns for one in first_tokens)
        if group and (is_answered or act.attempt != group[0].attempt):
            yield group
            group = []
        group.append(act)
    if group:
        yield group


def _try(
    number: int,
    log: Sequence[WireEvent],
    acts: Sequence[WireEvent],
    until: int,
    waits: Mapping[str, WireEvent | None],
) -> DrawnTry:
    t0_ns, left = acts[0].t_ns, {act.stream for act in acts}
    start = next(event.t_ns for event in log if event.stream in left)
    within = [event for event in log if start <= event.t_ns < until]
    tokens = {name: waits[name] for name in _by_stream(within) if name in waits}
    asked = tuple(name for name, one in tokens.items() if one is None or one.t_ns > t0_ns)
    probes = tuple(name for name in asked if name.startswith(PROBE))
    found = (tokens[name] for name in probes or asked)
    answers = [one for one in found if one is not None and one.t_ns < until]
    answer = None
    if probes:
        answer = min(answers, key=lambda one: one.t_ns, default=None)
    elif len(answers) == len(asked):
        answer = max(answers, key=lambda one: one.t_ns, default=None)
    if answer is not None:
        own = left | {answer.stream}
        end = max(event.t_ns for event in within if event.stream in own)
        within = [event for event in within if event.t_ns <= end]
    unanswered = len(asked) - len(answers)
    return DrawnTry(number, within, t0_ns, len(left), probes or asked, answer, unanswered)


def _by_stream(events: Iterable[WireEvent]) -> dict[str, list[WireEvent]]:
    found: dict[str, list[WireEvent]] = {}
    for event in events:
        found.setdefault(event.stream, []).append(event)
    return found


def _lanes(one: DrawnTry, events: Iterable[WireEvent]) -> list[tuple[str, list[WireEvent]]]:
    """The stream that leaves comes first, then the probes and checks, the slowest first; then
    the streams that may be harmed."""
    found = _by_stream(events)
    t0 = next((event.stream for event in one.events if event.t_ns == one.t0_ns), None)

    def rank(name: str) -> tuple[int, float]:
        if name == t0:
            return 0, 0
        if name in one.asked:
            token = _first_token(found[name])
            return 1, -math.inf if token is None else -token.t_ns
        if name.startswith("canary"):
            return 2, 0
        if name.startswith("filler"):
            return 5, 0
        return (3 if any(event.what == "act" for event in found[name]) else 4), 0

    return sorted(found.items(), key=lambda lane: rank(lane[0]))


def _first_token(events: Iterable[WireEvent]) -> WireEvent | None:
    return next((event for event in events if event.what == "read" and event.tokens), None)


def _draw(one: DrawnTry, start: int, end: int, caption: str) -> Drawing:
    def place(t_ns: float) -> float:
        return round(100 * min(1.0, max(0.0, (t_ns - start) / (end - start))), 2)

    streams = _lanes(one, (event for event in one.events if start <= event.t_ns <= end))
    lanes = [
        Lane(
            name=name,
            y=TOP_PX + row * LANE_PX,
            start=place(events[0].t_ns) if events[0].what == "connect" else 0.0,
            end=place(events[-1].t_ns) if events[-1].what == "end" else 100.0,
            **_marks(events, place, one),
        )
        for row, (name, events) in enumerate(streams[:SHOWN_LANES])
    ]
    origin = start if one.t0_ns is None else one.t0_ns
    return Drawing(
        caption=caption,
        height=TOP_PX + len(lanes) * LANE_PX + 20,
        lanes=lanes,
        t0=None if one.t0_ns is None else place(one.t0_ns),
        ticks=[(place(origin + ms * 1e6), f"{ms:+g}") for ms in _ticks(origin, start, end)],
        hidden=len(streams) - len(lanes),
    )


def _marks(
    events: Iterable[WireEvent], place: Callable[[float], float], one: DrawnTry
) -> dict[str, Any]:
    reads, glyphs = set(), []
    for event in events:
        if event.what == "read":
            reads.add(10 * place(event.t_ns))
        else:
            shape = SHAPES.get(event.what, "mark")
            glyphs.append(Glyph(shape=shape, x=place(event.t_ns), label=_label(event)))
        if event is one.answer:
            label = f"first token, t0 + {quantity(one.wait_s, 's')}"
            glyphs.append(Glyph(shape="first", x=place(event.t_ns), label=label))
    return {"reads": "".join(f"M{x:g} 0V10" for x in sorted(reads)), "glyphs": glyphs}


def _label(event: WireEvent) -> str:
    if event.what != "act":
        return event.text[:LABEL] if event.what == "mark" else ""
    return f"{event.call or 'leaves'}{f', {event.sent}' if event.sent else ''}"


def _ticks(origin: int, start: int, end: int) -> list[float]:
    """Round milliseconds after `origin`."""
    least = (end - start) / 1e6 / TICKS
    size = 10 ** math.floor(math.log10(least))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= least)
    first, last = math.ceil((start - origin) / 1e6 / step), math.floor((end - origin) / 1e6 / step)
    return [at * step for at in range(first, last + 1)]


def _in_words(run: list[WireEvent], origin: int) -> str:
    first, size = run[0], sum(event.bytes for event in run)
    text = f": {first.text[:TEXT]}" if first.text else ""
    if first.what == "read":
        tokens = sum(event.tokens for event in run)
        until = f", the last at {(run[-1].t_ns - origin) / 1e6:+,.1f} ms" if len(run) > 1 else ""
        counted = ", ".join((quantity(len(run), "reads"), quantity(size, "bytes")))
        return f"{counted}, {quantity(tokens, 'tokens')}{until}{text}"
    if first.what == "act":
        return f"leaves: {_label(first)}; {quantity(first.unread, 'bytes')} had arrived unread"
    of = f" of {quantity(size, 'bytes')}" if size else ""
    return f"{first.what}{of}{text}"
