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
from tests.dashboards.reading import Page, page_by
from tests.made_up.gated import (
    GOOD,
    ROWS,
    arm,
    count,
    latency,
    manifest,
    save_night,
    save_nights,
    steps,
    summary_of_arms,
)

ANOTHER: dict[str, Any] = {"hardware": {"cpu": "another", "cores": 2, "gpus": []}}
P50 = ("cancel_latency_s", "p50")


def group_in(folder: Path) -> RunGroup:
    ((group,), _) = read_history(folder)
    return group


def stretches(folder: Path, figure: tuple[str, str] = P50) -> list[list[float | None]]:
    (track,) = tracks(group_in(folder).runs)[figure]
    return [[point.value for point in part] for part in track.stretches]


def rows_of(page: Page) -> list[str]:
    lines = page.content().splitlines()
    return [line.removeprefix("tr ") for line in lines if line.startswith("tr ")]


def server(**settings: Any) -> dict[str, Any]:
    return {"target": {"config": {"max_num_seqs": 12, "device": "cpu", **settings}}}


def test_what_got_worse_stands_first_with_its_date(tmp_path: Path) -> None:
    """Slower from the seventh night on, with another version; a leak in the last one."""
    for day, p50 in enumerate([0.020, 0.0201, 0.0199, 0.0202, 0.020, 0.0198, 0.030, 0.0301]):
        leaked = count(3 if day == 7 else 0, "slots")
        versions = {"walkaway": "2" if day > 5 else "1"}
        save_night(tmp_path, day, p50, others={**GOOD, "leaked_slots": leaked}, versions=versions)
    page = page_by("trend", tmp_path)
    assert page.texts("h1") == ["3 figures got worse in 8 runs"]
    first, _, leak = rows_of(page)[1:4]
    assert first == (
        "Cancel latency p50 \N{HEAVY MULTIPLICATION X} worse 20 ms 30 ms 1.5x "
        "2026-01-07 03:00, 2 runs night-006; different versions: walkaway 1 / 2"
    )
    assert leak.startswith("Leaked slots \N{HEAVY MULTIPLICATION X} worse 0 slots 3 slots")
    assert "Beyond a limit of the gate: 1 run, the newest among them." in page.body
    figures = page.figures()
    assert next(iter(figures)) == "group0-cancel_latency_s-p50"  # what changed is drawn first
    marks = {one["name"]: one for one in figures["group0-leaked_slots-mean"]["data"]}
    for name, symbol in (
        ("beyond a limit of the gate", "square-open"),
        ("worse from this run on", "x"),
    ):
        assert (marks[name]["marker"]["symbol"], marks[name]["y"]) == (symbol, [3])
    assert "worse since 2026-01-07, 20 ms to 30 ms" in page.alts()["group0-cancel_latency_s-p50"]
    levels = figures["group0-cancel_latency_s-p50"]["layout"]["shapes"][-2:]
    assert [(one["y0"], one["line"]["width"]) for one in levels] == [(30, 3), (20, 2)]


def test_what_another_machine_does_is_no_change(tmp_path: Path) -> None:
    for day, p50 in enumerate([0.020] * 6 + [0.030] * 6):
        save_night(tmp_path, day, p50, **(ANOTHER if day > 5 else {}))
    assert page_by("trend", tmp_path).texts("h1") == ["Nothing got worse in 12 runs"]


def test_a_ghost_among_the_newest_runs_is_worse_and_its_figure_open(tmp_path: Path) -> None:
    never = latency(0.02, p99=None, n_censored=20, lower_bounds={"p99": 2.0})
    for day in range(9):
        save_night(tmp_path, day, never if day > 5 else 0.02)
    rows = rows_of(page_by("trend", tmp_path))
    assert rows[1].startswith("Cancel latency p99 \N{HEAVY MULTIPLICATION X} worse 40 ms > 2 s")


def test_two_runs_are_too_few_for_a_trend(tmp_path: Path) -> None:
    save_nights(tmp_path, [0.02, 0.2])
    page = page_by("trend", tmp_path)
    assert page.texts("h1") == ["2 runs: too few for a trend"]
    assert "`walkaway compare` compares two" in page.body


def test_one_run_is_said_to_be_so(tmp_path: Path) -> None:
    save_nights(tmp_path, [0.02])
    page = page_by("trend", tmp_path)
    assert page.texts("h1") == ["1 run: too few for a trend"]
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
    joined = {one.side: [len(part) for part in one.stretches] for one in tracks(group.runs)[STEPS]}
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
