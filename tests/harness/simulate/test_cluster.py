"""All cells of a plan: here, over processes, over Ray; stopped early; refused."""

import itertools
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

from harness.errors import ConfigError
from harness.simulate.cluster import gathered, here, over_processes, rarely
from harness.simulate.memory import cell_bytes, check_memory
from harness.simulate.progress import Board, ProgressLine, Reached
from harness.simulate.rows import CellFacts
from tests.harness.simulate.made_plans import made_plan

TWO_CELLS = {"replicas": 2, "router": "random"}
LONG = {"rate": 40.0, "seconds": 1000.0}


def _write(folder: Path, *, num_cells: int = 2, **plan: Any) -> None:
    folder.mkdir(exist_ok=True)
    cluster = TWO_CELLS if num_cells == 2 else {"replicas": 2}
    made_plan(**{"cluster": cluster, "arrivals": {}, **plan}).write(folder)


def _board(lines: list[str], num_cells: int = 2) -> Board:
    seconds = itertools.count()
    return Board(num_cells, 5.0, write=lines.append, clock_s=lambda: float(next(seconds)))


def _bytes(folder: Path) -> dict[str, bytes]:
    found = folder.glob("cell-*/*")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "harness.simulate", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.e2e
def test_processes_write_the_bytes_of_one(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    lines = list[str]()
    for folder in (one, two):
        _write(folder)
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
        _write(folder)
    here(one, [0, 1], _board([]), Event())
    done = _run(ray, "--ray", "local")
    assert (done.returncode, done.stderr) == (0, "")
    assert _bytes(one) == _bytes(ray)


@pytest.mark.slow
@pytest.mark.e2e
def test_over_ray_a_plan_that_cannot_be_simulated_is_refused_alike(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    _write(tmp_path, load=TOO_LONG)
    done = _run(tmp_path, "--ray", "local")
    assert done.returncode == 2
    assert "tokens, more than `engine.max_model_len` (512)" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.glob("cell-*"))


def test_a_stopped_cell_keeps_its_rows_and_says_how_far_it_came(tmp_path: Path) -> None:
    _write(tmp_path, arrivals={"rate": 40.0}, load_s=30.0)
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
    _write(tmp_path, num_cells=1)
    done = _run(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    line = msgspec.json.decode(done.stdout.splitlines()[-1], type=ProgressLine)
    assert (line.virtual_s, line.cells_done) == (5.0, 1)
    assert line.requests == pq.read_metadata(tmp_path / "cell-0" / "requests.parquet").num_rows
    again = _run(tmp_path)
    assert again.returncode == 2
    assert "has the rows of an earlier simulation" in again.stderr


@pytest.mark.e2e
def test_an_interrupt_ends_all_processes(tmp_path: Path) -> None:
    _write(tmp_path, arrivals=LONG, load_s=1000.0)
    command = [sys.executable, "-m", "harness.simulate", str(tmp_path), "--processes", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        *_, last = process.stdout
        assert process.wait(30) == 130
    line = msgspec.json.decode(last, type=ProgressLine)
    assert (line.cells_done, line.cells) == (0, 2)
    for path in tmp_path.glob("cell-*/cell.json"):
        assert not msgspec.json.decode(path.read_bytes(), type=CellFacts).complete


@pytest.mark.e2e
def test_its_processes_end_with_whoever_holds_its_input(tmp_path: Path) -> None:
    _write(tmp_path, arrivals=LONG, load_s=1000.0)
    command = [sys.executable, "-m", "harness.simulate", str(tmp_path), "--processes", "2"]
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
    failed.set_exception(ConfigError("no"))
    halted = list[bool]()
    with pytest.raises(ConfigError, match="no"):
        gathered([failed, open_one], _board([]), Event(), list, lambda: halted.append(True))
    assert halted == [True]
    assert open_one.cancelled()


TOO_LONG = {"prompt_tokens": [600, 600]}


def test_a_plan_that_cannot_be_simulated_leaves_nothing(tmp_path: Path) -> None:
    _write(tmp_path, load=TOO_LONG)
    with pytest.raises(ConfigError, match="request 0: prompt and answer have 6"):
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
    _write(tmp_path)
    done = _run(tmp_path, *arguments)
    assert done.returncode == code
    assert text in done.stderr
    assert not list(tmp_path.glob("cell-*"))


@pytest.mark.e2e
def test_without_ray_the_command_says_how_to_get_it(tmp_path: Path) -> None:
    _write(tmp_path)
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
from harness.simulate.__main__ import main
sys.exit(main())
"""


def test_what_memory_cannot_hold_is_refused() -> None:
    long = {"answer_tokens": 400, "stay_tokens": 400, "prompt_tokens": [20, 20]}
    run = {"most_rate": 20_000, "most_streams": 100_000}
    arrivals = {"kind": "constant", "rate": 20_000.0, "seconds": 1.0, "max_streams": 100_000}
    plan = made_plan(load=long, run=run, arrivals=arrivals)
    with pytest.raises(ConfigError, match=r"would need about 0\.5 GiB .* and 0\.4 GiB are free"):
        check_memory(cell_bytes(plan), 1, 380_000_000)
    check_memory(cell_bytes(plan), 1, 600_000_000)


def test_an_open_loop_holds_what_replicas_cannot_answer() -> None:
    many: dict[str, Any] = {"load_s": 100.0, "run": {"most_streams": 100_000}}
    light = made_plan(arrivals={"rate": 1.0, "max_streams": 100_000}, **many)
    more = made_plan(arrivals={"rate": 500.0, "max_streams": 100_000}, **many)
    limited = made_plan(arrivals={"rate": 500.0, "max_streams": 2}, **many)
    assert cell_bytes(more) > 1.5 * cell_bytes(light)
    assert cell_bytes(limited) < cell_bytes(light)


def test_few_looks_are_passed_on() -> None:
    told = list[Reached]()
    seconds = iter([0.0, 0.0, 0.1, 0.2, 0.3, 0.5])

    def stop(one: Reached) -> bool:
        told.append(one)
        return False

    tell = rarely(stop, lambda: next(seconds))
    assert [tell(Reached(0, float(n), 0, 0)) for n in range(5)] == [False, True, False, True, False]
    assert [one.virtual_s for one in told] == [0.0, 2.0, 4.0]
