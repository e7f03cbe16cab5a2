"""What a finding leaves for a maintainer: repro.py, which needs Python alone, and a draft of an
issue. Nothing is sent anywhere."""

import json
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from textwrap import fill, shorten
from typing import Any, Final
from urllib.parse import urlsplit

from harness.store.search_result import SearchFinding, SearchResult

REPRO: Final = "repro.py"
ISSUE: Final = "issue.md"
_WIDTH: Final = 96
_SENTENCE_PARTS: Final = 4  # of lines as long as the sentence needs: repro.py has 150 lines at most
_MOST_LINES: Final = 4  # of requests, one each; more are on one line
_TEMPLATE: Final = files("harness.search") / "repro.txt"


def write_repro(place: Path, finding: SearchFinding, result: SearchResult) -> None:
    """What a plain client cannot do, or cannot see, has only the draft."""
    (place / REPRO).unlink(missing_ok=True)
    if finding.wire:
        (place / REPRO).write_text(repro_text(finding, result), encoding="utf-8")
    (place / ISSUE).write_text(issue_text(finding, result), encoding="utf-8")


def repro_text(finding: SearchFinding, result: SearchResult) -> str:
    text = _TEMPLATE.read_text(encoding="utf-8")
    filled = _of_finding(finding) | _of_server(result) | _of_wire(finding.wire)
    for name, value in filled.items():
        text = text.replace(f"@{name}@", value)
    return text


def _of_finding(finding: SearchFinding) -> dict[str, str]:
    sentence = _harmless(finding.sentence)
    return {
        "SENTENCE": fill(sentence, max(_WIDTH, len(sentence) // _SENTENCE_PARTS)),
        "RATE": str(finding.rate),
        "FRESH": ", each on a server started afresh" if finding.is_fresh else "",
        "CONTROL": str(finding.control),
    }


def _of_server(result: SearchResult) -> dict[str, str]:
    url = result.target.url
    return {
        "WALKAWAY": result.walkaway,
        "SERVER": _harmless(_server(result)),
        "URL": _harmless(url),
        "PAGES": repr([_page(one, url) for one in result.target.metrics_urls]),
    }


def _of_wire(wire: Mapping[str, Any]) -> dict[str, str]:
    requests = [f"json.loads({_literal(one)})" for one in wire["requests"]]
    return {
        "SEEN_BY": wire["seen_by"],
        "SLOTS": str(wire["slots"]),
        "SETTLE_S": str(wire["settle_s"]),
        "PATIENCE_S": str(wire["patience_s"]),
        "GAUGES": repr("|".join(map(re.escape, wire["gauges"])) or "(?!)"),
        "SHORT": _literal(wire["short"]),
        "GREEDY": _literal(wire["greedy"]),
        "REQUESTS": (",\n    " if len(requests) <= _MOST_LINES else ", ").join(requests),
    }


def issue_text(finding: SearchFinding, result: SearchResult) -> str:
    fresh = " on a server started afresh" if finding.is_fresh else " on the server at rest"
    lines = [
        f"# {_title(finding)}",
        "",
        "## What happens",
        "",
        finding.sentence,
        "",
        f"Seen in {finding.rate} tries{fresh}. With the same requests and nobody leaving: in "
        f"{finding.control}.",
        "",
        "## Where",
        "",
        f"- server: {_server(result)}",
        f"- model: {result.target.model}",
        f"- machine: {result.machine.cpu}, {result.machine.cores} cores",
        f"- found by: walkaway {result.walkaway}, seed {finding.seed}",
        "",
        "## How to see it",
        "",
        "Start the server afresh, then:",
        "",
        f"    {_how(finding, result)}",
        "",
        "## What was expected",
        "",
        "A server lets go of a request when its client has left: no slot and no memory is held, "
        "the gauges read as before, and nobody else's answer is cut or changed.",
        "",
    ]
    return "\n".join(lines)


def _how(finding: SearchFinding, result: SearchResult) -> str:
    if finding.wire:
        return f"python3 {REPRO} {result.target.url}"
    if finding.schedule:
        return f"walkaway search --target {result.target.url} --schedule schedule.json"
    return f"walkaway search --target {result.target.url} --seed {result.seed}"


def _title(finding: SearchFinding) -> str:
    return shorten(f"After clients left: {finding.said}", _WIDTH, placeholder="…")


def _server(result: SearchResult) -> str:
    target = result.target
    return " ".join(filter(None, (target.engine, target.version, target.configuration)))


def _page(url: str, server: str) -> str:
    """A page of the server itself without its host, since repro.py may be given another one."""
    page = urlsplit(url)
    is_own = page.netloc == urlsplit(server).netloc
    return page._replace(scheme="", netloc="").geturl() if is_own else url


def _literal(value: Any) -> str:
    return repr(json.dumps(value))


def _harmless(text: str) -> str:
    """The text without what could end the string that it stands in."""
    return text.replace("\\", "/").replace('"', "'")
