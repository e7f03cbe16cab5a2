"""search.json: what `walkaway search` played on a server, and what it found."""

from pathlib import Path
from typing import Any, Final

import msgspec

from harness.errors import ConfigError, in_words
from harness.store.conform_result import ConformTarget, Machine

SEARCH_FILE: Final = "search.json"


class Rate(msgspec.Struct, frozen=True):
    """How many tries hit, and how many there were, each on a server at rest."""

    hits: int
    tries: int

    def __str__(self) -> str:
        return f"{self.hits} of {self.tries}"


class SearchFinding(msgspec.Struct, kw_only=True):
    """An invariant that a schedule breaks. `is_sure`: it comes more often than where nobody leaves.
    `is_repeat`: an earlier finding has the same leaves. `broken`: which one; `said`: what was seen
    the last time. `schedule`: the smallest that breaks it; empty if it takes several `in_a_row`,
    none of which breaks it alone. `drawn_visits`: of the one that was drawn. `rate`: of the
    smallest; `control`: of the same visits when nobody leaves. `wire`: the smallest schedule as
    HTTP requests, for repro.py; empty where no plain client can show it. `seen_again`: later
    schedules that contain it and broke the same. `after_s`: since the search began."""

    number: int
    broken: str
    said: str
    sentence: str
    evidence: dict[str, Any] = {}
    seed: int
    drawn_visits: int
    schedule: dict[str, Any]
    in_a_row: int = 1
    wire: dict[str, Any] = {}
    rate: Rate
    control: Rate
    is_fresh: bool  # the server was started afresh for each try
    is_sure: bool = False
    is_repeat: bool = False
    seen_again: int = 0
    after_s: float = 0.0
    took_s: float = 0.0

    @property
    def folder(self) -> str:
        return f"{self.number}-{self.broken}"


class SearchResult(msgspec.Struct, kw_only=True):
    """`played`: schedules that were drawn and played; `covered`: how often each phase, way and
    feature of a leave was among them, without requests that the server did not take."""

    walkaway: str
    started_at: str
    command: str
    seed: int
    target: ConformTarget
    machine: Machine
    minutes: float
    took_s: float = 0.0
    played: int = 0
    covered: dict[str, int] = {}
    facts: dict[str, Any] = {}
    findings: list[SearchFinding] = []
    sentence: str = ""
    end: str = ""
    exit_code: int = 0

    def write(self, folder: Path) -> None:
        data = msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"
        (folder / SEARCH_FILE).write_bytes(data)


def read_search(folder: Path) -> SearchResult:
    """Raises ConfigError."""
    file = folder / SEARCH_FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=SearchResult)
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be read: {in_words(error)}; name the folder that `walkaway search` "
            "wrote"
        ) from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{file} is no result of `walkaway search`: {in_words(error)}") from error
