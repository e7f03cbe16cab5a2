"""`make gpu` on a made-up device: each stage in its box, what it keeps, and the table."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any, TextIO

import msgspec
import pytest

from tests.conftest import Snapshot
from tools.gpu.__main__ import main
from tools.gpu.boxed import BoxEnd, run_in_box
from tools.gpu.made_up_device import NOON, STOPPED, MadeUpMachine
from tools.gpu.packages import declared, unmet
from tools.gpu.stages import LONGEST_S, ROOT, STAGES, marked_tests

CARD = "nvidia-h200"


def make_gpu(
    folder: Path,
    *words: str,
    machine: MadeUpMachine | None = None,
    missing: Sequence[str] = (),
    tools: Sequence[str] = (),
) -> int:
    machine = machine or MadeUpMachine()
    return main(
        [*words, "--out", str(folder)],
        run=machine,
        find=lambda module: None if module in missing else "found",
        look_for_tools=lambda: tools,
        now=lambda: NOON,
    )


def stages_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / CARD / "stages.json").read_text())
    return found


def results_of(folder: Path) -> dict[str, str]:
    return {name: one["result"] for name, one in stages_of(folder).items()}


def test_from_the_device_to_the_table(tmp_path: Path, snapshot: Snapshot) -> None:
    machine = MadeUpMachine()
    assert make_gpu(tmp_path, machine=machine) == 0
    assert list(machine.commands) == list(STAGES), "in order of worth"
    assert machine.seconds <= LONGEST_S
    assert results_of(tmp_path) == dict.fromkeys(STAGES, "good")
    snapshot("gpu_table", (tmp_path / CARD / "README.md").read_text())
    assert [file.parent.name for file in (tmp_path / CARD).rglob("report.html")] == ["demo"]


def test_a_rehearsal_takes_the_same_way_on_the_cpu(tmp_path: Path) -> None:
    on_gpu, rehearsed = MadeUpMachine(), MadeUpMachine()
    make_gpu(tmp_path / "gpu", machine=on_gpu)
    make_gpu(tmp_path / "cpu", "--rehearse", machine=rehearsed)
    assert list(on_gpu.commands) == list(rehearsed.commands)
    for name, stage in STAGES.items():
        ours, theirs = on_gpu.commands[name], rehearsed.commands[name]
        assert ours[:3] == theirs[:3]
        if stage.kind == "run":
            assert "engine.device=cuda" in ours
            assert "engine.device=cpu" in theirs
            assert not any("engine.model" in word for word in ours), "the engine chooses it"
    assert "-rfEs" in rehearsed.commands["tests"], "so that pytest says why it skips"
    for name, setting in (
        ("watermark", "engine.watermark=0.15"),
        ("swap", "engine.preemption=swap"),
    ):
        assert setting in on_gpu.commands[f"pressure_{name}"], "as the workload's arm has it"
        assert not any("sim_" in word for word in on_gpu.commands[f"pressure_{name}"])


SKIPPED = """\
SKIPPED [12] tests/reference_engine/model/test_device_step.py:193: needs a CUDA device
SKIPPED [1] tests/reference_engine/model/test_model.py: could not import 'torch'
== 13 skipped, 97 deselected in 5.0s ==
"""


@pytest.mark.parametrize(
    ("said", "result", "note"),
    [
        (SKIPPED, "skipped", "all skipped: needs a CUDA device; could not import 'torch'"),
        ("1 passed, 12 skipped in 5.0s\n", "good", "1 passed, 12 skipped in 5.0s"),
    ],
)
def test_tests_that_were_all_skipped_are_not_good(
    said: str, result: str, note: str, tmp_path: Path
) -> None:
    machine = MadeUpMachine()
    machine.pytest_says = said
    assert make_gpu(tmp_path, "tests", machine=machine) == 0
    entry = stages_of(tmp_path)["tests"]
    assert (entry["result"], entry["note"]) == (result, note)
    assert (entry["figures"] == "whole") == (result == "good")


def test_a_card_whose_torch_is_slow_to_load_has_its_folder(tmp_path: Path) -> None:
    class Slow(MadeUpMachine):
        def _leave(self, command: Sequence[str], work: Path) -> None:
            super()._leave(command, work)
            if "tools.gpu.device" in command:
                (work / "device.json").write_text('{"card": "NVIDIA H200"}')

    assert make_gpu(tmp_path, machine=Slow({"device": STOPPED})) == 0
    assert results_of(tmp_path) == {**dict.fromkeys(STAGES, "good"), "device": "too slow"}
    rest = MadeUpMachine()
    make_gpu(tmp_path, "rest", machine=rest)
    assert list(rest.commands) == ["device"], "all else is good in the card's folder"


def test_a_slow_stage_keeps_what_it_has_and_is_no_failure(tmp_path: Path) -> None:
    slow = dict.fromkeys(("demo", "tests", "decode_step"), STOPPED)
    assert make_gpu(tmp_path, machine=MadeUpMachine(slow)) == 0
    for name in slow:
        assert stages_of(tmp_path)[name]["result"] == "too slow"
        assert stages_of(tmp_path)[name]["figures"] == "part"
    assert (tmp_path / CARD / "demo" / "report.html").exists()
    assert (tmp_path / CARD / "decode_step" / "lines.jsonl").exists()
    slow_and_empty = MadeUpMachine({"cancel_steps": STOPPED}, leaves_nothing=["cancel_steps"])
    assert make_gpu(tmp_path, "cancel_steps", machine=slow_and_empty) == 1
    assert stages_of(tmp_path)["cancel_steps"]["figures"] == "whole", "of the call before"


def test_a_stage_that_fails_loses_its_own_results_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = MadeUpMachine(
        {"tests": BoxEnd(1, 9.0), "device": BoxEnd(1, 2.0)}, leaves_nothing=["tests"]
    )
    assert make_gpu(tmp_path, machine=failing) == 1
    assert list(failing.commands) == list(STAGES), "the stages after it ran, too"
    assert results_of(tmp_path) == {
        **dict.fromkeys(STAGES, "good"),
        "tests": "failed",
        "device": "failed",
    }
    assert stages_of(tmp_path)["tests"]["note"] == "exit status 1: its last words"
    assert "    the words of tests\n    its last words\n" in capsys.readouterr().out


def test_a_table_that_cannot_be_written_costs_no_stage(tmp_path: Path) -> None:
    class Nonsense(MadeUpMachine):
        def _leave_run(self, folder: Path) -> None:
            folder.mkdir()
            (folder / "summary.json").write_text("{}")

    machine = Nonsense()
    with pytest.raises(msgspec.ValidationError):
        make_gpu(tmp_path, machine=machine)
    assert list(machine.commands) == list(STAGES)


def test_what_is_good_is_not_replaced_by_what_is_not(tmp_path: Path) -> None:
    folder = tmp_path / CARD / "demo"
    make_gpu(tmp_path, "demo", machine=MadeUpMachine({"demo": STOPPED}))
    make_gpu(tmp_path, "demo", machine=MadeUpMachine({"demo": STOPPED}))
    assert not (folder / "failure").exists(), "a part replaces a part"
    make_gpu(tmp_path, "demo")
    (folder / "report.html").write_text("the good one")
    make_gpu(tmp_path, "demo", machine=MadeUpMachine({"demo": BoxEnd(5, 8.0)}))
    assert (folder / "report.html").read_text() == "the good one"
    assert (folder / "failure" / "engine.log").read_text() == "what the engine said"
    assert results_of(tmp_path)["demo"] == "failed", "though its figures are good"
    make_gpu(tmp_path, "demo")
    assert not (folder / "failure").exists()


def test_another_call_goes_on_with_what_is_not_good(tmp_path: Path) -> None:
    make_gpu(tmp_path, "demo", "cancel_steps", machine=MadeUpMachine({"cancel_steps": STOPPED}))
    rest = MadeUpMachine()
    assert make_gpu(tmp_path, "rest", machine=rest) == 0
    assert list(rest.commands) == [name for name in STAGES if name != "demo"]
    assert results_of(tmp_path) == dict.fromkeys(STAGES, "good")
    again = MadeUpMachine()
    make_gpu(tmp_path, "rest", machine=again)
    assert list(again.commands) == ["device"]


def test_a_killed_call_leaves_a_table_of_what_it_had(tmp_path: Path) -> None:
    class Killed(MadeUpMachine):
        def __call__(self, command: Sequence[str], **box: Any) -> BoxEnd:
            if "pytest" in command:
                raise KeyboardInterrupt
            return super().__call__(command, **box)

    with pytest.raises(KeyboardInterrupt):
        make_gpu(tmp_path, machine=Killed())
    assert results_of(tmp_path) == {"device": "good", "demo": "good"}
    assert "\n| demo | " in (tmp_path / CARD / "README.md").read_text()


def test_missing_packages_are_named_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = ["pytest_timeout", "hypothesis", "locust", "pynvml"]
    assert make_gpu(tmp_path, machine=MadeUpMachine(), missing=missing) == 0
    runs = [name for name, stage in STAGES.items() if stage.kind == "run"]
    assert capsys.readouterr().out.splitlines()[0].partition("] ")[2] == (
        f"this Python lacks locust (needed by {', '.join(runs)}); pytest-timeout, hypothesis "
        "(needed by tests); nvidia-ml-py (without it power, energy, utilisation and clocks are "
        "not known): install with pip"
    )
    assert [name for name, how in results_of(tmp_path).items() if how == "skipped"] == [
        name for name in STAGES if name in (*runs, "tests")
    ]


def test_what_triton_compiles_with_is_missed_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine, tools = (
        MadeUpMachine(),
        ["a C compiler (install gcc or clang)", "/x/Python.h (install y)"],
    )
    assert make_gpu(tmp_path, machine=machine, missing=["locust"], tools=tools) == 0
    first, *_ = capsys.readouterr().out.splitlines()
    assert first.endswith(
        ": install with pip; this machine lacks a C compiler (install gcc or clang) and "
        "/x/Python.h (install y), which Triton needs"
    )
    assert list(machine.commands) == ["device"]
    assert stages_of(tmp_path)["tests"]["note"] == f"lacks {', '.join(tools)}"
    make_gpu(tmp_path, "demo", "--rehearse", machine=machine, tools=tools)
    assert list(machine.commands) == ["device", "demo"], "a CPU needs none of them"


@pytest.mark.parametrize("module", ["torch", "msgspec"])
def test_without_what_all_stages_need_nothing_runs(
    module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = MadeUpMachine()
    assert make_gpu(tmp_path, machine=machine, missing=[module]) == 2
    assert not machine.commands
    assert f"this Python lacks {module} (needed by all stages)" in capsys.readouterr().out


def test_without_a_device_nothing_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = MadeUpMachine({"device": BoxEnd(2, 1.0)}, leaves_nothing=["device"])
    assert make_gpu(tmp_path, machine=machine) == 2
    assert list(machine.commands) == ["device"]
    assert "its last words; `make gpu REHEARSE=1`" in capsys.readouterr().out
    assert not (tmp_path / CARD).exists()


def test_what_a_run_needs_is_what_the_project_declares() -> None:
    extras = {"load": ["pyarrow>=17"], "engine": ["torch>=2.6"]}
    project = {"dependencies": ["h2>=4", "uvloop>=1; x != 'y'", "a-b[c]"]}
    assert declared({**project, "optional-dependencies": extras}) == ["uvloop", "a-b", "pyarrow"]


def test_what_an_installed_package_requires_may_be_missing() -> None:
    required = {
        "locust": ["msgpack>=1", "pyzmq", "backports; python_version < '3'"],
        "pyzmq": ["Locust"],
        "a-b": None,
    }

    def requires(name: str) -> list[str] | None:
        if name not in required:
            raise PackageNotFoundError(name)
        return required[name]

    assert unmet(["locust", "A_b"], requires) == ["msgpack"]


def test_only_files_with_the_marker_are_collected(tmp_path: Path) -> None:
    contents = {
        "test_decorated.py": "@pytest.mark.gpu\ndef test_it(): ...",
        "inner/test_parameter.py": "ON_GPU = pytest.param('cuda', marks=pytest.mark.gpu)",
        "test_text.py": "TEXT = 'pytest.mark.gpu'  # pytest.mark.gpu",
        "test_other.py": "@pytest.mark.gpu_memory\ndef test_it(): ...",
        "helper.py": "pytestmark = pytest.mark.gpu",
    }
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert marked_tests(tmp_path) == [
        str(tmp_path / name) for name in ("inner/test_parameter.py", "test_decorated.py")
    ]
    found = marked_tests(ROOT / "tests")
    assert str(ROOT / "tests/reference_engine/model/test_model.py") in found
    assert __file__ not in found


def test_all_tables_are_written_again_without_torch(tmp_path: Path) -> None:
    make_gpu(tmp_path)
    table = tmp_path / CARD / "README.md"
    before = table.read_text()
    table.unlink()
    assert make_gpu(tmp_path, "table", missing=["torch"]) == 0
    assert table.read_text() == before


@pytest.mark.parametrize("words", [["nonsense"], ["rest", "demo"]])
def test_words_that_mean_nothing_are_refused(words: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        make_gpu(tmp_path, *words)


# The signal may come in the middle of a write, so nothing is written through a buffer.
STUBBORN = """
import os, signal, subprocess, sys
pipe = os.open(sys.argv[1], os.O_WRONLY)
script = "import signal; signal.pause()"
subprocess.Popen([sys.executable, "-c", script], start_new_session=True, pass_fds=[pipe])
signal.signal(signal.SIGINT, lambda *_: os.write(pipe, b"interrupted\\n"))
os.write(pipe, b"ready\\n")
while True:
    signal.pause()
