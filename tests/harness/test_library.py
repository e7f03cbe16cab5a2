"""Runs as values: what is in a run's folder, typed; and the examples of docs/library.md."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from pyarrow import Field
from pyarrow.parquet import ParquetFile

import harness
from harness.compare.comparison import compare_runs
from harness.errors import ConfigError
from harness.run.rounds import write_pooled_summary
from harness.store.parquet import _read_column
from harness.store.run_folder import RunFolder
from tests.made_up.run import RunBuilder, save_judged

DOCUMENT = Path("docs/library.md")


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_judged(tmp_path_factory.mktemp("judged"))


@pytest.fixture
def saved(judged: Path, tmp_path: Path) -> Path:
    """A run of one abandoned and one completed request, judged; a copy to be spoilt."""
    return Path(shutil.copytree(judged, tmp_path / "results" / "my-run"))


def test_a_run_is_typed_and_its_rows_and_figures_are_frames(saved: Path) -> None:
    run = harness.load_run(str(saved))
    assert run.manifest.run_id == "made-up"
    assert run.outcomes["abandoned"] == 1
    assert run.metrics["cancel_latency_s"].p50 == pytest.approx(0.011)
    assert "probe" in run.not_measurable["slot_recovery_s"]
    assert repr(run) == f"<Run made-up: complete, {saved}>"
    assert list(run.requests["request_id"]) == ["a", "b"]
    assert (len(run.steps), run.server_metrics.empty) == (12, True)
    assert "blocks_freed" in set(run.lifecycle["event"])
    assert run.cancellations["cancel_latency_s"].tolist() == pytest.approx([0.011])
    figures = run.figures.set_index("metric")
    assert figures.loc["cancel_latency_s", "p50"] == pytest.approx(0.011)
    assert figures.loc["ghost_rate", ["p50"]].isna().all()


def test_a_run_with_arms_has_the_figures_of_each(judged: Path, tmp_path: Path) -> None:
    folder = RunFolder.claim(tmp_path / "whole")
    for arm in ("off", "on"):
        shutil.copytree(judged, folder.rounds / f"1-{arm}")
    manifest = RunBuilder(folder.path).manifest
    manifest.workload = {
        "name": "hand-made",
        "arms": [{"name": "off"}, {"name": "on"}],
        "run": {"rounds": 1, "reference_arm": None},
        "headlines": [],
    }
    folder.write_manifest(manifest)
    write_pooled_summary(folder)
    run = harness.load_run(folder.path)
    assert run.arms["on"].metrics["cancel_latency_s"].p50 == pytest.approx(0.011)
    assert set(run.figures["arm"]) == {"off", "on"}
    assert run.rounds["1-off"].metrics["cancel_latency_s"].n == 1
    with pytest.raises(ConfigError, match=r"take one of run\.arms \(off, on\)"):
        _ = run.metrics
    with pytest.raises(ConfigError, match=r"one of run\.rounds"):
        _ = run.requests


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("manifest.json", None, "manifest.json: cannot be read"),
        ("summary.json", None, "walkaway report"),
        ("summary.json", "[]", "holds no JSON object"),
        ("summary.json", "{}", "has no `schema_version`"),
        ("manifest.json", '{"schema_version": 99}', "schema version 99"),
    ],
)
def test_a_folder_that_cannot_be_read_is_refused(
    saved: Path, name: str, content: str | None, message: str
) -> None:
    file = saved / name
    file.unlink() if content is None else file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        harness.load_run(saved)


def test_the_examples_of_the_document_run(
    saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
    monkeypatch.chdir(saved.parent.parent)
    exec("\n".join(examples), {})
    printed = capsys.readouterr().out
    assert printed.startswith("How long?\n")
    assert "0.011 exact point" in printed
    assert printed.endswith("55.0 ms\n")


def test_importing_the_package_loads_nothing() -> None:
    script = """
import sys, harness
light = 'pandas' not in sys.modules
assert harness.load_run and not hasattr(harness, 'nothing')
print(light, 'pandas' in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["True", "True"]


def test_what_is_not_looked_at_is_not_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def watched(file: ParquetFile, field: Field) -> pd.Series:
        read.append(field.name)
        return _read_column(file, field)

    monkeypatch.setattr("harness.store.parquet._read_column", watched)
    run = harness.load_run(saved)
    assert run.figures.shape[0]
    assert read == []
    assert compare_runs(run, harness.load_run(saved))[0].shifts
    assert "sent_ns" in read
    assert "token_times_ns" not in read
    assert "event_tokens" not in read
    assert "token_times_ns" in run.requests
