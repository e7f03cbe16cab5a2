"""The rows of our tab in Locust's page and of the live page: provisional, then final figures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from harness.formatting import DASH, bounded, in_all, number, quantity, unit_in_figure
from harness.metrics import METRICS
from harness.records import Metric, Outcome, Summary
from harness.run.live_figures import LAST

_ABOUT: Final = {
    "completed": "read to the end",
    "abandoned": "left on purpose, by plan: not a failure",
    "timed_out": "the user's patience ended",
    "rejected": "refused by the server (429, 503, 529)",
    "failed": "went wrong",
    "cut_off": "the test ended first",
}
_NO_PROBES: Final = (
    "not measured here: this workload sends no probes; walkaway run demo --web and walkaway run "
    "slot_recovery do"
)
_NO_LOG: Final = "this server has no lifecycle log: known once the run is judged"
_LAST: Final = f"p50, p99 of the last {LAST:,}"
_SHOWN_LEVELS: Final = frozenset({"invalid", "warning"})
NO_TEST: Final = "no test has been started yet; without a Host the bundled engine is started"
FINAL: Final = tuple(one for one in METRICS.values() if one.on_web_tab)
FILES: Final = {  # by what their addresses end in
    "live": Path(__file__).with_name("live.html"),
    "live.js": Path(__file__).with_name("live.js"),
    "live.css": Path(__file__).with_name("live.css"),
    "now.js": Path(__file__).with_name("now.js"),
}
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def progress_text(shown: Mapping[str, Any]) -> str:
    state, why = shown["state"], shown.get("why")
    if not_started := shown.get("not_started"):
        return f"no test was started: {not_started}"
    if state == "done" and why:
        return f"{why}; the run so far is judged and saved in {shown['folder']}"
    if why:
        return str(why)
    if state == "done" and shown.get("report") is None:
        return f"judged; its report could not be drawn: see {shown['folder']}/report.log"
    if state == "done":
        return f"judged: its report is at {shown['report_at']}"
    phase = str(shown.get("phase") or NO_TEST)
    if refused := shown.get("refused"):
        return f"not changed: {refused} ({phase})"
    return phase


def brief_text(shown: Mapping[str, Any]) -> str:
    """What stands next to a link to the report."""
    if shown.get("report") and not (shown.get("why") or shown.get("not_started")):
        return "the run is judged"
    return progress_text(shown)


def tab_rows(shown: Mapping[str, Any], *, reported: int) -> list[dict[str, str]]:
    """`reported`: all requests that the users' processes reported to Locust."""
    rows = [_row("run", str(shown.get("run") or ""), progress_text(shown)), *shown.get("rows", [])]
    elsewhere = reported - shown.get("requests", 0)
    if shown["state"] == "done" and elsewhere > 0:
        about = "their rows are on the workers' machines, and not in the figures"
        rows.append(_row("requests elsewhere", f"{elsewhere}", about))
    return rows


def live_rows(live: Mapping[str, Any]) -> list[dict[str, str]]:
    latency, refill, lag = live["latency_ms"], live["refill_ms"], live["lag_ms"]
    gauges: Mapping[str, float] = live["gauges"]
    no_log = None if live["has_log"] else _NO_LOG
    each = f"{_or_dash(live['wasted_each'])} each, {_or_dash(live['wasted_tokens'])} in all"
    return [
        *_outcome_rows(live["outcomes"]),
        _row(
            "cancel latency", _pair(latency), no_log or f"{_LAST} freed requests, none still held"
        ),
        _row("still held", _or_dash(live["held"]), no_log or "abandoned, not freed yet"),
        _row(
            "wasted tokens",
            DASH if no_log else each,
            no_log or "generated but not read; without requests still held",
        ),
        _row("slot refill", _pair(refill), no_log or "from a free slot to the next request in it"),
        _row("engine: running", _or_dash(gauges.get("running")), "requests in batch slots"),
        _row("engine: waiting", _or_dash(gauges.get("waiting")), "requests in the queue"),
        _row("preemptions", _or_dash(live["preemptions"]), "since the load began"),
        _row("client lag", _pair(lag), f"{_LAST} ticks: the floor of all times"),
    ]


def final_rows(summary: Summary, conformance: str | None) -> list[dict[str, str]]:
    rows = [
        _row(said.level, DASH, said.text)
        for said in summary.validity
        if said.level in _SHOWN_LEVELS
    ]
    rows += _outcome_rows(summary.outcomes)
    for one in FINAL:
        if one.name in summary.metrics:
            rows.append(_row(one.label, figure_text(summary.metrics[one.name]), one.shows))
        elif one.name == "slot_recovery_s":
            rows.append(_row(one.label, DASH, _NO_PROBES))
        elif one.name in summary.not_measurable:
            rows.append(
                _row(one.label, DASH, f"not measurable here: {summary.not_measurable[one.name]}")
            )
    if conformance is not None:
        rows.append(_row("conformance", *conformance.split(": ", 1)))
    return rows


def figure_text(metric: Metric) -> str:
    unit = unit_in_figure(metric.unit)
    if metric.p50 is None:
        return bounded(metric, "mean", unit=unit)
    quantiles = ", ".join(f"{q} {bounded(metric, q, unit=unit)}" for q in ("p50", "p99"))
    if metric.unit not in ("tokens", "J") or metric.mean is None:
        return quantiles
    each = bounded(metric, "mean", unit=unit)
    return f"{each} each, {in_all(metric, unit=unit)}; {quantiles}"


def _outcome_rows(outcomes: Mapping[str, int]) -> list[dict[str, str]]:
    return [
        _row(outcome.value.replace("_", " "), f"{outcomes.get(outcome.value, 0)}", _ABOUT[outcome])
        for outcome in Outcome
    ]


def _row(figure: str, value: str, about: str) -> dict[str, str]:
    return {"figure": figure, "value": value, "about": about}


def _pair(quantiles: Mapping[str, float | None]) -> str:
    if quantiles["p50"] is None or quantiles["p99"] is None:
        return DASH
    p50, p99 = (quantity(quantiles[q] / 1e3, "s") for q in ("p50", "p99"))  # type: ignore[operator]
    return f"p50 {p50}, p99 {p99}"


def _or_dash(value: float | None) -> str:
    return DASH if value is None else number(value)
