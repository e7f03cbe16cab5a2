"""Plant the defects one by one and see whether a test fails.

    python -m tools.defects.run [ID...] [--results FILE.toml] [--survivors]
        [--stages near package full e2e] [--most-s SECONDS]

Each is planted in a copy of the checkout: in the function that `defects.toml` names, in its file
or, as code moves, in another. One that is not found, or stands twice, is said to be lost: correct
its entry, or delete it with the behaviour that it broke.

Which tests are run, stage by stage until one fails: `near`, tests that import the defect's file, or
import a file that imports it; `package`, what `defects.toml` names for its package; `full`, all but
the end-to-end tests; `e2e`, these. Earlier results are kept, except of defects that are asked for
by id, or that survived (`--survivors`).
"""

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
PACKAGES: Final = ("harness", "reference_engine", "dashboards")
COPIED: Final = (*PACKAGES, "workloads", "tests", "docs", "results", ".ci")
NOT_COPIED: Final = ("__pycache__", "*.pyc", "defects")
STAGES: Final = ("near", "package", "full", "e2e")
RESULTS: Final = ("killed", "survived", "lost")
MOST_FILES: Final = 14  # of tests that see the file only through another
TEST_S: Final = 240  # on a busy machine no test fails of its own
ALL_IN_ALL_S: Final = 1800.0
_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a defect is planted: the whole lines."""

    file: Path
    line: int
    new: str


class Imports:
    """Which tests see a file, directly or through one other."""

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        self._direct: dict[str, set[str]] = defaultdict(set)
        files = [path for name in (*PACKAGES, "tests") for path in (tree / name).rglob("*.py")]
        for path in files:
            for name in _imported(path):
                self._direct[name].add(_module(path, tree))

    def tests_of(self, file: Path) -> tuple[list[str], list[str]]:
        """Tests that import the file, and tests that import a file which imports it."""
        module = _module(file, self._tree)
        importers = self._direct[module]
        near = self._tests(importers)
        through = {one for name in importers if not _is_test(name) for one in self._direct[name]}
        return near, [one for one in self._tests(through) if one not in near]

    def _tests(self, modules: set[str]) -> list[str]:
        """The test files among these modules, and test files that use a helper among them."""
        found = {one for one in modules if _is_test(one)}
        helpers = {one for one in found if "test_" not in one}
        for helper in helpers:
            found |= {one for one in self._direct[helper] if "test_" in one}
        paths = {self._tree / f"{one.replace('.', '/')}.py" for one in found - helpers}
        plain = (path for path in paths if "e2e" not in path.parts and path.is_file())
        return [str(path.relative_to(self._tree)) for path in sorted(plain)]


def _is_test(module: str) -> bool:
    return module.startswith("tests.")


def _module(path: Path, tree: Path) -> str:
    return ".".join(path.relative_to(tree).with_suffix("").parts).removesuffix(".__init__")


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{one.name}" for one in node.names)


def find(tree: Path, defect: Mapping[str, str]) -> tuple[Spot | None, str]:
    """Where to plant it today, or why that is not known."""
    old = _normal(defect["old"])
    at_home = [tree / defect["file"]] if (tree / defect["file"]).is_file() else []
    everywhere = [path for name in PACKAGES for path in sorted((tree / name).rglob("*.py"))]
    for files, whole_name in ((at_home, True), (everywhere, True), (everywhere, False)):
        spots = [
            Spot(file, line, defect["new"])
            for file in files
            for name, line, text in _lines(file)
            if _normal(text) == old and _is_named(name, defect["function"], whole=whole_name)
        ]
        if len(spots) == 1:
            return spots[0], ""
        if spots:
            return None, f"stands {len(spots)} times"
    return None, "not found"


def _is_named(name: str, function: str, *, whole: bool) -> bool:
    """A method that has moved to another class, or out of one, keeps its last name."""
    return name == function if whole else _last(name) == _last(function)


def _last(function: str) -> str:
    return function.rpartition(".")[2].strip("_")


def _normal(text: str) -> str:
    return " ".join(text.split())


def _lines(file: Path) -> Iterator[tuple[str, int, str]]:
    """Each line: the qualified name of the innermost function that it is in, number, text."""
    lines = file.read_text().splitlines()
    owner: dict[int, str] = {}

    def walk(node: ast.AST, names: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            inside = names
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inside = (*names, child.name)
                for number in range(child.lineno, (child.end_lineno or child.lineno) + 1):
                    owner[number] = ".".join(inside)
            walk(child, inside)

    walk(ast.parse("\n".join(lines)), ())
    for number, text in enumerate(lines, 1):
        yield owner.get(number, ""), number, text


def plant(spot: Spot) -> None:
    """Make the one line wrong."""
    lines = spot.file.read_text().splitlines()
    old = lines[spot.line - 1]
    lines[spot.line - 1] = old[: len(old) - len(old.lstrip())] + spot.new
    spot.file.write_text("\n".join(lines) + "\n")


def test(tree: Path, paths: Sequence[str], *, most_s: float) -> tuple[str | None, str]:
    """The first test that fails, if one does; and how pytest ended."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    command += ["-m", "not e2e", f"--timeout={TEST_S}", *paths]
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=tree, env=env, stdout=output, stderr=subprocess.STDOUT, text=True
        )
        try:
            code = process.wait(most_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return None, "took too long"
        output.seek(0)
        text = output.read()
    failed = _FAILED.search(text)
    if code in (0, 5):  # 5: none was collected
        return None, "passed"
    return (failed.group(1) if failed else f"pytest ended with {code}"), "failed"


class PlantedCopy:
    """One checkout's copy, in which defects are planted one after the other."""

    def __init__(self, tree: Path, copy: Path, packages: Mapping[str, Sequence[str]]) -> None:
        for name in COPIED:
            if (tree / name).is_dir():
                ignored = shutil.ignore_patterns(*NOT_COPIED)
                shutil.copytree(tree / name, copy / name, ignore=ignored)
        for path in tree.iterdir():
            if path.is_file():
                shutil.copy(path, copy)
        self._tree = copy
        self._packages = packages
        self._imports = Imports(copy)

    def try_one(
        self, defect: Mapping[str, str], *, stages: Sequence[str], most_s: float
    ) -> dict[str, str]:
        """Plant it, test, and take it out again."""
        spot, why = find(self._tree, defect)
        if spot is None:
            return {"result": "lost", "why": why}
        before = spot.file.read_text()
        where = str(spot.file.relative_to(self._tree))
        began_s = time.monotonic()
        plant(spot)
        try:
            ends = {}
            for stage, paths in self._stages(spot.file, defect, stages):
                left_s = most_s - (time.monotonic() - began_s)
                if left_s <= 0:
                    ends[stage] = "no time left"
                    continue
                killed_by, ends[stage] = test(self._tree, paths, most_s=left_s)
                if killed_by is not None:
                    return {"result": "killed", "file": where, "killed_by": killed_by}
            ended = ", ".join(f"{stage}: {how}" for stage, how in ends.items())
            return {"result": "survived", "file": where, "stages": ended}
        finally:
            spot.file.write_text(before)

    def _stages(
        self, file: Path, defect: Mapping[str, str], stages: Sequence[str]
    ) -> Iterator[tuple[str, list[str]]]:
        near, through = self._imports.tests_of(file)
        package = [
            path
            for path in self._packages[Path(defect["file"]).parts[0]]
            if (self._tree / path).exists()
        ]
        paths = {
            "near": [*near, *through[:MOST_FILES]],
            "package": package,
            "full": ["tests"],
            "e2e": ["tests", "-m", "e2e"],
        }
        yield from ((stage, paths[stage]) for stage in stages if paths[stage])


def as_toml(results: Mapping[str, Mapping[str, str]]) -> str:
    lines = []
    for name, one in results.items():
        lines += ["[[defect]]", f'id = "{name}"']
        lines += [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in one.items()]
        lines.append("")
    return "\n".join(lines)


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ids", nargs="*")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--survivors", action="store_true")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES[:2])
    parser.add_argument("--find-only", action="store_true", help="only say where each would be")
    parser.add_argument("--most-s", type=float, default=ALL_IN_ALL_S)
    options = parser.parse_args(arguments)
    listed: dict[str, Any] = tomllib.loads((HERE / "defects.toml").read_text())
    results: dict[str, dict[str, str]] = {}
    if options.results is not None and options.results.exists():
        for one in tomllib.loads(options.results.read_text())["defect"]:
            results[one.pop("id")] = one
    chosen = [one for one in listed["defect"] if one["id"] in (options.ids or [one["id"]])]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder).resolve()
        trial = PlantedCopy(HERE.parents[1], copy, listed["tests"])
        for defect in chosen:
            if options.find_only:
                spot, why = find(copy, defect)
                found = why if spot is None else f"{spot.file.relative_to(copy)}:{spot.line}"
                say(f"{defect['id']} {defect['function']}: {found}")
                continue
            known = results.get(defect["id"], {}).get("result")
            again = known == "survived" and options.survivors
            if known is not None and not options.ids and not again:
                continue
            result = trial.try_one(defect, stages=options.stages, most_s=options.most_s)
            results[defect["id"]] = result
            say(f"{defect['id']} {defect['function']}: {result}")
            if options.results is not None:
                options.results.write_text(as_toml(dict(sorted(results.items()))))
    count = dict.fromkeys(RESULTS, 0)
    for one in results.values():
        count[one["result"]] += 1
    say(", ".join(f"{number} {kind}" for kind, number in count.items()))


if __name__ == "__main__":
    main(sys.argv[1:])
