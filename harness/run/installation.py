"""Installs an engine or a gateway into a folder of its own: pip, npm, or Debian's packages."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec

from harness.errors import ConfigError, TargetError
from harness.run.process import LOG_TAIL_LINES
from harness.run.recipes import PYTHON, Recipe, engines_home, filled, places, write_files

INSTALLED: Final = "installed.json"


def install(recipe: Recipe) -> bool:
    """Installs it in its own folder, unless these versions are there. Returns whether it did.

    Raises ConfigError if there is none for this Python, and TargetError if a step fails. The
    next installation throws away all that a failed or killed one left.
    """
    home, marker = recipe.home, recipe.home / INSTALLED
    if is_installed(recipe):
        return False
    newest = recipe.newest_python
    if newest and sys.version_info[:2] > tuple(map(int, newest.split("."))):
        raise ConfigError(
            f"{recipe.name} is built for Python {newest} at most, and this is {PYTHON}: install "
            f"walkaway with Python {newest}"
        )
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    log = engines_home() / f"{recipe.name}.install.log"
    log.unlink(missing_ok=True)
    if recipe.debian:
        _unpack(recipe.debian, home, log)
    if recipe.npm:
        _install_with_npm(recipe, log)
    if recipe.pip:
        _step([sys.executable, "-m", "venv", str(home)], log)
        pip = [str(home / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        for words in recipe.pip:
            _step([*pip, "install", "--quiet", *words], log)
        if recipe.remove:
            _step([*pip, "uninstall", "--quiet", "--yes", *recipe.remove], log)
    known = places(recipe)
    for to, source in recipe.copies.items():
        _copy(Path(filled(source, known)), Path(filled(to, known)))
    write_files(home, recipe.files, {})
    marker.write_bytes(recipe.pins)
    return True


def is_installed(recipe: Recipe) -> bool:
    marker = recipe.home / INSTALLED
    return marker.exists() and marker.read_bytes() == recipe.pins


def _unpack(packages: list[str], home: Path, log: Path) -> None:
    """Debian packages and what they need that this machine lacks, without the right to install
    them: so none of them starts anything either."""
    (home / "debian" / "partial").mkdir(parents=True)
    options = ["--download-only", "--reinstall", "--allow-downgrades", "--no-install-recommends"]
    places = ["--option", f"Dir::Cache::archives={home}/debian", "--option", "Debug::NoLocking=1"]
    _step(["apt-get", "install", "--yes", *options, *places, *packages], log)
    for file in (home / "debian").glob("*.deb"):
        _step(["dpkg-deb", "-x", str(file), str(home)], log)
    shutil.rmtree(home / "debian")


def _install_with_npm(recipe: Recipe, log: Path) -> None:
    """Scripts of packages are not run, and no package is newer than the version that was tried."""
    wanted = {"private": True, "overrides": recipe.overrides}
    (recipe.home / "package.json").write_bytes(msgspec.json.encode(wanted))
    options = ["--ignore-scripts", "--no-audit", "--no-fund", "--save-exact", "--loglevel=error"]
    _step(["npm", "install", *options, *recipe.npm], log, folder=recipe.home)


def _step(command: list[str], log: Path, *, folder: Path | None = None) -> None:
    with log.open("a") as output:
        output.write(f"{' '.join(command)}\n")
        output.flush()
        try:
            code = subprocess.run(
                command, cwd=folder, stdout=output, stderr=output, check=False
            ).returncode
        except OSError as error:
            raise TargetError(f"this needs the program {command[0]}: {error.strerror}") from error
    if code != 0:
        raise TargetError(f"`{' '.join(command)}` ended with code {code}:\n{tail(log)}")


def _copy(source: Path, to: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, to, dirs_exist_ok=True)
    else:
        shutil.copy2(source, to)


def tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return "\n".join(f"  {line}" for line in lines)
