"""A run's folder with any of its files missing or damaged: a report wherever the requests are
whole, and one sentence from every command that cannot do its work."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from dashboards.report import write_report
from dashboards.trend import write_trend
from harness.commands.compare import compare_and_show
from harness.commands.gate import GateOrder, gate_and_show
from harness.commands.results import collect, export, judge_if_needed
from harness.errors import ConfigError
from harness.gate.judge import EXIT_CODES, GateVerdict
from harness.run.rounds import complete_summary
from harness.store.remains import OF_A_ROUND, OF_THE_MANIFEST
from harness.store.run_folder import RECORDS, RunFolder, open_run
from harness.workload.workload import as_plain_data, load_workload
from tests.made_up.run import save_judged

FILES = ("manifest.json", "summary.json", *(f"{name}.parquet" for name in RECORDS))


def halved(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flipped(file: Path) -> None:
    """The last byte of a column's values: only a checksum shows it."""
    column = pq.read_metadata(file).row_group(0).column(0)
    start = column.dictionary_page_offset or column.data_page_offset
    content = bytearray(file.read_bytes())
    content[start + column.total_compressed_size - 1] ^= 0xFF
    file.write_bytes(content)


def unreadable(file: Path) -> None:
    """For root, too: a link to itself."""
    file.unlink()
    file.symlink_to(file)


def folder_instead(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "absent": Path.unlink,
    "empty": lambda file: file.write_bytes(b""),
    "halved": halved,
    "flipped": flipped,
    "garbage": lambda file: file.write_bytes(b"\x00\xffnot a file of walkaway\n" * 9),
    "another's": lambda file: file.write_bytes(b"{}"),
    "a list": lambda file: file.write_bytes(b"[1]"),
    "a folder": folder_instead,
    "unreadable": unreadable,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = RunFolder(save_judged(tmp_path_factory.mktemp("whole") / "run"))
    manifest = folder.load_manifest()
    manifest.workload = as_plain_data(load_workload("demo", ["gate.min_abandons=1"]))
    folder.write_manifest(manifest)
    assert gate(folder.path) == EXIT_CODES[GateVerdict.PASS]
    return folder.path


@pytest.fixture
def run(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    return Path(shutil.copytree(whole, tmp_path / "runs" / "run"))


def said_by(do: Callable[[], object]) -> str:
    """ "" for work that was done; else the one sentence that says why it cannot be done."""
    said = ""
    try:
        do()
    except ConfigError as error:
        said = str(error)
    assert len(said.splitlines()) <= 1
    assert "Errno" not in said
    return said


def gate(run: Path) -> int:
    limits = run.parent / "limits.txt"
    limits.write_text(f"{'only: ' if (run / 'rounds').exists() else ''}preemptions.mean == 0\n")
    return gate_and_show(GateOrder(run=run, limits=limits), as_json=False, quiet=True)


def report(run: Path, page: Path) -> None:
    """As `walkaway report` does it, without its second process."""
    judge_if_needed(open_run(run))
    write_report([run], page)


def is_possible(name: str, damage: str) -> bool:
    if damage == "flipped":
        return name in ("requests.parquet", "lifecycle.parquet", "steps.parquet")  # with rows
    return name.endswith("json") or damage not in ("another's", "a list")


CASES = [(name, damage) for name in FILES for damage in DAMAGES if is_possible(name, damage)]


@pytest.mark.parametrize(("name", "damage"), CASES)
def test_a_report_is_drawn_from_what_is_left(
    name: str, damage: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    DAMAGES[damage](run / name)
    page = Path("page.html")
    if name == "requests.parquet":
        said = said_by(lambda: report(run, page))
        assert f"{name}: " in said
        assert "without these rows there is nothing to draw" in said
        return
    report(run, page)
    text, said = page.read_text(), capsys.readouterr().err
    assert "1 abandoned" in text
    if name == "summary.json":
        assert ("the run is judged again" in said) == (damage != "absent")
    else:
        assert f"{name} is missing: " in text or f"{name}: " in text
        assert "hand-made" in text, "the workload is said by the summary"


@pytest.mark.parametrize(("name", "damage"), CASES)
def test_no_other_command_fails_by_a_traceback(
    name: str, damage: str, run: Path, whole: Path
) -> None:
    DAMAGES[damage](run / name)
    assert gate(run) == EXIT_CODES[GateVerdict.CANNOT_DECIDE]
    is_needed = name in ("manifest.json", "summary.json")
    assert bool(said_by(lambda: compare_and_show(whole, [run], as_json=False))) == is_needed
    assert bool(said_by(lambda: export(run=run, trace=Path("trace.json")))) == (
        name in ("summary.json", "requests.parquet")
    )
    assert name in said_by(lambda: write_trend(Path("runs"), Path("trend.html")))
    assert "is a run's folder" in said_by(lambda: collect([run], Path("collected")))


@pytest.fixture
def arms(run: Path) -> Path:
    """A run of two rounds, of one arm."""
    folder = RunFolder(run.parent / "arms")
    for number in (1, 2):
        shutil.copytree(run, folder.rounds / f"{number}-only")
    manifest = RunFolder(run).load_manifest()
    manifest.workload |= {"arms": [{"name": "only"}]}
    manifest.workload["run"] |= {"rounds": 2}
    folder.write_manifest(manifest)
    complete_summary(folder)
    return folder.path


@pytest.mark.parametrize("damage", ["absent", "halved", "a folder"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("manifest.json", OF_THE_MANIFEST),
        ("summary.json", ""),
        ("requests.parquet", ""),
        ("rounds/1-only/manifest.json", OF_A_ROUND),
        ("rounds/1-only/steps.parquet", ""),
    ],
)
def test_a_report_of_arms_is_drawn_from_what_is_left(
    name: str, said: str, damage: str, arms: Path
) -> None:
    DAMAGES[damage](arms / name)
    assert gate(arms) == EXIT_CODES[GateVerdict.CANNOT_DECIDE]
    page = Path("page.html")
    report(arms, page)
    assert "4 of only" in page.read_text(), "the requests"
    assert said in page.read_text()
