"""The page of `walkaway search`: what breaks when clients leave, how often, and how to see it."""

from collections import defaultdict
from pathlib import Path
from typing import Any, Final

from dashboards.figures.wire import tries
from dashboards.page import document, save
from harness.formatting import quantity
from harness.store.conform_result import read_wire_log
from harness.store.search_result import SearchFinding, SearchResult, read_search

_FILES: Final = ("repro.py", "issue.md", "schedule.json", "wire.jsonl")
_VERDICTS: Final = {0: ("good", "nothing found"), 3: ("bad", "found")}


def write_search(folder: Path, output: Path) -> None:
    result = read_search(folder)
    mark, answer = _VERDICTS.get(result.exit_code, ("unknown", result.end))
    html = document(
        "search.html.j2",
        {},
        result=result,
        server=" ".join(filter(None, (result.target.engine, result.target.version))),
        date=result.started_at[:16].replace("T", " "),
        mark=mark,
        answer=answer,
        took=quantity(result.took_s, "s"),
        played=quantity(result.played, "schedules"),
        findings=[_described(folder, one) for one in result.findings],
        **_coverage(result),
    )
    save(html, output)


def _described(folder: Path, one: SearchFinding) -> dict[str, Any]:
    place = folder / one.folder
    log = place / "wire.jsonl"
    drawn = tries(read_wire_log(log)) if log.is_file() else []
    return {
        "finding": one,
        "place": one.folder,
        "files": [name for name in _FILES if (place / name).is_file()],
        "visits": len(one.schedule.get("visits", ())),
        "after": quantity(one.after_s, "s"),
        "took": quantity(one.took_s, "s"),
        "pictures": [drawing for try_ in drawn[:1] for drawing in try_.drawings[-1:]],
    }


def _coverage(result: SearchResult) -> dict[str, Any]:
    """How often clients left in which way at which phase: `cells` by phase and way."""
    cells: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    features: dict[str, int] = defaultdict(int)
    for name, count in result.covered.items():
        phase, way, feature = name.split(", ")
        cells[phase][way] += count
        features[feature] += count
    ways = sorted({way for row in cells.values() for way in row})
    return {
        "ways": ways,
        "phases": [(phase, [row.get(way, 0) for way in ways]) for phase, row in cells.items()],
        "features": sorted(features.items(), key=lambda one: -one[1]),
    }
