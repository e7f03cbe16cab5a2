"""All cells of a plan: here, over processes, over Ray; stopped early; refused."""

import itertools
import re
import signal
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

from reference_engine.config import EngineConfigError
from reference_engine.simulate.cluster import gathered, here, over_processes, rarely
from reference_engine.simulate.memory import (
    Asked,
    asked_of,
    cell_bytes,
    check_memory,
    needed_bytes,
)
from reference_engine.simulate.plan import CellPlan, PlanError, engine_settings
from reference_engine.simulate.progress import Board, Line, Reached
from reference_engine.simulate.rows import CellFacts
from tests.reference_engine.simulate.made_plans import asked, open_loop, write_plan


def _board(lines: list[str], num_cells: int = 2) -> Board:
    seconds = itertools.count()
    return Board(num_cells, 5.0, write=lines.append, clock_s=lambda: float(next(seconds)))


def _bytes(folder: Path) -> dict[str, bytes]:
    found = folder.glob("cell-*/*")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "reference_engine.simulate", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.e2e
def test_processes_write_the_bytes_of_one(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    lines = list[str]()
    for folder in (one, two):
        write_plan(folder)
    facts = here(one, [0, 1], _board(lines), Event())
    assert facts == over_processes(two, [0, 1], _board([]), Event(), processes=2)
    assert [one.complete for one in facts] == [True, True]
    assert len(_bytes(one)) == 8
    assert _bytes(one) == _bytes(two)
    assert not list(tmp_path.glob("*/*/*.part"))
    cells = [(one / f"cell-{n}" / "requests.parquet").read_bytes() for n in (0, 1)]
    assert cells[0] != cells[1]


@pytest.mark.slow
@pytest.mark.e2e
def test_ray_writes_the_same_bytes(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    one, ray = tmp_path / "one", tmp_path / "ray"
    for folder in (one, ray):
        write_plan(folder)
    here(one, [0, 1], _board([]), Event())
    done = _run(ray, "--ray", "local")
    assert (done.returncode, done.stderr) == (0, "")
    assert _bytes(one) == _bytes(ray)


@pytest.mark.slow
@pytest.mark.e2e
def test_over_ray_a_plan_that_cannot_be_simulated_is_refused_alike(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    write_plan(tmp_path, num_cells=1, rows=[asked(0, prompt_tokens=600)])
    done = _run(tmp_path, "--ray", "local")
    assert done.returncode == 2
    assert "have 630 tokens, more than max_model_len (512)" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.glob("cell-*"))


def test_a_stopped_cell_keeps_its_rows_and_says_how_far_it_came(tmp_path: Path) -> None:
    rows = [one for cell in (0, 1) for one in open_loop(cell, num_requests=600)]
    write_plan(tmp_path, rows=rows, load_s=30.0)
    stop = Event()

    class Stopper(Board):
        def take(self, one: Reached) -> None:
            stop.set()

    board = Stopper(2, 31.0, write=str, clock_s=lambda: 0.0)
    [facts] = here(tmp_path, [0, 1], board, stop)
    assert not facts.complete
    assert 0 < facts.reached_ns - facts.began_ns < 30e9
    assert not (tmp_path / "cell-1").exists()
    requests = pq.read_table(tmp_path / "cell-0" / "requests.parquet")
    assert requests.num_rows == facts.sent
    assert "cut_off" in requests["outcome"].to_pylist()


@pytest.mark.e2e
def test_the_command_tells_its_progress(tmp_path: Path) -> None:
    write_plan(tmp_path, num_cells=1)
    done = _run(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    line = msgspec.json.decode(done.stdout.splitlines()[-1], type=Line)
    assert (line.virtual_s, line.cells_done, line.requests) == (5.0, 1, 60)
    again = _run(tmp_path)
    assert again.returncode == 2
    assert "has the rows of an earlier simulation" in again.stderr


@pytest.mark.e2e
def test_an_interrupt_ends_all_processes(tmp_path: Path) -> None:
    rows = [one for cell in (0, 1) for one in open_loop(cell, num_requests=20_000)]
    write_plan(tmp_path, rows=rows, load_s=1000.0)
    command = [sys.executable, "-m", "reference_engine.simulate", str(tmp_path), "--processes", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        *_, last = process.stdout
        assert process.wait(30) == 130
    line = msgspec.json.decode(last, type=Line)
    assert (line.cells_done, line.cells) == (0, 2)
    for path in tmp_path.glob("cell-*/cell.json"):
        assert not msgspec.json.decode(path.read_bytes(), type=CellFacts).complete


@pytest.mark.e2e
def test_its_processes_end_with_whoever_holds_its_input(tmp_path: Path) -> None:
    rows = [one for cell in (0, 1) for one in open_loop(cell, num_requests=20_000)]
    write_plan(tmp_path, rows=rows, load_s=1000.0)
    command = [sys.executable, "-m", "reference_engine.simulate", str(tmp_path), "--processes", "2"]
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, "--exit-with-stdin"], stdin=pipe, stdout=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        process.stdin.close()
        assert process.wait(30) == 130
        process.stdout.read()  # up to the end of all that can write to it
    assert not list(tmp_path.glob("cell-*/cell.json"))


def test_the_first_failure_halts_the_others() -> None:
    failed, open_one = Future[CellFacts](), Future[CellFacts]()
    failed.set_exception(PlanError("no"))
    halted = list[bool]()
    with pytest.raises(PlanError, match="no"):
        gathered([failed, open_one], _board([]), Event(), list, lambda: halted.append(True))
    assert halted == [True]
    assert open_one.cancelled()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"rows": [asked(0, prompt_tokens=600)]}, "have 630 tokens, more than max_model_len (512)"),
        ({"rows": [asked(0, way="rst", leave_after_tokens=2)]}, "has no way 'rst'"),
        ({"engine_flags": ["--bogus"]}, "engine_flags: unrecognized arguments: --bogus"),
        ({"engine_flags": ["--runner", "torch"]}, "a simulation has no model: --runner simulated"),
    ],
)
def test_a_plan_that_cannot_be_simulated_leaves_nothing(
    tmp_path: Path, settings: dict[str, Any], text: str
) -> None:
    write_plan(tmp_path, num_cells=1, **settings)
    with pytest.raises((PlanError, EngineConfigError), match=re.escape(text)):
        here(tmp_path, [0], _board([]), Event())
    assert not list(tmp_path.glob("cell-*"))


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--ray", "127.0.0.1:1"), 5, "the Ray cluster 127.0.0.1:1 cannot be reached"),
        (("--processes", "0"), 2, "a number from 1 to 1024, not '0'"),
    ],
)
def test_bad_arguments(tmp_path: Path, arguments: tuple[str, ...], code: int, text: str) -> None:
    if "--ray" in arguments:
        pytest.importorskip("ray")
    write_plan(tmp_path)
    done = _run(tmp_path, *arguments)
    assert done.returncode == code
    assert text in done.stderr
    assert not list(tmp_path.glob("cell-*"))


