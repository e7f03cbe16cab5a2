"""The stages behind `make gpu`: a failure stays its own, earlier results stay, and the table."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from harness.formatting import DASH
from tests.gpu.__main__ import KEPT, STAGES, execute, run_all
from tests.made_up.rows import made_up_manifest
from tests.made_up.summaries import made_up_summary


class Machine:
    """Runs nothing: a command ends with a given status, and leaves results if that is 0."""

    def __init__(self, **status: int) -> None:
        self.status = status
        self.commands: list[Sequence[str]] = []

    def __call__(self, command: Sequence[str], limit_s: float, output: Path | None) -> int:
        self.commands.append(command)
        status = next((code for name, code in self.status.items() if name in command), 0)
        if output is not None:
            output.write_text(f"said with {status}\n")
        elif status == 0:
            folder = Path(command[-1])
            folder.mkdir()
            power = {"unit": "W", "n": 1, "mean": 412.0, "method": "gauge"}
            contents = (
                made_up_manifest(),
                made_up_summary({"metrics": {"gpu_power_w": power}}),
                "a report",
            )
            for name, content in zip(KEPT, contents, strict=True):
                (folder / name).write_bytes(msgspec.json.encode(content))
        return status


def test_a_stage_that_fails_loses_its_own_results_alone(tmp_path: Path) -> None:
    good = ["tests", "demo", "cancel_steps"]
    assert run_all(good, tmp_path, rehearses=False, run=Machine()) == 0
    machine = Machine(demo=5, memory_pressure=124)
    assert run_all([*STAGES, "table"], tmp_path, rehearses=False, run=machine) == 1
    assert len(machine.commands) == len(STAGES), "those after a failure ran, too"
    stages = json.loads((tmp_path / "stages.json").read_text())
    results = {name: one["result"] for name, one in stages.items()}
    assert results == dict.fromkeys(STAGES, "good") | {
        "demo": "failed with status 5",
        "memory_pressure": "took too long",
    }
    kept = sorted(path.parent.name for path in tmp_path.glob("*/report.html"))
    assert kept == ["cancel_steps", "demo"]
    assert (tmp_path / "tests.txt").read_text() == "said with 0\n"


def test_the_table_shows_what_there_is_and_a_dash_for_what_is_not(tmp_path: Path) -> None:
    run_all(["demo"], tmp_path, rehearses=False, run=Machine())
    lines = (tmp_path / "README.md").read_text().splitlines()
    assert "| `gpu_power_w` mean | 412 W |" in lines
    assert f"| `energy_per_token_j` mean | {DASH} |" in lines
    assert not any("rehearsal" in line for line in lines)
    run_all(["demo"], tmp_path, rehearses=True, run=Machine())
    assert (
        "**A rehearsal on a CPU: no figure here is of a GPU.**"
        in (tmp_path / "README.md").read_text()
    )


def test_a_rehearsal_takes_the_same_way_on_the_cpu(tmp_path: Path) -> None:
    on_gpu, rehearsed = Machine(), Machine()
    run_all(list(STAGES), tmp_path / "gpu", rehearses=False, run=on_gpu)
    run_all(list(STAGES), tmp_path / "cpu", rehearses=True, run=rehearsed)
    for one, other in zip(on_gpu.commands, rehearsed.commands, strict=True):
        assert one[:3] == other[:3]
        assert ("--set=engine.device=cuda" in one) == ("--set=engine.device=cpu" in other)


def test_a_process_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    said = tmp_path / "said"
    wait = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert execute(wait, 0.01, said) == 124
    assert execute([sys.executable, "-c", "raise SystemExit(3)"], 60, said) == 3
