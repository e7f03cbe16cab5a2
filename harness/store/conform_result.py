"""The files of a conformance run: conform.json, and a wire log for each case.

A verdict is about one case on one server. Its kind says how a failed case failed, and its
aftermath what the case left behind: a server may pass a case and answer nobody afterwards.
"""

from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Final, Literal

import msgspec

from harness.errors import ConfigError, in_words
from harness.records import Disconnect

CONFORM_SCHEMA: Final = 1
CONFORM_FILE: Final = "conform.json"
WIRE_FOLDER: Final = "wire"
NOT_MEANT: Final = (
    "These cases passed against this version, configuration and machine, on that day. They do not "
    "show that the server cancels under other settings, loads, models or hops, that no leave in a "
    "thousand is forgotten, that nothing leaks in a week, or that its answers are good or fast. "
    "“Cannot decide” is not a pass. There is no standard for this, and walkaway is no authority "
    "for one."
)


class Level(StrEnum):
    MUST = "must"
    SHOULD = "should"  # fails only under --strict
    INFO = "info"  # reported, never judged


class Verdict(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    NOT_SUPPORTED = "not_supported"  # the server refused, or has no such counter; never a timeout
    CANNOT_DECIDE = "cannot_decide"
    HARNESS = "harness"  # our client was late, broke the protocol or crashed; never a pass
    INFO = "info"

    @property
    def words(self) -> str:
        return self.value.replace("_", " ")


class Failure(StrEnum):
    LATE = "late"
    NEVER = "never"
    HARM = "harm"


class Aftermath(StrEnum):
    CLEAN = "clean"
    SLOW = "slow"
    WRONG_TEXT = "wrong text"
    GHOSTS = "busy with its ghosts"  # no answer until the answers that were left had ended
    REFUSING = "refusing"  # short requests, though it is known to queue: it may limit their rate
    WEDGED = "wedged"  # no answer to the probe within its time
    DEAD = "dead"
    RESTARTED = "restarted"  # it served nobody for longer than the settle time, and then again


# How a case was judged.
JudgingWay = Literal[
    "full_slots",
    "occupancy",
    "admission",
    "gauge",
    "pace",
    "quiet",
    "wire",
    "text",
    "counters",
    "upstream",
]


# What a gateway does with a leave; see harness/conform/gateway/crossing.py.
Contract = Literal["cancel", "at next write", "drain", "never"]


class CrossingTimes(msgspec.Struct, frozen=True):
    """One client that left a gateway. `upstream_stopped_s`: from t0 until the gateway closed its
    connection to the upstream; null: the answer was made to its end."""

    upstream_stopped_s: float | None
    tokens_after_leave: int


class Steps(msgspec.Struct, frozen=True):
    """The steps within which a freed slot worked for another request, over all tries."""

    p50: float
    worst: float


class CaseResult(msgspec.Struct, kw_only=True):
    """`evidence` maps names to figures with their unit in the name ("median_steps", "held").
    `stops`: whether the server stops, in seconds against controls; None: open. `steps`: within how
    many steps; None: that cannot be said. `way`: how the case was judged.
    `expected`: how the verdict stands to the file of expected failures, if there is one. `wire`,
    `passes`, `why`, `caught`, `remedy`: of the case's declaration, so that a page needs no other
    file. `left`: clients that left in this case; `left_in_all`: since the run began. `dialect`,
    `contract`, `cap_s` (of a drain whose end was seen) and `tries`: of a gateway before the bundled
    upstream."""

    id: str
    level: Level
    verdict: Verdict
    requirement: str
    reason: str
    kind: Failure | None = None
    stops: bool | None = None
    steps: Steps | None = None
    way: JudgingWay | None = None
    aftermath: Aftermath | None = None
    evidence: dict[str, float | str | None] = {}
    took_s: float = 0.0
    expected: Literal["listed", "stale"] | None = None
    repeat: str = ""  # the command that shows it again, alone where that is enough
    wire_log: str | None = None  # relative to conform.json
    wire: str = ""
    passes: str = ""
    why: str = ""
    caught: tuple[str, ...] = ()
    remedy: str = ""
    left: int = 0
    left_in_all: int = 0
    dialect: str | None = None
    contract: Contract | None = None
    cap_s: float | None = None
    tries: tuple[CrossingTimes, ...] = ()

    @property
    def ended_server(self) -> bool:
        """The server died of it, or answered nobody any more."""
        return self.kind is Failure.HARM and self.aftermath in (Aftermath.DEAD, Aftermath.WEDGED)


class ConformTarget(msgspec.Struct, kw_only=True):
    engine: str
    url: str
    model: str
    version: str | None = None
    configuration: str = ""  # in words, for a matrix's column
    disconnect: Disconnect = "cancel"  # what it declares that a disconnect means
    metrics_urls: list[str] = []


class Machine(msgspec.Struct, kw_only=True):
    cpu: str
    cores: int
    python: str


class ConformResult(msgspec.Struct, kw_only=True):
    """`step_s`, `ttft_s`: of the idle server; null until they are known. `lag_s`: the client's own
    lateness. `not_run`: cases that were not run, and why. `suite`: the dated suite that was asked
    for; null: all cases of this version. `sentence`: what passed, what failed, what to change."""

    schema_version: int = CONFORM_SCHEMA
    walkaway: str
    started_at: str
    command: str
    seed: int
    suite: str | None = None
    quick: bool = False
    strict: bool = False
    machine: Machine
    target: ConformTarget
    step_s: float | None = None
    slots: int | None = None
    ttft_s: float | None = None
    lag_s: float | None = None
    cases: list[CaseResult] = []
    not_run: dict[str, str] = {}
    notes: list[str] = []
    sentence: str = ""
    exit_code: int = 0

    def write(self, folder: Path) -> None:
        """The file is replaced at once: a run that is killed leaves the last whole one."""
        unfinished = folder / f"{CONFORM_FILE}.part"
        unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")
        unfinished.replace(folder / CONFORM_FILE)


def read_conform(file: Path) -> ConformResult:
    try:
        return msgspec.json.decode(file.read_bytes(), type=ConformResult)
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be read: {in_words(error)}; name a {CONFORM_FILE} or the folder that "
            "`walkaway conform --out` wrote"
        ) from error
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"{file} is no result of `walkaway conform`: {in_words(error)}"
        ) from error


