"""The help of each command, what it loads, and what it refuses or completes."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_group
from typer.testing import CliRunner

from harness.commands.index import app
from harness.errors import ConfigError
from harness.store.run_folder import RunFolder, RunRows
from tests.conftest import Snapshot

COMMANDS = tuple(sorted(get_group(app).commands))


@pytest.mark.parametrize("command", ["walkaway", *(c for c in COMMANDS if c != "engine")])
def test_the_help_of_a_command(command: str, snapshot: Snapshot) -> None:
    words = [] if command == "walkaway" else [command]
    result = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert f"Example: {' '.join(['walkaway', *words])}" in result.output
    assert max(map(len, result.output.splitlines())) <= 80
    snapshot(f"help/{command}", result.output)
    assert CliRunner().invoke(app, [*words, "-h"], env={"COLUMNS": "80"}).output == result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("dmeo", "Did you mean 'demo'?"),
        ("run demo --targt URL", "--target"),
        ("run dmeo", "did you mean `demo`?"),
        ("run demo --engine vlm", "did you mean `vllm`?"),
        ("run demo --engine VLLM", "did you mean `vllm`?"),
        ("run demo --set rum.users=3", "--set rum.users: unknown key `rum`; did you mean `run`?"),
        ("simulate capcity demo", "did you mean `capacity`?"),
        ("simulate cluster --machine h100-8b", "did you mean `h100-8b-floor`"),
        ("targets instal vllm", "did you mean `install`?"),
        ("targets up vlm", "did you mean `vllm`?"),
        ("workloads gat", "did you mean `gate`?"),
        ("conform stream/fin-decod", "the nearest is stream/fin-decode"),
        ("conform steam/leave", "the nearest is stream/"),
        ("conform queu/bystander", "the nearest is queue/bystander"),
        ("conform fin-decode", "the nearest is stream/fin-decode"),
        ("conform steam", "the nearest is stream/ ("),
    ],
)
def test_a_mistyped_name_is_answered_with_the_nearest(words: str, said: str) -> None:
    result = CliRunner().invoke(app, words.split())
    complaint = result.output if result.exit_code == 2 else str(result.exception)
    assert said in complaint
    assert len(complaint) < 400, "no list of all names"


@pytest.mark.parametrize("flag", ["--json", "--all"])
def test_a_flag_that_the_page_has_no_use_for_is_refused(flag: str) -> None:
    result = CliRunner().invoke(app, ["run", "demo", "--web", flag])
    assert f"{flag}: is not for --web" in str(result.exception)


def test_help_loads_nothing_that_takes_long() -> None:
    script = (
        "import sys\nfrom harness.cli import main\nsys.argv = ['walkaway', 'run', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    print(*sorted(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert "Usage:" in done.stdout
    loaded = set(done.stderr.split())
    assert "harness.commands.index" in loaded
    assert not loaded & {"pandas", "numpy", "scipy", "pyarrow", "httpx", "harness.run.pipeline"}


def test_a_report_of_several_runs_needs_a_file_name(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")
    with pytest.raises(ConfigError, match="-o FILE"):
        report(tmp_path / "a", tmp_path / "b")


def test_a_run_without_requests_is_not_reported(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    (folder.path / "manifest.json").write_text('{"repeat": "walkaway run demo"}')
    with pytest.raises(ConfigError, match=r"was killed.*run it again: walkaway run demo$"):
        report(folder.path)
    folder.write_rows(RunRows())
    with pytest.raises(ConfigError, match="no request was made in this run"):
        report(folder.path)
    assert not (folder.path / "summary.json").exists()


def report(*folders: Path) -> None:
    CliRunner().invoke(app, ["report", *map(str, folders)], catch_exceptions=False)


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("walkaway run chunk", "chunk_frontier"),
        ("walkaway workloads slot", "slot_recovery"),
        ("walkaway targets vl", "vllm"),
        ("walkaway run demo --engine llama", "llamacpp"),
    ],
)
def test_a_shell_completes_names(words: str, offered: str) -> None:
    told = {
        "_WALKAWAY_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    result = CliRunner().invoke(app, [], prog_name="walkaway", env=told)
    assert result.output.split() == [offered]


def test_a_folder_without_a_conformance_result_is_one_message(tmp_path: Path) -> None:
    """If folders in it have results, the message names these."""

    def said() -> str:
        words = ["matrix", str(tmp_path), "-o", str(tmp_path / "m.html")]
        result = CliRunner().invoke(app, words)
        assert isinstance(result.exception, ConfigError)
        return str(result.exception)

    assert said() == (
        f"{tmp_path}: holds no conform.json; name a folder that `walkaway conform --out` wrote"
    )
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "conform.json").touch()
    assert f"the folders in it do: name {tmp_path}/*/conform.json" in said()


def test_a_folder_of_shards_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").touch()
    for place, why in (
        (tmp_path / "none", "there is no such folder"),
        (tmp_path / "run", "report"),
    ):
        result = CliRunner().invoke(app, ["collect", str(place), "--out", str(tmp_path / "out")])
        assert isinstance(result.exception, ConfigError)
        assert why in str(result.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "looked_for", "remedy"),
    [
        (["matrix"], "holds no conform.json", "`walkaway conform --out` wrote"),
        (["trend"], "holds no folder of a run; looked for folders", "name the folder that holds"),
        (["compare"], "(it has no manifest.json and no rows)", "`walkaway run` wrote"),
    ],
)
def test_an_empty_folder_is_one_sentence(
    tmp_path: Path, words: list[str], looked_for: str, remedy: str
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    places = [str(empty)] * (2 if words == ["compare"] else 1)
    for more in ([], ["-o", str(tmp_path / "page.html")]):
        command = [sys.executable, "-m", "harness", *words, *places, *more]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"error: {empty}: ")
        assert looked_for in line
        assert remedy in line
        assert (done.returncode, done.stdout) == (2, "")
        assert not (tmp_path / "page.html").exists()