@pytest.mark.e2e
def test_without_ray_the_command_says_how_to_get_it(tmp_path: Path) -> None:
    write_plan(tmp_path)
    command = [sys.executable, "-c", _WITHOUT_RAY, str(tmp_path), "--ray", "local"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "walkaway simulate: --ray needs Ray, which is not installed: "
        "pip install 'walkaway[scale]'\n"
    )


_WITHOUT_RAY = """
import sys
sys.modules["ray"] = None
from reference_engine.simulate.__main__ import main
sys.exit(main())
"""


def test_what_memory_cannot_hold_is_refused(tmp_path: Path) -> None:
    rows = [asked(n, offset_s=n * 1e-4, max_tokens=400) for n in range(20_000)]
    plan = write_plan(tmp_path, num_cells=1, rows=rows)
    config = engine_settings(plan, {}).config
    with pytest.raises(PlanError, match=r"would need about 0\.5 GiB .* and 0\.4 GiB are free"):
        check_memory(needed_bytes(tmp_path, plan, config), 1, 380_000_000)
    check_memory(needed_bytes(tmp_path, plan, config), 1, 600_000_000)


def test_an_open_loop_holds_what_replicas_cannot_answer(tmp_path: Path) -> None:
    few = write_plan(tmp_path, num_cells=1, rows=[asked(n) for n in range(50)], load_s=100.0)
    config = engine_settings(few, {}).config
    [light] = asked_of(tmp_path, 1)
    assert light == Asked(50, 1000, 1500, None)
    more = light._replace(num_requests=50_000, prompt_tokens=10**6, answer_tokens=1_500_000)
    assert cell_bytes(few, config, 0, more) > 1.5 * cell_bytes(few, config, 0, light)
    one_cell = [CellPlan(replicas=2, simulated=2)]
    limited = write_plan(tmp_path, num_cells=1, rows=[asked(0)], cells=one_cell, max_streams=4)
    assert cell_bytes(limited, config, 0, more) < cell_bytes(few, config, 0, light)


def test_few_looks_are_passed_on() -> None:
    told = list[Reached]()
    seconds = iter([0.0, 0.0, 0.1, 0.2, 0.3, 0.5])

    def stop(one: Reached) -> bool:
        told.append(one)
        return False

    tell = rarely(stop, lambda: next(seconds))
    assert [tell(Reached(0, float(n), 0, 0)) for n in range(5)] == [False, True, False, True, False]
    assert [one.virtual_s for one in told] == [0.0, 2.0, 4.0]
