"""Changes to the files of a made-up run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from tests.made_up.summaries import content_of_arms


def change(run: Path, name: str, **changes: Any) -> None:
    content = json.loads((run / name).read_text())
    (run / name).write_text(json.dumps(content | changes))


def change_metric(run: Path, name: str, **changes: Any) -> None:
    metrics = json.loads((run / "summary.json").read_text())["metrics"]
    change(run, "summary.json", metrics=metrics | {name: metrics.get(name, {}) | changes})


def change_workload(run: Path, **changes: Any) -> None:
    workload = json.loads((run / "manifest.json").read_text())["workload"]
    change(run, "manifest.json", workload=workload | changes)


def without_metrics(run: Path, *names: str) -> Path:
    metrics = json.loads((run / "summary.json").read_text())["metrics"]
    change(run, "summary.json", metrics={k: one for k, one in metrics.items() if k not in names})
    return run


def change_rows(run: Path, name: str, edit: Callable[[pd.DataFrame], pd.DataFrame]) -> None:
    file = run / f"{name}.parquet"
    edit(pd.read_parquet(file)).to_parquet(file)


def without_an_end(run: Path, request_id: str) -> None:
    """Take from its log what came after its user had left: the server still holds it."""

    def edit(log: pd.DataFrame) -> pd.DataFrame:
        is_end = log["event"].isin(["removed", "blocks_freed", "finished"])
        return log[~(is_end & (log["client_request_id"] == request_id))]

    change_rows(run, "lifecycle", edit)


def linked_copy(run: Path, to: Path) -> Path:
    """The run again, to be changed: its small files are copied, its rows are linked."""
    to.mkdir(parents=True)
    for file in run.glob("*.parquet"):
        (to / file.name).symlink_to(file)
    for file in run.glob("*.json"):
        (to / file.name).write_bytes(file.read_bytes())
    return to


def with_arms(run: Path, to: Path, *arms: str, **load: Any) -> Path:
    """The run as one round of each of these arms, with this `[load]`."""
    linked_copy(run, to)
    whole = json.loads((run / "summary.json").read_text())
    change(to, "summary.json", **content_of_arms(dict.fromkeys(arms, whole)))
    for arm in arms:
        change_workload(linked_copy(run, to / "rounds" / f"1-{arm}"), load=load)
    return to
