"""A card's folder: what each stage has left there, and how its last try ended (`stages.json`).

A stage that is good replaces what it left before. Any other replaces only what was not whole
either; else what it said goes into `failure/`, next to the figures.
"""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from tools.gpu.boxed import BoxEnd
from tools.gpu.stages import FIGURES, STAGES, GpuStage

Result = Literal["good", "too slow", "failed", "skipped"]

SAID: Final = "said.txt"
_STAGES_FILE: Final = "stages.json"
_LONGEST_LOG: Final = 65_536  # bytes, from its end
# Patterns of pytest's last line, and of what it says about each test that it skipped.
_TESTS_ENDED: Final = re.compile(r"\d+ (?:passed|failed|skipped|errors?)\b.* in .*")
_WHY_SKIPPED: Final = re.compile(r"^SKIPPED \[\d+\] \S+: (.*)", re.MULTILINE)


class StageOutcome(NamedTuple):
    """`has_figures`: something can be read off, whole or not."""

    result: Result
    has_figures: bool
    note: str
    seconds: float = 0.0

    @property
    def is_failure(self) -> bool:
        """A stage that was too slow is none if it has left something."""
        return self.result == "failed" or (self.result == "too slow" and not self.has_figures)


def judge(stage: GpuStage, work: Path, ended: BoxEnd) -> StageOutcome:
    has_figures, last = _has_figures(stage, work), _last_line(work / SAID)
    if ended.was_stopped:
        left = ": the figures are of what it had by then" if has_figures else ", with nothing yet"
        return StageOutcome(
            "too slow", has_figures, f"interrupted near the end of its box{left}", ended.seconds
        )
    if ended.status == 0 and stage.kind == "tests" and not has_figures:
        return StageOutcome("skipped", False, f"all skipped: {_why_skipped(work)}", ended.seconds)
    if ended.status == 0 and has_figures:
        return StageOutcome("good", True, last if stage.kind == "tests" else "", ended.seconds)
    note = f"exit status {ended.status}: {last}"
    return StageOutcome("failed", has_figures, note, ended.seconds)


def _has_figures(stage: GpuStage, work: Path) -> bool:
    """Tests have figures if one of them has run to an end."""
    if stage.kind == "tests":
        said = _TESTS_ENDED.findall((work / SAID).read_text(errors="replace"))
        return bool(said) and re.search("passed|failed|error", said[-1]) is not None
    file = stage.leaves_in(work) / FIGURES[stage.kind][0]
    return file.exists() and file.stat().st_size > 0


def _why_skipped(work: Path) -> str:
    reasons = _WHY_SKIPPED.findall((work / SAID).read_text(errors="replace"))
    return "; ".join(dict.fromkeys(reasons)) or "pytest does not say why"


def _last_line(file: Path) -> str:
    lines = file.read_text(errors="replace").strip().splitlines()
    return lines[-1].strip("= ")[:300] if lines else "it said nothing"


class Results:
    """`stages`: by name, in order of worth, what `stages.json` says."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        file = folder / _STAGES_FILE
        self.stages: dict[str, dict[str, Any]] = (
            json.loads(file.read_text()) if file.exists() else {}
        )

    @property
    def device(self) -> Mapping[str, Any]:
        file = self.folder / "device" / FIGURES["device"][0]
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        return found

    def not_good(self) -> list[str]:
        return [name for name in STAGES if self.stages.get(name, {}).get("result") != "good"]

    def take(self, stage: GpuStage, outcome: StageOutcome, work: Path, *, at: str) -> None:
        """Keep what a stage has left in `work`."""
        before = self.stages.get(stage.name, {})
        is_good = outcome.result == "good"
        kept: dict[str, str | None]
        if is_good or (outcome.has_figures and before.get("figures") != "whole"):
            kept = {"figures": "whole" if is_good else "part", "figures_at": at}
            _copy(stage, work, self.folder / stage.name, stage.keeps)
        else:
            kept = {key: before.get(key) for key in ("figures", "figures_at")}
            if outcome.result != "skipped":
                _copy(stage, work, self.folder / stage.name / "failure", ())
        entry = {
            "result": outcome.result,
            "note": outcome.note,
            "seconds": round(outcome.seconds, 1),
            "box_s": stage.box_s,
            "at": at,
            **kept,
        }
        noted = {**self.stages, stage.name: entry}
        self.stages = {name: noted[name] for name in STAGES if name in noted}
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / _STAGES_FILE).write_text(json.dumps(self.stages, indent=2) + "\n")


def _copy(stage: GpuStage, work: Path, folder: Path, figures: Sequence[str]) -> None:
    """These files, and the ends of all logs."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    left = stage.leaves_in(work)
    for file in (left / name for name in figures):
        if file.exists():
            shutil.copy(file, folder)
    for log in (work / SAID, *left.glob("*.log"), *left.glob("traceback.txt")):
        (folder / log.name).write_bytes(log.read_bytes()[-_LONGEST_LOG:])
