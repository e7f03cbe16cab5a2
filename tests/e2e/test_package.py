"""The wheel, installed into an empty environment far from the repository, without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(420)]

REPOSITORY = Path(__file__).parents[2]


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip install walkaway` brings."""
    folder = tmp_path_factory.mktemp("package")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    run(*build, "--outdir", folder, REPOSITORY, cwd=folder)
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    install(folder / "venv" / "bin", wheel_in(folder))
    return folder / "venv" / "bin"


@pytest.fixture(scope="module")
def environment(base: Path) -> Path:
    """The same, with the extra for runs."""
    install(base, f"{wheel_in(base.parents[1])}[load]")
    return base


def wheel_in(folder: Path) -> Path:
    (wheel,) = folder.glob("walkaway-*.whl")
    return wheel


def install(binaries: Path, what: str | Path) -> None:
    constraints = REPOSITORY / "constraints.txt"
    run(binaries / "pip", "install", "--quiet", what, "--constraint", constraints, cwd=binaries)


def test_conform_needs_no_extra_and_a_run_says_which_it_needs(base: Path, tmp_path: Path) -> None:
    has_pandas = "import importlib.util as u; print(u.find_spec('pandas') is not None)"
    assert run(base / "python", "-c", has_pandas, cwd=tmp_path).strip() == "False"
    asked = ["conform", "stream/fin-decode", "bystander/pace", "--json", "--out", "here"]
    result = json.loads(run(base / "walkaway", *asked, cwd=tmp_path))
    assert [one["verdict"] for one in result["cases"]] == ["pass", "pass"]
    assert "stream/fin-decode" in (tmp_path / "here" / "index.html").read_text()
    done = subprocess.run(
        [base / "walkaway", "demo"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "pip install 'walkaway[load]'" in done.stderr


def test_demo_runs_without_torch_and_without_the_repository(
    environment: Path, tmp_path: Path
) -> None:
    has_torch = "import importlib.util as u; print(u.find_spec('torch') is not None)"
    assert run(environment / "python", "-c", has_torch, cwd=tmp_path).strip() == "False"
    settings = ["--set", "run.max_seconds=8", "--out", "here"]
    printed = run(environment / "walkaway", "demo", *settings, "--json", cwd=tmp_path)
    summary = json.loads(printed)
    assert summary["outcomes"]["abandoned"] > 10
    assert summary["metrics"]["ghost_rate"]["mean"] == 0.0
    page = (tmp_path / "here" / "report.html").read_text()
    assert "<html" in page
    assert "plotly" in page


def test_the_shipped_files_are_in_the_wheel(environment: Path, tmp_path: Path) -> None:
    assert "slot_recovery" in run(environment / "walkaway", "workloads", cwd=tmp_path)
    assert "llamacpp" in run(environment / "walkaway", "targets", cwd=tmp_path)
    where = "import dashboards; print(*dashboards.__path__)"
    dashboards = Path(run(environment / "python", "-c", where, cwd=tmp_path).strip())
    assert (dashboards / "monitoring" / "grafana.json").is_file()
