"""The verdict on live against virtual, from summaries that are made up."""

import json
import tomllib
from pathlib import Path

import pytest

from harness.workload.workload import load_workload
from tools.truth import virtual


def finished(folder: Path, setting: virtual.Setting, how: str, wasted: float | None) -> None:
    metrics = {
        metric: dict.fromkeys(("mean", "p50", "p99"), 1.0)
        for metric, figure, _ in virtual.COMPARED
        if figure != "count"
    }
    summary = {
        "arrivals": None,
        "outcomes": {"abandoned": 3},
        "metrics": metrics | {"wasted_tokens": {"mean": wasted, "p99": 1.0}},
    }
    out = folder / f"{setting.name}-{how}"
    out.mkdir()
    (out / "summary.json").write_text(json.dumps(summary))


@pytest.mark.parametrize(("simulated", "status"), [(1.04, 0), (1.06, 1), (None, 1)])
def test_a_miss_ends_with_status_1(
    tmp_path: Path,
    simulated: float | None,
    status: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setting = virtual.draw(1, "seed", 60)
    finished(tmp_path, setting, "live", 1.0)

    def simulate(verb: str, *_arguments: str) -> None:
        assert verb == "simulate"
        finished(tmp_path, setting, "virtual", simulated)

    monkeypatch.setattr(virtual, "walkaway", simulate)
    asked = ["--settings", "1", "--seed", "seed", "--folder", str(tmp_path)]
    assert virtual.main([*asked, "--markdown", str(tmp_path / "table.md")]) == status
    said = capsys.readouterr().out
    assert ("missed: wasted_tokens, mean" in said) == bool(status)
    assert "`wasted_tokens`, mean | 1 |" in (tmp_path / "table.md").read_text()


@pytest.mark.parametrize("draws", [virtual.draw, virtual.draw_torch])
def test_what_is_drawn_is_a_workload(tmp_path: Path, draws: virtual.Draw) -> None:
    for number in range(20):
        setting = draws(number, "seed", 60)
        path = tmp_path / f"{setting.name}.toml"
        path.write_text(virtual.as_toml(setting.workload))
        assert tomllib.loads(path.read_text()) == setting.workload
        runner = load_workload(str(path)).engine.runner
        assert ("a model on the CPU" in setting.about) == (runner == "torch")
