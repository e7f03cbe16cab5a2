"""The suite's order to its load process (the first line of standard input), and the events that the
process reports, one JSON line each (on its standard output)."""

from typing import Any, Literal

import msgspec

from harness.store.conform_result import CaseResult


class UpstreamAt(msgspec.Struct, kw_only=True):
    """The bundled upstream behind a gateway. `log`: its file, on this machine."""

    url: str
    port: int
    log: str
    step_s: float


class SuiteRequest(msgspec.Struct, kw_only=True):
    """`plan`: a LoadPlan. `slots`: None if they are still to be counted. `folder`: of the results.
    `metrics_urls`: pages for the cases that judge the server's own counters, and for no others;
    empty if no metric of these pages is understood. `page_urls`: the pages, understood or not.
    `gentle_s`: how long to watch a server in use, instead of any case. `upstream`: given if the
    cases judge a gateway before it."""

    plan: msgspec.Raw
    cases: list[str]
    folder: str
    settle_s: float
    tries: int
    quick: bool
    seed: int
    left: int = 0  # clients, in cases of an earlier load process
    slots: int | None = None
    context: int | None = None
    metrics_urls: list[str] = []
    page_urls: list[str] = []
    pid: int | None = None
    direct: str | None = None
    adapter: str | None = None
    gentle_s: float | None = None
    upstream: UpstreamAt | None = None
    usage: dict[str, Any] | None = None  # a UsageSource


class SuiteEvent(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`case`: as soon as it is decided, and again when it is known what it left behind. `so_far`:
    what is known of a case that still runs. `unusable`: no further case can be decided; `gone`: the
    server does not serve."""

    event: Literal["facts", "started", "so_far", "case", "unusable", "gone"]
    facts: dict[str, Any] = {}  # slots, step_s, ttft_s, lag_s, settle_s
    id: str = ""
    case: CaseResult | None = None
    why: str = ""
