"""A schedule: what several clients ask of a server, when each asks, and how and when it leaves.

It is data. One visit is one request and the end of its client. All times are in the server's own
steps, so that a schedule means the same on a quick server and on a slow one. A visit may follow
another: it then comes a number of steps after the other's client has left, or its answer has ended.
Schedules are drawn by harness/search/grammar.py, and may be written by hand.
"""

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import msgspec

from harness.errors import ConfigError
from harness.records import Delivery, Way
from harness.workload.target import Target

MOST_VISITS: Final = 64
MOST_PROMPT: Final = 1 << 15  # tokens
MOST_ANSWER: Final = 1 << 12
MOST_STEPS: Final = 10_000.0  # of any wait


class Phase(StrEnum):
    """What the moment of a leave is counted from."""

    SENT = "sent"  # steps after the request was sent
    PREFILL = "prefill"  # shares of the idle server's time to first token, after the sending
    TOKEN = "token"  # tokens that the client has read
    LAST = "last"  # tokens that are still to come


class Feature(StrEnum):
    """What a request may ask for besides its answer; harness/search/requests.py has the keys."""

    SCHEMA = "schema"
    TOOLS = "tools"
    STOP = "stop"
    LOGPROBS = "logprobs"
    SAMPLED = "sampled"
    PRIORITY = "priority"
    ADAPTER = "adapter"
    CHAT = "chat"  # the other routes
    RESPONSES = "responses"
    MESSAGES = "messages"


ROUTES: Final = {
    Feature.CHAT: "chat/completions",
    Feature.RESPONSES: "responses",
    Feature.MESSAGES: "messages",
}

_WAYS: Final = (Way.FIN, Way.RST, Way.HALF_CLOSE, Way.STOP_READING, Way.CANCEL)
_Steps = Annotated[float, msgspec.Meta(ge=0, le=MOST_STEPS)]


class Leave(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`at`: from 0 on, in the unit of its phase; `late`: steps after that."""

    way: Way = Way.FIN
    phase: Phase = Phase.TOKEN
    at: _Steps = 1.0
    late: _Steps = 0.0


class Visit(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """`at`: steps since the beginning, or since the visit number `after` was over. `repeats`: the
    visit whose prompt it sends again. `same_id`: under that visit's request id, too. `prompt` and
    `answer`: tokens. `shared`: of the prompt, the tokens that all visits begin with. `leave`: None
    if the client stays to the end."""

    at: _Steps = 0.0
    after: int | None = None
    repeats: int | None = None
    same_id: bool = False
    prompt: Annotated[int, msgspec.Meta(ge=8, le=MOST_PROMPT)] = 32
    shared: Annotated[int, msgspec.Meta(ge=0, le=MOST_PROMPT)] = 0
    answer: Annotated[int, msgspec.Meta(ge=1, le=MOST_ANSWER)] = 64
    n: Annotated[int, msgspec.Meta(ge=1, le=16)] = 1
    delivery: Delivery = Delivery.STREAM
    features: tuple[Feature, ...] = ()
    leave: Leave | None = None

    @property
    def route(self) -> str | None:
        """The name of another route than the target's usual one."""
        return next((ROUTES[one] for one in self.features if one in ROUTES), None)


class Schedule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`seed`: of the prompts' texts. `bystanders`: greedy streams that run meanwhile and stay; they
    must have the texts that they have alone."""

    seed: int
    visits: tuple[Visit, ...]
    bystanders: Annotated[int, msgspec.Meta(ge=0, le=8)] = 0

    @property
    def leaves(self) -> list[Leave]:
        return [one.leave for one in self.visits if one.leave is not None]

    def check(self) -> None:
        """Raises ConfigError for a visit that follows a later one, or none."""
        if not 1 <= len(self.visits) <= MOST_VISITS:
            raise ConfigError(f"a schedule has 1 to {MOST_VISITS} visits, not {len(self.visits)}")
        for number, one in enumerate(self.visits):
            for key in ("after", "repeats"):
                other = getattr(one, key)
                if other is not None and not 0 <= other < number:
                    raise ConfigError(
                        f"visit {number}: `{key}` is {other}; it must be an earlier visit"
                    )
            if one.same_id and (one.repeats is None or one.after is None):
                raise ConfigError(
                    f"visit {number}: `same_id` needs `repeats`, the visit whose id it is, and "
                    "`after`: two requests under one id at once cannot be told apart"
                )

    def without(self, gone: frozenset[int]) -> "Schedule":
        """The schedule without these visits. What followed one of them comes at its own time; what
        repeated one of them sends a prompt of its own."""
        kept = [number for number in range(len(self.visits)) if number not in gone]
        place = {number: new for new, number in enumerate(kept)}
        return msgspec.structs.replace(
            self, visits=tuple(_moved(self.visits[number], place) for number in kept)
        )

    def with_visit(self, number: int, visit: Visit) -> "Schedule":
        before, after = self.visits[:number], self.visits[number + 1 :]
        return msgspec.structs.replace(self, visits=(*before, visit, *after))

    def staying(self) -> "Schedule":
        """The control: the same visits, and nobody leaves."""
        visits = tuple(msgspec.structs.replace(one, leave=None) for one in self.visits)
        return msgspec.structs.replace(self, visits=visits)


def _moved(visit: Visit, place: dict[int, int]) -> Visit:
    repeats = None if visit.repeats is None else place.get(visit.repeats)
    after = None if visit.after is None else place.get(visit.after)
    is_same = visit.same_id and repeats is not None and after is not None
    return msgspec.structs.replace(visit, after=after, repeats=repeats, same_id=is_same)


def read_schedule(file: Path) -> Schedule:
    """Raises ConfigError."""
    try:
        schedule = msgspec.json.decode(file.read_bytes(), type=Schedule)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{file}: is no schedule: {error}") from error
    try:
        schedule.check()
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    return schedule


def ways_of(target: Target) -> tuple[Way, ...]:
    """How clients of this kind of server can leave, the usual way first."""
    ways = [way.over(target.protocol) for way in _WAYS]
    known = [one for one in ways if one is not None]
    if target.cancel_path is None and target.http:
        known.remove(Way.CANCEL)
    return tuple(dict.fromkeys(known))


def check_playable(schedule: Schedule, target: Target, *, adapter: str | None) -> None:
    """Raises ConfigError for what clients of this kind of server cannot do. Which features the
    server takes, it says itself."""
    known = ways_of(target)
    for number, one in enumerate(schedule.visits):
        if one.leave is not None and one.leave.way.over(target.protocol) not in known:
            raise ConfigError(
                f"--schedule: visit {number} leaves by `{one.leave.way}`, and the ways of clients "
                f"of a server of the kind {target.name} are {', '.join(known)}"
            )
        if Feature.ADAPTER in one.features and adapter is None:
            raise ConfigError(
                f"--schedule: visit {number} asks for an adapter: name one (--adapter NAME)"
            )


def seen_in(schedule: Schedule) -> Iterator[tuple[str, str, str]]:
    """What a schedule covers: the phase and the way of each leave, with each feature of its
    request."""
    for one in schedule.visits:
        if one.leave is None:
            continue
        names = [str(feature) for feature in one.features]
        names += ["n"] if one.n > 1 else []
        names += ["unary"] if one.delivery is Delivery.UNARY else []
        names += ["repeat"] if one.repeats is not None else []
        names += ["shared"] if one.shared else []
        for name in names or ["plain"]:
            yield str(one.leave.phase), str(one.leave.way), name
