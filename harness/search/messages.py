"""The search's order to its load process (the first line of standard input), and the events that
the process reports, one JSON line each (on its standard output)."""

from typing import Any, Final, Literal

import msgspec

from harness.conform.messages import SuiteRequest
from harness.search.schedule import Schedule
from harness.store.search_result import SearchFinding

ALIVE_S: Final = 60.0  # between two events that only say that the process works


class SearchRequest(msgspec.Struct, kw_only=True):
    """`suite`: the server, as in an order of the conformance suite, without cases. `restart`: the
    command that starts the server afresh, with its arguments. `schedule`: the only one to play;
    then nothing is drawn. `log`: the server's own log."""

    suite: SuiteRequest
    seconds: float
    seed: int
    themes: list[str] = []
    restart: list[str] | None = None
    starts_first: bool = False  # no server runs yet
    schedule: Schedule | None = None
    log: str | None = None


class SearchEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`alive`: it works, though a wait takes long. `facts`: of the idle server. `played`: how many
    schedules so far, and what they covered. `doing`: what the search does now. `found`: a finding,
    and again when more is known of it. `over`: no more can be searched; `gone`: the server does not
    serve at all."""

    event: Literal["alive", "facts", "played", "doing", "found", "over", "gone"]
    facts: dict[str, Any] = {}
    played: int = 0
    covered: list[tuple[str, str, str]] = []
    doing: str = ""
    finding: SearchFinding | None = None
    why: str = ""
