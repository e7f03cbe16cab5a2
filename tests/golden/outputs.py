"""What a checkout's code makes of the recorded runs, in few processes.

Only the door that stays is used: `walkaway` (`harness.cli.main`).
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.golden.runs import BASELINE, COLLECTED, HELD_TO_BASELINE, PAIRS, RUNS

HERE: Final = Path(__file__).parent
EXPECTED: Final = HERE / "expected"
COLUMNS: Final = "120"
JUDGED: Final = [name for name in RUNS if name != COLLECTED]
Outputs = Iterator[tuple[str, str]]  # path below `expected/`, and what the file holds


class Said(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


@dataclass(frozen=True, slots=True)
class Code:
    """The checkout whose code is run, by the interpreter that runs this."""

    path: Path

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.path), "COLUMNS": COLUMNS, "NO_COLOR": "1"}

    def run(self, work: Path, *arguments: str, stdin: str = "", first: Path | None = None) -> Said:
        """One process in `work`. Modules in `first` are found before any others."""
        env = self.env
        if first is not None:
            env["PYTHONPATH"] = f"{first}{os.pathsep}{env['PYTHONPATH']}"
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=work,
            env=env,
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )
        return Said(done.returncode, done.stdout, done.stderr)

    def walkaway(self, work: Path, commands: Sequence[Sequence[str]]) -> list[Said]:
        """`walkaway` with each of these arguments, all in one process."""
        said = self.run(work, "-P", str(HERE / "batch.py"), stdin=json.dumps(commands))
        assert said.code == 0, said.err
        return [Said(*one) for one in json.loads(said.out)]


def lay_out(work: Path, *, judged: bool) -> None:
    """A copy of all runs; with the summaries that were expected, or with none."""
    for name in RUNS:
        shutil.copytree(HERE / "runs" / name, work / name)
    for path in EXPECTED.rglob("summary.json") if judged else ():
        if (folder := work / path.parent.relative_to(EXPECTED)).is_dir():
            shutil.copy(path, folder)


def summarise_all(code: Code, work: Path, names: Sequence[str]) -> dict[str, Any]:
    """Let `walkaway report` judge runs in `work`, without drawing; half of them at a time."""
    with ThreadPoolExecutor(max_workers=2) as both:
        list(both.map(lambda some: _summarise(code, work, some), (names[::2], names[1::2])))
    command = ("collect", f"{COLLECTED}/shards", "--out", "collected")
    said = code.run(work, "-m", "harness", *command, first=_no_drawing(work))
    assert said.code == 0, said.err
    found = {name: _json(work / name / "summary.json") for name in names}
    return {**found, COLLECTED: _json(work / "collected" / "summary.json")}


def summarise_rounds(code: Code, work: Path, arms: Sequence[str]) -> dict[str, Any]:
    """The rounds of runs with arms, each judged as a run of its own."""
    paths = [path for name in arms for path in sorted((work / name / "rounds").iterdir())]
    names = [str(path.relative_to(work)) for path in paths]
    _summarise(code, work, names)
    return {name: _json(work / name / "summary.json") for name in names}


def _summarise(code: Code, work: Path, runs: Sequence[str]) -> None:
    command = ("report", *runs, "-o", "drawn.html")
    said = code.run(work, "-m", "harness", *command, first=_no_drawing(work))
    assert said.code == 0, said.err


def _no_drawing(work: Path) -> Path:
    """Where a package `dashboards` lies that does nothing."""
    package = work / "no_drawing" / "dashboards"
    package.mkdir(parents=True, exist_ok=True)
    for module in ("__init__.py", "__main__.py"):
        (package / module).touch()
    return package.parent


def judge_all(code: Code, work: Path) -> Outputs:
    """What is said of the judged runs in `work`, by file."""
    commands = list(_commands())
    said = code.walkaway(work, [arguments for _, arguments in commands])
    for (file, _), one in zip(commands, said, strict=True):
        if file is not None:
            content = json.loads(one.out) if one.out else one.err
            yield file, _packed({"exit_code": one.code, "said": content})
    for path in sorted(work.glob("*.trace")):
        yield f"{path.stem}/trace.json", _packed(_digest(_json(path)))


def _commands() -> Iterator[tuple[str | None, list[str]]]:
    """Commands, and the file that holds what each says, if it is kept."""
    for name in RUNS:
        gate = ["gate", name, "--baseline", "none.json"] if name == COLLECTED else ["gate", name]
        yield f"{name}/gate.json", [*gate, "--json"]
        yield None, ["export", name, "--trace", f"{name}.trace"]
    for one, other in PAIRS:
        yield f"pairs/{one}~{other}.json", ["compare", one, other, "--json"]
    against = ["--baseline", "baseline.json"]
    yield None, ["gate", BASELINE, "--save-baseline", *against]
    for name in HELD_TO_BASELINE:
        yield f"baseline/{name}.json", ["gate", name, *against, "--json"]


def _digest(trace: Any) -> dict[str, Any]:
    """All times of a timeline, as one number, and how many events of each kind."""
    events = trace["traceEvents"]
    times = sorted((one["ph"], one.get("ts", 0), one.get("dur", 0)) for one in events)
    kinds = Counter(one["ph"] for one in events)
    hashed = hashlib.sha256(json.dumps(times).encode()).hexdigest()
    return {"events": dict(sorted(kinds.items())), "times": hashed}


def _json(path: Path) -> Any:
    return json.loads(path.read_text())


def _packed(content: object) -> str:
    return json.dumps(content, separators=(",", ":")) + "\n"


def summaries_as_files(summaries: Mapping[str, object]) -> Outputs:
    for name, summary in summaries.items():
        yield f"{name}/summary.json", _packed(summary)


def write_outputs(outputs: Outputs, folder: Path) -> None:
    """Keep each in a file of its own."""
    for name, text in outputs:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
