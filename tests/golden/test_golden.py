"""The rows of the recorded runs give the figures and verdicts that they gave at 7cb23c3.

Their manifests and summaries have the keys of version 0.1.0, the oldest that is read.
Words may change: of texts only the number is held, limits to twelve digits, all else to the last.
Intended differences stand in `changes.toml` with their reasons, and must be there. The manifest of
each run has the command that made it; the commit 731770e holds the program that recorded them.
"""

import hashlib
import json
import re
import shutil
import tomllib
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from math import isclose
from pathlib import Path
from typing import Any, Final

import pytest
from typer.testing import CliRunner

from harness.commands.index import app
from harness.errors import WalkawayError
from harness.store.run_folder import RunFolder
from tests.golden.recorded import RECORDED, judged_today

HERE: Final = Path(__file__).parent
RUNS: Final = sorted(path.name for path in RECORDED.iterdir())
EXPECTED: Final = HERE / "expected"
CHANGES: Final = tomllib.loads((HERE / "changes.toml").read_text())
MOST_SHOWN: Final = 60
# Limits, and what is made of them, come from quantiles that are found by iteration: their last
# digits are the machine's.
SAME_LIMIT: Final = 1e-12
_LIMIT: Final = re.compile(r"(ci95\.[01]|(upper|lower)95|grain|(bias|due)\.[01])$")
_EMPTY: Final[tuple[Any, ...]] = (None, {}, [], "")

COLLECTED: Final = "killed"  # left nothing but the shards of its load
COMPARED_ARMS: Final = ("build", "worse_build")  # judged already: `compare` reads their rounds
PAIRS: Final = sorted(path.stem for path in (EXPECTED / "pairs").iterdir())
HELD_TO_BASELINE: Final = sorted(path.stem for path in (EXPECTED / "baseline").iterdir())


def differences(was: Any, now: Any, at: str) -> Iterator[tuple[str, str]]:
    """Where the two differ, and how. A field that is missing is as one that holds nothing."""
    match was, now:
        case dict(), dict():
            for key in dict.fromkeys([*was, *now]):
                yield from differences(was.get(key), now.get(key), f"{at}.{key}")
        case list(), list() if at.endswith(".agreement"):
            yield from differences(_by_method(was), _by_method(now), at)
        case list(), list() if at.endswith(".stages"):
            yield from differences(_by_name(was), _by_name(now), at)
        case list(), list() if len(was) == len(now):
            for number, (one, other) in enumerate(zip(was, now, strict=True)):
                yield from differences(one, other, f"{at}.{number}")
        case str(), str() if " " in was and " " in now:
            return
        case float(), float() if _LIMIT.search(at) and isclose(was, now, rel_tol=SAME_LIMIT):
            return
        case _ if was != now and not (was in _EMPTY and now in _EMPTY):
            yield at, f"{at}: was {_short(was)}, is {_short(now)}"


def _by_method(pairs: list[Any]) -> dict[str, Any]:
    return {f"{one['metric']} by {one['method']}": one for one in pairs}


def _by_name(stages: list[Any]) -> dict[str, Any]:
    return {one["name"]: one for one in stages}


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 90 else f"{text[:90]}..."


def check_same(file: str, now: Any, *, at: str, about: str) -> None:
    """But for the named changes; each change that names this run must be found."""
    changes = [one["at"] for one in CHANGES.get(about, [])]
    seen = set()
    unnamed = []
    for where, text in differences(json.loads((EXPECTED / file).read_text()), now, at):
        names = [one for one in changes if fnmatchcase(where, one)]
        seen.update(names)
        if not names:
            unnamed.append(text)
    assert not unnamed, "\n".join([f"{len(unnamed)} differences:", *unnamed[:MOST_SHOWN]])
    of_this = {one for one in changes if one.startswith(f"{at}.")}
    assert of_this <= seen, f"no longer differs: {sorted(of_this - seen)}"


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where commands are run: they name runs without a folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lay_out(work: Path, *names: str) -> None:
    """Copies of runs, with the summaries that were expected."""
    for name in names:
        shutil.copytree(RECORDED / name, work / name)
        for summary in (EXPECTED / name).rglob("summary.json"):
            if (folder := work / summary.parent.relative_to(EXPECTED)).is_dir():
                shutil.copy(summary, folder)


def walkaway(*arguments: str) -> tuple[int, str]:
    """A command's exit code, and what it printed."""
    done = CliRunner().invoke(app, arguments)
    if isinstance(done.exception, WalkawayError):
        return done.exception.exit_code, f"error: {done.exception}"
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout


def check_said(file: str, *arguments: str) -> None:
    code, said = walkaway(*arguments, "--json")
    content = said if said.startswith("error: ") else json.loads(said)
    check_same(file, {"exit_code": code, "said": content}, at=file, about="commands")


@pytest.mark.parametrize("name", [name for name in RUNS if name not in COMPARED_ARMS])
def test_the_rows_give_the_same_summary(work: Path, name: str) -> None:
    if name == COLLECTED:
        shutil.copytree(RECORDED / name, work / name)
        code, said = walkaway("collect", f"{name}/shards", "--out", "collected")
        assert code == 0, said
        run = RunFolder(work / "collected")
    else:
        run = judged_today(name, work)
    now = json.loads((run.path / "summary.json").read_text())
    check_same(f"{name}/summary.json", now, at=name, about="summaries")


@pytest.mark.parametrize("name", RUNS)
def test_a_folder_of_then_is_judged_and_exported_as_then(work: Path, name: str) -> None:
    lay_out(work, name)
    against = ("--baseline", "none.json") if name == COLLECTED else ()
    check_said(f"{name}/gate.json", "gate", name, *against)
    walkaway("export", name, "--trace", "trace.json")
    if (EXPECTED / name / "trace.json").is_file():
        events = json.loads((work / "trace.json").read_text())["traceEvents"]
        times = sorted((one["ph"], one.get("ts", 0), one.get("dur", 0)) for one in events)
        hashed = hashlib.sha256(json.dumps(times).encode()).hexdigest()
        now = {"events": Counter(one["ph"] for one in events), "times": hashed}
        check_same(f"{name}/trace.json", now, at=f"{name}/trace.json", about="commands")


@pytest.mark.parametrize("pair", PAIRS)
def test_folders_of_then_are_compared_as_then(work: Path, pair: str) -> None:
    one, other = pair.split("~")
    lay_out(work, one, other)
    check_said(f"pairs/{pair}.json", "compare", one, other)


def test_a_baseline_of_then_judges_as_then(work: Path) -> None:
    lay_out(work, *HELD_TO_BASELINE)
    against = ("--baseline", "baseline.json")
    walkaway("gate", "build", "--save-baseline", *against)
    for name in HELD_TO_BASELINE:
        check_said(f"baseline/{name}.json", "gate", name, *against)
