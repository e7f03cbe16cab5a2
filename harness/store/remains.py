"""What is left of a run's folder in which files are missing or damaged.

Rows are worth a report whatever else is lost: a table that cannot be read is as one without rows,
and in place of the manifest stands the little that the summary says.
"""

import os
from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import msgspec

from harness.errors import ConfigError
from harness.records import ArmsSummary, Remark, Summary
from harness.store.manifest import Manifest, Status, TargetFacts
from harness.store.run_folder import RECORDS, OtherVersionError, RunFolder, read_results

if TYPE_CHECKING:
    import pandas as pd

NOT_KNOWN: Final = "not known"
MANIFEST: Final = "manifest.json"
OF_THE_MANIFEST: Final = "how the load, the server and the machine were set is not known"
OF_A_TABLE: Final = "what it held is in no picture; the figures are as they were judged with it"
OF_THE_REQUESTS: Final = (
    "without these rows there is nothing to draw; the figures that were judged are in summary.json"
)
OF_A_ROUND: Final = "it is in no picture; the figures are as they were judged with it"


class Remains(RunFolder):
    """Reads a run that was judged. `lost`: what could not be read, each with the reason and what
    that costs. Raises as any RunFolder without the requests or the summary, and for a file of
    another schema version."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.lost: dict[str, str] = {}

    @property
    def remarks(self) -> list[Remark]:
        return [Remark(level="warning", text=text) for text in self.lost.values()]

    def read_manifest(self) -> dict[str, Any]:
        try:
            RunFolder(self.path).load_manifest()
            return super().read_manifest()
        except OtherVersionError:
            raise
        except ConfigError as error:
            self._lose(MANIFEST, error, OF_THE_MANIFEST)
            content: dict[str, Any] = msgspec.to_builtins(stand_in(self.name, self.read_summary()))
            return content

    def frame(self, name: str, without: Container[str] = ()) -> "pd.DataFrame":
        try:
            return super().frame(name, without)
        except ConfigError as error:
            if name == "requests":
                raise ConfigError(f"{error}; {OF_THE_REQUESTS}") from error
            self._lose(f"{name}.parquet", error, OF_A_TABLE)
        from harness.store.parquet import empty_frame

        return empty_frame(RECORDS[name], without=without)

    def judged_runs(self) -> list[RunFolder]:
        found: list[RunFolder] = []
        for one in super().judged_runs():
            try:
                read_results(one)
                one.load_manifest()
            except ConfigError as error:
                self._lose(f"rounds/{one.name}", error, OF_A_ROUND)
            else:
                found.append(one)
        return found

    def _lose(self, name: str, error: ConfigError, cost: str) -> None:
        missing = not os.path.lexists(self.path / name)
        self.lost[name] = f"{name} is missing: {cost}" if missing else f"{error}: {cost}"


def stand_in(name: str, summary: Summary | ArmsSummary | None = None) -> Manifest:
    """The manifest of a run of which only its rows are left, and perhaps its summary."""
    known: tuple[Status, ...] = get_args(Status)
    arms = list(summary.arms) if isinstance(summary, ArmsSummary) else []
    target = TargetFacts(
        engine=(summary and summary.engine) or NOT_KNOWN,
        url=NOT_KNOWN,
        metrics_urls=[],
        model=(summary and summary.model) or NOT_KNOWN,
        started_by_us=False,
        spec={},
    )
    return Manifest(
        run_id=name,
        status=next((one for one in known if summary and one == summary.status), "interrupted"),
        created_at=NOT_KNOWN,
        command=[],
        seed=0,
        versions={},
        hardware={},
        workload={
            "name": (summary and summary.workload) or NOT_KNOWN,
            "load": {"kind": NOT_KNOWN},
            "arms": [{"name": arm} for arm in arms],
        },
        target=target,
        settle_s=0.0,
        scrape_interval_s=None,
    )
