"""One call of `make gpu`: the stages in turn, each in its box, and the table after each."""

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from shutil import rmtree
from typing import Final

from tools.gpu.boxed import RunInBox
from tools.gpu.results import SAID, Results, StageOutcome, judge
from tools.gpu.stages import DEVICE, FIGURES, ROOT, STAGES, GpuStage, arguments
from tools.gpu.table import page

NO_DEVICE: Final = 2  # the exit status of the device's stage
_LAST_LINES: Final = 15


class NoDeviceError(RuntimeError):
    """There is nothing to measure on; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """`base` has a folder for each card; `missing`: the packages that each stage lacks."""

    base: Path
    rehearses: bool
    missing: Mapping[str, Sequence[str]]
    run: RunInBox
    say: Callable[[str], None]
    now: Callable[[], datetime]

    def measure(self, names: Iterable[str], *, only_not_good: bool) -> int:
        """Run the device's stage, then these stages; with `only_not_good` without stages that are
        good in the card's folder. Returns the exit status; raises NoDeviceError."""
        looked = self._run(STAGES[DEVICE])
        results = Results(self.base / folder_name(self._work(STAGES[DEVICE])))
        outcomes = [self._keep(results, STAGES[DEVICE], looked)]
        if only_not_good:
            names = [name for name in names if name in results.not_good()]
        for stage in (STAGES[name] for name in names if name != DEVICE):
            outcome = self._skipped(stage) or self._run(stage)
            outcomes.append(self._keep(results, stage, outcome))
        write_table(results)
        self.say(f"the table: {results.folder / 'README.md'}")
        if left := [name for name in results.not_good() if name in results.stages]:
            self.say(f"not good: {', '.join(left)}; STAGE=rest runs these again")
        return int(any(outcome.is_failure for outcome in outcomes))

    def _skipped(self, stage: GpuStage) -> StageOutcome | None:
        lacks = self.missing[stage.name]
        return StageOutcome("skipped", False, f"lacks {', '.join(lacks)}") if lacks else None

    def _run(self, stage: GpuStage) -> StageOutcome:
        work = self._work(stage)
        rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        self.say(f"{stage.name}: {stage.about}; at most {stage.box_s:.0f} s")
        # Paths within the project stay relative, as they land in manifests.
        place = work.relative_to(ROOT) if work.is_relative_to(ROOT) else work
        ended = self.run(
            [sys.executable, *arguments(stage, place, rehearses=self.rehearses)],
            root=ROOT,
            said=work / SAID,
            box_s=stage.box_s,
            grace_s=stage.grace_s,
        )
        said = (work / SAID).read_text(errors="replace").strip()
        if stage.name == DEVICE and ended.status == NO_DEVICE and not ended.was_stopped:
            raise NoDeviceError(said.splitlines()[-1])
        outcome = judge(stage, work, ended)
        if outcome.result == "failed":
            self.say("\n".join(f"    {line}" for line in said.splitlines()[-_LAST_LINES:]))
        return outcome

    def _keep(self, results: Results, stage: GpuStage, outcome: StageOutcome) -> StageOutcome:
        at = self.now().isoformat(timespec="seconds")
        results.take(stage, outcome, self._work(stage), at=at)
        try:
            write_table(results)
        except Exception as error:  # noqa: BLE001  no bug of the table may cost the next stages
            self.say(f"the table could not be written: {error!r}")
        took = f" in {outcome.seconds:.0f} s" if outcome.seconds else ""
        remark = f": {outcome.note}" if outcome.note else ""
        self.say(f"{stage.name}: {outcome.result}{took}{remark}")
        return outcome

    def _work(self, stage: GpuStage) -> Path:
        return self.base / ".work" / stage.name


def folder_name(work: Path) -> str:
    """The card's, as the device's stage has left it in `work`: "NVIDIA H200" is nvidia-h200."""
    file = work / FIGURES["device"][0]
    card = json.loads(file.read_text())["card"] if file.exists() else "unknown card"
    return re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")


def write_table(results: Results) -> None:
    (results.folder / "README.md").write_text(page(results))


def write_tables(base: Path) -> list[Path]:
    """Writes the tables of all cards. Returns their files."""
    folders = [file.parent for file in sorted(base.glob("*/stages.json"))]
    for folder in folders:
        write_table(Results(folder))
    return [folder / "README.md" for folder in folders]
