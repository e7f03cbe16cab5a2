"""GPU counters of a loopback DCGM exporter, from its page to every place that shows figures."""

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.commands.index import app
from tests.conftest import ServePages
from tests.e2e.running import measure, set_flags

pytestmark = pytest.mark.e2e

LABELS = '{gpu="0",UUID="GPU-a",modelName="Card"}'
WATTS = 250
ABOUT = 0.05  # a busy machine answers late: a reading is of some moment during its request


def page(_: str) -> tuple[int, dict[str, str], bytes]:
    """A card that draws 250 W, and says its power in turns as 249 and 251."""
    now_s = time.perf_counter()
    lines = [
        f"DCGM_FI_DEV_GPU_UTIL{LABELS} 80",
        f"DCGM_FI_DEV_POWER_USAGE{LABELS} {WATTS + (-1) ** round(10 * now_s)}",
        f"DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{LABELS} {round(now_s * 1000 * WATTS)}",
    ]
    return 200, {}, "\n".join([*lines, ""]).encode()


def test_a_run_has_the_energy_of_its_load_its_tokens_and_its_cancels(
    serve_pages: ServePages, tmp_path: Path
) -> None:
    url = serve_pages(page)
    settings = set_flags("engine.runner=simulated", "run.max_seconds=4", "run.users=8")
    run = measure("demo", tmp_path / "run", *settings, "--gpu-metrics-url", url)
    metrics, manifest = run.metrics, run.manifest
    window = manifest["window"]
    load_s = (window["load_ended_ns"] - window["load_started_ns"]) / 1e9
    assert manifest["hardware"]["gpus"] == ["Card"]
    assert metrics["gpu_utilisation"]["mean"] == pytest.approx(0.8)
    assert metrics["gpu_power_w"]["mean"] == pytest.approx(WATTS, abs=1)
    assert metrics["gpu_energy_j"]["mean"] == pytest.approx(WATTS * load_s, rel=ABOUT)
    tokens = metrics["throughput_tps"]["mean"] * load_s
    assert metrics["energy_per_token_j"]["mean"] == pytest.approx(
        WATTS * load_s / tokens, rel=ABOUT
    )
    wasted, busy = metrics["energy_wasted_j"], metrics["gpu_seconds_after_abandon"]
    assert wasted["n"] == busy["n"] == run.summary["outcomes"]["abandoned"]
    assert wasted["mean"] == pytest.approx(WATTS * busy["mean"], rel=ABOUT)
    assert run.summary["not_measurable"]["gpu_memory_bytes"] == "the GPU does not show it"

    limits = tmp_path / "limits"
    limits.write_text("energy_wasted_j.mean < 9000\ngpu_power_w.mean < 100\n")
    gate = CliRunner().invoke(app, ["gate", str(run.folder), "--limits", str(limits), "--json"])
    verdicts = {one["name"]: one["verdict"] for one in json.loads(gate.stdout)["checks"]}
    assert verdicts["gpu_power_w.mean < 100"] == "fail"
    assert verdicts["energy_wasted_j.mean < 9000"] == "pass"
    report = (run.folder / "report.html").read_text()
    assert "energy_per_token_j" in report
    assert "During the load: GPU energy" in report
    trace = tmp_path / "trace.json"
    CliRunner().invoke(app, ["export", str(run.folder), "--trace", str(trace)])
    assert '"watts"' in trace.read_text()
