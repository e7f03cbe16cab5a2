"""The page of a comparison, read back with a parser."""

from pathlib import Path

import pytest

from dashboards.__main__ import main
from tests.dashboards.reading import page_by
from tests.made_up.changed import change, change_metric, linked_copy, with_arms
from tests.made_up.run import save_judged


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A cancel of 11 ms in steps of 10 ms, and one of 31 ms in steps of 20 ms."""
    folder = tmp_path_factory.mktemp("judged")
    return (save_judged(folder / "before"), save_judged(folder / "after", step_ms=20, freed_ms=131))


@pytest.fixture
def runs(judged: tuple[Path, Path], tmp_path: Path) -> tuple[Path, Path]:
    before, after = (linked_copy(path, tmp_path / path.name) for path in judged)
    return before, after


def test_a_run_that_is_named_twice_has_two_names(runs: tuple[Path, Path]) -> None:
    before, after = runs
    page = page_by("compare", before, after, after, before)
    names = [trace["name"] for trace in page.figures()["arm0-curves"]["data"]]
    assert names == ["before", "after", "after (2)", "before (2)"]


def test_arms_are_compared_by_name(runs: tuple[Path, Path], tmp_path: Path) -> None:
    before = with_arms(runs[0], tmp_path / "x", "off", "on")
    after = with_arms(runs[1], tmp_path / "y", "on", "off", "more")
    page = page_by("compare", before, after)
    assert page.texts("h2")[:2] == ["Arm off", "Arm on"]
    assert {"arm0-curves", "arm1-curves"} <= set(page.figures())
    assert "1 y, arm on no clear difference" in page.texts("p")
    assert "left out y: arm more: only the candidate has it" in page.texts("li")


def test_a_run_of_another_question_is_left_out_and_told_of(runs: tuple[Path, Path]) -> None:
    before, after = runs
    other = linked_copy(after, after.parent / "other")
    change(other, "manifest.json", workload={"name": "soak"})
    old = linked_copy(after, after.parent / "old")
    change(old, "manifest.json", schema_version=0)
    left_out = [
        text
        for text in page_by("compare", before, after, other, old).texts("li")
        if "left out" in text
    ]
    assert "different workloads, `hand-made` and `soak`" in left_out[0]
    assert "schema version 0" in left_out[1]


def test_where_nothing_can_be_compared_there_is_no_page(
    runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    change(runs[1], "manifest.json", workload={"name": "soak"})
    output = runs[0] / "comparison.html"
    assert main(["compare", *map(str, runs), "-o", str(output)]) == 2
    assert "different workloads" in capsys.readouterr().err
    assert not output.exists()


def test_lost_rows_leave_the_curves_out_and_the_figures_in(runs: tuple[Path, Path]) -> None:
    for run in runs:
        (run / "lifecycle.parquet").unlink()
    page = page_by("compare", *runs)
    assert "arm0-curves" not in page.figures()
    assert "arm0-ratios" in page.figures()
    assert "No run has a log of single cancels." in page.body


@pytest.mark.parametrize(
    ("cancel", "recovery", "verdict"),
    [
        (2.0, 1.0, "worse"),
        (0.5, 1.0, "better"),
        (2.0, 0.5, "mixed"),
        (1.0, 1.0, "no clear difference"),
    ],
)
def test_the_verdict_and_its_figures_stand_first(
    runs: tuple[Path, Path], tmp_path: Path, cancel: float, recovery: float, verdict: str
) -> None:
    """Both figures are changed by a factor and known to ± 2 %."""
    after = linked_copy(runs[0], tmp_path / "changed")
    for run, factors in ((runs[0], (1.0, 1.0)), (after, (cancel, recovery))):
        for name, factor in zip(("cancel_latency_s", "ttft_s"), factors, strict=True):
            p50 = 0.010 * factor
            change_metric(run, name, p50=p50, p50_ci95=(0.98 * p50, 1.02 * p50))
    page = page_by("compare", runs[0], after)
    assert f"Verdict {verdict}" in page.texts("p")
    lines = [text for text in page.texts("li") if "Cancel latency p50: 10 ms to" in text]
    if cancel != 1.0:
        sign = "\N{HEAVY MULTIPLICATION X} worse" if cancel > 1 else "\N{BLACK CIRCLE} better"
        assert lines == [
            f"{sign} Cancel latency p50: 10 ms to {10 * cancel:g} ms, {cancel:g}x "
            f"(95 %: {lines[0].partition('95 %: ')[2].partition(')')[0]}), in steps {cancel:g}x"
        ]
    first = page.figures()["arm0-ratios"]
    marks = {one["name"]: one["marker"] for one in first["data"]}
    looks = {(one["symbol"][0], one["color"]) for one in marks.values()}
    assert len(looks) == len({symbol for symbol, _ in looks}) == len(marks)


def test_the_scale_of_the_ratios_is_in_sight_however_many_candidates(
    runs: tuple[Path, Path],
) -> None:
    page = page_by("compare", runs[0], *[runs[1]] * 20)
    drawn = {name: one for name, one in page.figures().items() if "ratios" in name}
    assert len(drawn) > 20
    assert {one["layout"]["xaxis"]["side"] for one in drawn.values()} == {"top"}
    assert max(one["layout"]["height"] for one in drawn.values()) < 700
    ranges = {name: str(one["layout"]["xaxis"]["range"]) for name, one in drawn.items()}
    assert len(set(ranges.values())) == 2  # as measured, and in steps
    assert len(page.texts("table")[0]) > 0
