"""The page of a trend, read back with a parser: what is joined, marked and left out."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dashboards.__main__ import main
from dashboards.run_history import RunGroup, read_history, tracks
from harness.commands.index import app
from harness.store.run_folder import RunFolder
from tests.dashboards.reading import page_by
from tests.made_up.gated import (
    GOOD,
    ROWS,
    arm,
    manifest,
    save_night,
    save_nights,
    steps,
    summary_of_arms,
)

P50 = ("cancel_latency_s", "p50")


def group_in(folder: Path) -> RunGroup:
    ((group,), _) = read_history(folder)
    return group


def stretches(folder: Path, figure: tuple[str, str] = P50) -> list[list[float | None]]:
    (track,) = tracks(group_in(folder).runs)[figure]
    return [[point.value for point in part] for part in track.stretches()]


def server(**settings: Any) -> dict[str, Any]:
    return {"target": {"config": {"max_num_seqs": 12, "device": "cpu", **settings}}}


def test_one_run_is_said_to_be_so(tmp_path: Path) -> None:
    save_nights(tmp_path, [0.02])
    page = page_by("trend", tmp_path)
    assert "the first point of a trend" in page.body
    assert page.figures()["group0-cancel_latency_s-p50"]["data"][0]["y"] == [20, None]


@pytest.mark.parametrize(
    ("changes", "said", "joined"),
    [
        ({"hardware": {"cpu": "another", "cores": 2, "gpus": []}}, "different machines", False),
        ({"target": {"config": {"max_num_seqs": 16, "device": "cpu"}}}, "batch slots", False),
        ({"versions": {"walkaway": "2"}}, "different versions: walkaway None / 2", True),
        (server(watermark=0.1), "set up differently: watermark None / 0.1", True),
        (server(step_cost={"fixed_s": 0.02}), "set up differently: step_cost", False),
        (server(runner="torch"), "set up differently: runner None / torch", False),
        (server(faults={"lose-abort": 0.1}), "set up differently: faults", False),
        (server(faults={"lose-abort": 0.0}), "set up differently: faults", True),
    ],
)
def test_a_change_is_marked_and_breaks_the_line_where_it_must(
    tmp_path: Path, changes: dict[str, Any], said: str, joined: bool
) -> None:
    save_nights(tmp_path, [0.020, 0.021])
    save_night(tmp_path, 2, 0.022, **changes)
    before, after = [0.020, 0.021], [0.022]
    assert stretches(tmp_path) == ([before + after] if joined else [before, after])
    ((run, text),) = group_in(tmp_path).changes()
    assert run.name == "night-002"
    assert said in text


ANOTHER = {"hardware": {"cpu": "another", "cores": 2, "gpus": []}}
STEPS = ("cancel_latency_steps", "mean")


@pytest.mark.parametrize(
    ("changes", "figure", "found"),
    [
        (ANOTHER, STEPS, [[1, 1]]),  # steps are joined over machines, times are not
        (ANOTHER, P50, [[0.020], [0.040]]),
        (server(step_cost={"fixed_s": 0.02}), STEPS, [[1, 1]]),
        (server(step_cost={"fixed_s": 0.02}), P50, [[0.020], [0.040]]),
        (server(faults={"lose-abort": 0.1}), ("ghost_rate", "mean"), [[0], [0]]),
    ],
)
def test_a_line_joins_only_what_can_be_compared(
    tmp_path: Path, changes: dict[str, Any], figure: tuple[str, str], found: list[list[float]]
) -> None:
    save_night(tmp_path, 0, 0.020, others=GOOD)
    save_night(tmp_path, 1, 0.040, others=GOOD, **changes)
    assert stretches(tmp_path, figure) == found


def test_an_arm_is_held_to_the_conditions_of_its_own_runs(tmp_path: Path) -> None:
    """On the second night one of two arms has a fault."""
    for day in (0, 1):
        arms = {name: arm({"cancel_latency_steps": steps(1.0)}) for name in ("old", "new")}
        arms["new"] |= {"outcomes": {}}
        night = save_night(tmp_path, day, 0.02, of=summary_of_arms(arms), arms=("old", "new"))
        for name in ("old", "new"):
            of_arm = night / "rounds" / f"1-{name}"
            of_arm.mkdir(parents=True)
            if name == "old":
                RunFolder(of_arm).write_rows(ROWS)
            faults = {"lose-abort": 0.1 if (day, name) == (1, "new") else 0.0}
            content = manifest(("old", "new"), **server(faults=faults))
            (of_arm / "manifest.json").write_text(json.dumps(content))
    group = group_in(tmp_path)
    joined = {
        one.side: [len(part) for part in one.stretches()] for one in tracks(group.runs)[STEPS]
    }
    assert joined == {"old": [2], "new": [1, 1]}
    ((_, text),) = group.changes()
    assert text == "new: the engine is set up differently: faults.lose-abort 0.0 / 0.1"


def test_what_cannot_be_read_is_listed_by_name(tmp_path: Path) -> None:
    first, second, third, _ = save_nights(tmp_path, [0.020, 0.021, 0.022, 0.023])
    (first / "summary.json").write_text('{"run_id": ')
    (second / "summary.json").unlink()
    (third / "requests.parquet").write_bytes(b"PAR1 not really")
    (tmp_path / "notes").mkdir()
    (tmp_path / "a file").write_text("")
    page = page_by("trend", tmp_path)
    left_out = {text.split()[0] for text in page.texts("li") if str(tmp_path) in text}
    assert left_out == {first.name, second.name, third.name, "notes"}
    assert stretches(tmp_path) == [[0.023]]


def test_a_folder_without_a_run_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "trend.html"

    def said_of(folder: Path) -> str:
        assert main(["trend", str(folder), "-o", str(page)]) == 2
        assert not page.exists()
        return capsys.readouterr().err

    assert "none: cannot be read: No such file" in said_of(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    assert "empty: holds no folder of a run" in said_of(tmp_path / "empty")
    nothing = said_of(tmp_path)  # `empty` is a folder in it
    assert "the first of 1, empty: " in nothing
    assert "is not a run's folder" in nothing
    run = save_nights(tmp_path / "runs", [0.02])[0]
    assert "is a run itself; name the folder that holds this run and others" in said_of(run)
    result = CliRunner().invoke(app, ["trend", str(tmp_path / "none")])
    assert "none: no such folder" in str(result.exception)
