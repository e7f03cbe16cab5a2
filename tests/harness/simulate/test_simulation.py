"""A simulated run is a run's folder like any other, and says everywhere that it is simulated."""

import json
from contextlib import suppress
from io import StringIO
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from dashboards.report import write_report
from harness.analysis.run_facts import THIN
from harness.commands.gate import GateOrder, gate_and_show
from harness.commands.run_table import print_summary
from harness.compare.comparison import compare_runs
from harness.errors import ConfigError, InterruptedRunError
from harness.export.library import Run, load_run
from harness.gate.run import read_run
from harness.run.pipeline import FinishedRun
from harness.run.process import Interruption
from harness.run.progress import Progress
from harness.run.run_config import RunConfig
from harness.simulate.simulation import Computing, resolve_simulation, simulate

pytestmark = pytest.mark.e2e

SHORT = ["arrivals.seconds=10", "run.max_seconds=14", "settle.seconds=1"]
NAME = "simulated (cost model sim_fixed_ms=10)"


def simulated(out: Path, *settings: str, processes: int = 1) -> FinishedRun:
    config = RunConfig(workload="open_loop", settings=[*SHORT, *settings], out=out)
    return simulate(
        resolve_simulation(config),
        progress=Progress(),
        interruption=Interruption(),
        computing=Computing(processes=processes),
        draws=False,
    )


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("simulated") / "clean"
    assert simulated(folder).failure is None
    return folder


@pytest.fixture(scope="module")
def run(clean: Path) -> Run:
    return load_run(clean)


def test_its_figures_are_exact(run: Run) -> None:
    assert run.manifest.status == "complete"
    assert run.outcomes["abandoned"] > 10
    assert run.metrics["cancel_latency_steps"].max in (1, 2)
    assert run.metrics["ghost_rate"].mean == 0
    assert run.metrics["leaked_blocks"].mean == 0
    assert run.metrics["throughput_tps"].method == "exact"
    assert run.manifest.arrivals is not None
    assert run.manifest.arrivals.planned == len(run.requests)