"""


def test_at_the_end_of_its_box_a_process_is_interrupted_then_killed_with_all_it_started(
    tmp_path: Path,
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    readers: list[TextIO] = []
    heard: list[tuple[float, str]] = []

    def wait(_: object, timeout_s: float) -> int:
        if not readers:
            readers.append(pipe.open())
        heard.append((timeout_s, readers[0].readline()))
        raise subprocess.TimeoutExpired("the command", timeout_s)

    command = [sys.executable, "-c", STUBBORN, str(pipe)]
    box = {"box_s": 10.0, "grace_s": 2.0}
    ended = run_in_box(command, root=ROOT, said=tmp_path / "said", wait=wait, **box)
    assert ended.was_stopped
    assert heard == [(8.0, "ready\n"), (2.0, "interrupted\n")]
    assert readers[0].read() == "", "nobody has it open any more"
    readers[0].close()


def test_a_process_ends_by_itself_or_with_its_box(tmp_path: Path) -> None:
    def run(script: str, box_s: float) -> BoxEnd:
        command, said = [sys.executable, "-c", script], tmp_path / "said"
        return run_in_box(command, root=ROOT, said=said, box_s=box_s, grace_s=box_s / 2)

    assert run("print('words'); raise SystemExit(3)", 60)[::2] == (3, False)
    assert (tmp_path / "said").read_text() == "words\n"
    assert run("import signal; signal.pause()", 0.02).was_stopped
