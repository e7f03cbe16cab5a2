"""The recorded runs, judged by the analysis of today."""

import shutil
from pathlib import Path
from typing import Final

from harness.run.rounds import complete_summary
from harness.store.run_folder import RunFolder

RECORDED: Final = Path(__file__).parent / "runs"


def judged_today(name: str, folder: Path) -> RunFolder:
    run = RunFolder(Path(shutil.copytree(RECORDED / name, folder / name)))
    complete_summary(run)
    return run