def conformance_beside(run: Path, engine: str | None) -> str | None:
    """Counts and page of the newest result about this kind of server in a folder next to `run`."""
    found = []
    for file in run.resolve().parent.glob(f"*/{CONFORM_FILE}"):
        with suppress(ConfigError):
            result = read_conform(file)
            if result.target.engine == engine:
                found.append((result.started_at, file, result))
    if not found:
        return None
    _, file, result = max(found, key=lambda one: one[0])
    page = file.with_name("index.html")
    return f"{counts_in_words(result.cases)}: {page if page.is_file() else file}"


def counted(results: Sequence[CaseResult]) -> dict[Verdict, int]:
    verdicts = [one.verdict for one in results]
    return {one: verdicts.count(one) for one in Verdict if one in verdicts}


def counts_in_words(results: Sequence[CaseResult]) -> str:
    """Such as "3 pass, 1 cannot decide"; "" without a result."""
    return ", ".join(f"{count} {one.words}" for one, count in counted(results).items())


class WireEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line of wire/<id>.jsonl: what happened on one connection of one try. `t_ns` is on the clock
    of the rows. `text`: heads and the beginning of what was read, secrets masked."""

    t_ns: int
    attempt: int
    stream: str  # the part that it plays: "leaver", "probe", "filler 3"
    what: Literal["connect", "write", "read", "act", "end", "mark"]
    bytes: int = 0
    tokens: int = 0
    text: str = ""
    call: str = ""  # act: the system call, such as "close()"
    unread: int = 0  # act: bytes that had arrived and were not read
    sent: Literal["", "FIN", "RST", "RST_STREAM", "nothing"] = ""  # act: what went out


_WIRE: Final = msgspec.json.Decoder(WireEvent)


def wire_log_name(case_id: str) -> str:
    return f"{WIRE_FOLDER}/{case_id.replace('/', '-')}.jsonl"


def read_wire_log(file: Path) -> list[WireEvent]:
    """The events without the lines that a killed run cut off; empty without a file."""
    events: list[WireEvent] = []
    with suppress(OSError, msgspec.MsgspecError):
        events.extend(_WIRE.decode(line) for line in file.read_bytes().splitlines())
    return events