def test_it_says_everywhere_that_it_is_simulated(
    clean: Path, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert str(run.summary.simulated) == NAME
    assert json.loads((clean / "summary.json").read_bytes())["simulated"]["cost_model"]
    table = StringIO()
    print_summary(Console(file=table, width=200), run.whole, shows_all=False)
    assert NAME in table.getvalue()
    page = tmp_path / "report.html"
    write_report([clean], page)
    assert f"<strong>{NAME}</strong>" in page.read_text()
    limits, markdown, junit = (tmp_path / name for name in ("limits", "gate.md", "gate.xml"))
    limits.write_text("ghost_rate.mean <= 0\n")
    order = GateOrder(run=clean, limits=limits, markdown=markdown, junit=junit)
    gate_and_show(order, as_json=True, quiet=False)
    said = (capsys.readouterr().out, markdown.read_text(), junit.read_text())
    with pytest.raises(ConfigError, match="at least 3: walkaway simulate open_loop --set"):
        gate_and_show(
            GateOrder(run=clean, limits=limits, saves_baseline=True), as_json=False, quiet=True
        )
    assert all(NAME in one for one in said)


def test_a_comparison_with_another_cost_model_says_so(run: Run, tmp_path: Path) -> None:
    slower = tmp_path / "slower"
    simulated(slower, "engine.sim_fixed_ms=12")
    (comparison,) = compare_runs(run, load_run(slower))
    said = " ".join(one.text for one in comparison.remarks)
    assert NAME in said
    assert "simulated (cost model sim_fixed_ms=12)" in said
    mine, theirs = (read_run(path).conditions for path in (run.path, slower))
    assert mine.engine != theirs.engine


def test_equal_seeds_give_equal_bytes_over_two_processes(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder, processes in zip(folders, (1, 2), strict=True):
        simulated(folder, "simulate.replicas=2", "arrivals.rate=20", processes=processes)
    for name in ("requests", "lifecycle", "steps"):
        first, second = ((folder / f"{name}.parquet").read_bytes() for folder in folders)
        assert first == second, name
    workers = pq.read_table(folders[0] / "steps.parquet", columns=["worker"])["worker"]
    assert set(workers.to_pylist()) == {"worker-0", "worker-1"}


@pytest.mark.parametrize("ends", ["load.stop_after_abandons=2", "arrivals.max_streams=1"])
def test_all_planned_requests_were_sent_or_are_missed(ends: str, tmp_path: Path) -> None:
    simulated(tmp_path / "run", "simulate.replicas=2", "arrivals.rate=20", ends)
    run = load_run(tmp_path / "run")
    arrivals = run.manifest.arrivals
    assert arrivals is not None
    assert arrivals.missed is not None
    missed = len(arrivals.missed.to_stay_s) + len(arrivals.missed.to_leave_s)
    assert arrivals.planned == len(run.requests) + missed
    assert (missed > 0) is ends.startswith("arrivals")


@pytest.mark.parametrize(
    ("fault", "metric", "least"),
    [("lose-abort=1", "ghost_rate", 1.0), ("leak-blocks=2", "leaked_blocks", 2.0)],
)
def test_a_planted_fault_turns_the_gate_red(
    fault: str, metric: str, least: float, tmp_path: Path
) -> None:
    folder, limits = tmp_path / "bad", tmp_path / "limits"
    simulated(folder, f'engine.faults=["{fault}"]')
    mean = load_run(folder).metrics[metric].mean
    assert mean is not None
    assert mean >= least
    limits.write_text(f"{metric}.mean <= 0\n")
    assert gate_and_show(GateOrder(run=folder, limits=limits), as_json=False, quiet=True) == 3


def test_an_abort_that_is_delayed_shows_as_set_and_turns_the_gate_red(tmp_path: Path) -> None:
    folder, clean, limits = (tmp_path / name for name in ("late", "clean", "limits"))
    seldom = ["arrivals.rate=2", "arrivals.seconds=60", "run.max_seconds=64"]
    seldom += ["gate.min_abandons=20"]
    simulated(folder, 'engine.faults=["delay-abort=0.3"]', *seldom)
    simulated(clean, *seldom)
    latency = load_run(folder).metrics["signal_s"]
    assert latency.p50 == pytest.approx(0.3, abs=0.02)
    limits.write_text("cancel_latency_s.p50 <= 0.2\n")
    for run, code in ((folder, 3), (clean, 0)):
        assert gate_and_show(GateOrder(run=run, limits=limits), as_json=False, quiet=True) == code


def test_thin_rows_say_what_they_cannot(tmp_path: Path) -> None:
    thin, whole = tmp_path / "thin", tmp_path / "whole"
    cluster = ["simulate.replicas=4", "simulate.simulated=2", "arrivals.rate=40"]
    simulated(thin, *cluster, "simulate.keep=thin")
    simulated(whole, *cluster)
    lean, full = load_run(thin), load_run(whole)
    lost = {name for name, why in lean.not_measurable.items() if why == THIN}
    assert {"itl_s", "wasted_after_close_tokens", "gpu_seconds_after_abandon"} <= lost
    kept = lean.metrics.keys() & full.metrics.keys()
    assert {"wasted_tokens", "cancel_latency_s", "throughput_tps", "tpot_s"} <= kept
    assert all(lean.metrics[name] == full.metrics[name] for name in kept)
    over = lean.whole.breakdown["over_replicas"]["throughput_tps"]["mean"]
    assert over["n"] == 2
    assert over["whole"] == pytest.approx(4 * over["mean"])


def test_the_engine_refuses_its_settings_and_nothing_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "refused"
    with pytest.raises(ConfigError) as refused:
        simulated(folder, "engine.max_num_batched_tokens=4")
    assert "max_num_batched_tokens (4) must be at least" in str(refused.value)
    assert not folder.exists()


def test_ctrl_c_keeps_what_was_simulated(tmp_path: Path) -> None:
    folder, interruption = tmp_path / "cut", Interruption()

    class AtOnce(Progress):
        def phase(self, text: str) -> None:
            interruption.requested |= text.startswith("simulating")

    config = RunConfig(workload="cluster", settings=["simulate.simulated=1"], out=folder)
    with suppress(InterruptedRunError):
        finished = simulate(
            resolve_simulation(config),
            progress=AtOnce(),
            interruption=interruption,
            computing=Computing(),
            draws=False,
        )
    if not folder.exists():  # before its first moment
        return
    assert isinstance(finished.failure, InterruptedRunError)
    assert "virtual time had come to" in str(finished.failure)
    assert load_run(folder).manifest.status == "interrupted"


def test_an_interrupted_run_is_of_the_cells_that_had_begun(tmp_path: Path) -> None:
    folder = tmp_path / "cut"

    class InTheSecondCell(Interruption):
        def __init__(self) -> None:
            pass

        @property
        def requested(self) -> bool:  # type: ignore[override]
            return (folder / "cell-1").exists()

    settings = ["simulate.replicas=4", "arrivals.rate=60", "arrivals.seconds=300"]
    order = RunConfig(workload="open_loop", settings=[*settings, "run.max_seconds=300"], out=folder)
    finished = simulate(
        resolve_simulation(order),
        progress=Progress(),
        interruption=InTheSecondCell(),
        computing=Computing(),
        draws=False,
    )
    said = "interrupted when virtual time had come to 0.0 s of 300 s, and 1 of 4 cells were whole"
    assert str(finished.failure) == said
    run = load_run(folder)
    assert run.manifest.simulated is not None
    assert (run.manifest.simulated.simulated, run.manifest.simulated.replicas) == (2, 4)
    assert run.manifest.target is not None
    config = run.manifest.target.config or {}
    assert config["workers"] == ["worker-0", "worker-1"]
    assert run.manifest.arrivals is not None
    missed = run.manifest.arrivals.missed  # of both cells, and none of the others
    num_missed = len(missed.to_stay_s) + len(missed.to_leave_s)
    assert run.manifest.arrivals.planned == len(run.requests) + num_missed
    assert max(missed.to_stay_s) < 300


def test_an_outage_leaves_users_of_a_closed_loop_with_requests(tmp_path: Path) -> None:
    folder = tmp_path / "outage"
    died = "simulate.outages=[{at_s=1, kind='die', share=1, back_after_s=10}]"
    cluster = ["simulate.replicas=2", "simulate.router=least_loaded", died]
    simulated(folder, 'arrivals={kind="closed"}', *cluster, "load.answer_tokens=1000")
    run = load_run(folder)
    assert run.outcomes["rejected"] > 10
    assert not [one for one in run.whole.validity if one.level == "invalid"]
    assert run.requests["sent_ns"].max() > 13e9  # they ask again when the replicas are back
