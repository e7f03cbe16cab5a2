"""Each real engine alone on the machine: up, the conformance suite, four headline runs, down.
Some come a second time, as other users start them, for the suite alone.

`make matrix`, or `python -m tools.engines_matrix [--quick] [--out DIR] [ENGINE ...]`.
results/engines/ENGINE-VERSION/ keeps conform.json and its page, the wire logs of red cases, each
run's manifest and summary, and runs.json with every command, its exit code and how long it took;
at last matrix.html of all that stand there, and README.md with a line of each (`--table`: these
two alone). An engine that dies in a case is started again.
An engine that does not start, or a run that fails, is named at the end, and the exit code is 1.
"""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from harness.conform.reports import draw_page
from harness.conform.verdict import exit_code
from harness.run.recipes import load_recipes
from harness.store.conform_result import (
    CONFORM_FILE,
    WIRE_FOLDER,
    Aftermath,
    CaseResult,
    Verdict,
    read_conform,
)
from harness.store.manifest import find_versions


class Column(NamedTuple):
    """`words`: of `targets up`. `runs`: whether it takes part in the headline runs."""

    recipe: str
    words: tuple[str, ...] = ()
    runs: bool = True


ENGINES: Final = {
    "reference": Column("reference"),
    "vllm": Column("vllm"),
    "vllm-128-slots": Column("vllm", ("--slots", "128"), runs=False),
    "llamacpp": Column("llamacpp"),
    "llamacpp-tiny": Column("llamacpp", ("--model", "tiny"), runs=False),
    "transformers": Column("transformers", runs=False),
    "transformers-plain": Column("transformers-plain", runs=False),
    "dynamo": Column("dynamo"),
    "triton": Column("triton"),
}
HOPS: Final = ("nginx", "nginx-unbuffered", "litellm", "litellm-cancelling")
BEHIND: Final = "llamacpp"  # the hops
MOST_STARTS: Final = 4
HOP_CASES: Final = ("hop/", "stream/", "unary/")
KEPT: Final = ("manifest.json", "summary.json")
SHORT: Final = ("run.max_seconds=45", "load.answer_tokens=2000")
RUNS: Final = {
    "slot_recovery": ("slot_recovery", "load.slots={slots}", "run.max_seconds=60"),
    "demo": ("demo", *SHORT),
    "queue_abandon": ("queue_abandon", *SHORT),
    "unary": (
        "demo",
        *SHORT,
        "load.abandon_after_tokens=[]",
        'load.mix=[{plan="time",seconds=[0.05,0.5],delivery="unary"}]',
    ),
}
UNFIT: Final = {"triton": ("unary",)}  # gRPC has streams only

Step = dict[str, Any]


def walkaway(steps: list[Step], what: str, *words: str) -> str:
    command = [sys.executable, "-m", "harness", *words]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, check=False)
    errors = done.stderr.decode(errors="replace").strip()
    step = {
        "what": what,
        "command": shlex.join(["walkaway", *words]),
        "exit_code": done.returncode,
        "seconds": round(time.monotonic() - began, 1),
        "said": errors.splitlines()[-1] if errors else "",
    }
    steps.append(step)
    print(json.dumps(step), flush=True)  # noqa: T201
    return done.stdout.decode(errors="replace")


@contextmanager
def served(name: str, steps: list[Step], *words: str) -> Iterator[dict[str, Any] | None]:
    """The line of `targets up`, or None if it did not come up, or was up before. What came up is
    ended."""
    said = walkaway(steps, f"up {name}", "targets", "up", name, *words)
    if steps[-1]["exit_code"] != 0:
        yield None
        return
    try:
        yield json.loads(said)
    finally:
        walkaway(steps, f"down {name}", "targets", "down", name)


def flags_of(up: dict[str, Any]) -> list[str]:
    pages = [word for url in up["metrics_urls"] for word in ("--metrics-url", url)]
    return ["--target", up["url"], "--engine", up["engine"], "--model", up["model"], *pages]


def conform(folder: Path, steps: list[Step], flags: list[str], *words: str) -> None:
    walkaway(steps, "conform", "conform", *flags, *words, "--out", str(folder))


def cases_after_death(folder: Path) -> list[str]:
    """The cases without a judgement, since the server died in one before them."""
    cases = read_conform(folder / CONFORM_FILE).cases
    deaths = [n for n, one in enumerate(cases, start=1) if one.aftermath is Aftermath.DEAD]
    return [one.id for one in cases[deaths[-1] :]] if deaths else []


def take_in(folder: Path, again: Path) -> None:
    """The results of a run with the rest of the cases, on a server that was started again."""
    result, rest = read_conform(folder / CONFORM_FILE), read_conform(again / CONFORM_FILE)
    first = next(n for n, one in enumerate(result.cases) if one.id == rest.cases[0].id)
    result.notes.append(f"the server ended in {result.cases[first - 1].id} and was started again")
    result.cases[first:] = rest.cases
    result.exit_code = exit_code(result.cases, strict=result.strict)
    for log in (again / WIRE_FOLDER).glob("*"):
        log.replace(folder / WIRE_FOLDER / log.name)
    result.write(folder)
    shutil.rmtree(again)


def keep_what_failed(folder: Path) -> None:
    failed = {one.wire_log for one in read_conform(folder / CONFORM_FILE).cases if is_red(one)}
    for log in (folder / WIRE_FOLDER).glob("*"):
        if f"{WIRE_FOLDER}/{log.name}" not in failed:
            log.unlink()
    draw_page(folder)


def is_red(one: CaseResult) -> bool:
    return one.verdict is Verdict.FAIL


def measure(
    folder: Path, steps: list[Step], flags: list[str], *, slots: int, unfit: tuple[str, ...]
) -> None:
    for what, (workload, *settings) in RUNS.items():
        if what in unfit:
            steps.append({"what": what, "exit_code": 0, "said": "not run: gRPC has streams only"})
            continue
        work = folder / "work"
        filled = [one.replace("{slots}", str(slots)) for one in settings]
        sets = [word for one in filled for word in ("--set", one)]
        walkaway(steps, what, "run", workload, *sets, *flags, "--quiet", "--out", str(work))
        for name in KEPT:
            if (work / name).exists():
                (folder / what).mkdir(exist_ok=True)
                shutil.copy(work / name, folder / what / name)
        shutil.rmtree(work, ignore_errors=True)


def column(engine: str, out: Path, words: list[str]) -> list[Step]:
    steps: list[Step] = []
    folder = fresh(out, engine)
    if engine == "reference":
        ours: dict[str, Any] = {"name": engine, "slots": 8, "model": "tiny"}
        conform(folder, steps, [], *words, "--configuration", configuration(ours, ours))
        measure(folder, steps, [], slots=ours["slots"], unfit=())
    elif engine in HOPS:
        with served(BEHIND, steps) as direct:
            if direct is not None:
                with served(engine, steps, "--direct", direct["url"]) as hop:
                    if hop is not None:
                        of_hop = ["--configuration", configuration(hop, direct), *HOP_CASES]
                        conform(
                            folder, steps, flags_of(hop), *words, *of_hop, "--direct", direct["url"]
                        )
    else:
        real_engine(engine, folder, steps, words)
    if (folder / CONFORM_FILE).exists():
        keep_what_failed(folder)
    (folder / "runs.json").write_text(json.dumps(steps, indent=1) + "\n")
    return steps


def real_engine(engine: str, folder: Path, steps: list[Step], words: list[str]) -> None:
    """One that dies in a case is started again for the cases after it."""
    rest: list[str] = []
    recipe, up_words, has_runs = ENGINES[engine]
    for _ in range(MOST_STARTS):
        with served(recipe, steps, *up_words) as up:
            if up is None:
                return
            # The last process is the one that is talked to. The suite finds the slots.
            own = ["--pid", str(up["pids"][-1])]
            flags = [*own, "--configuration", configuration(up, up, *up_words), *words]
            conform(folder / "again" if rest else folder, steps, flags_of(up), *flags, *rest)
            if rest:
                take_in(folder, folder / "again")
            if not (folder / CONFORM_FILE).exists():
                return
            rest = cases_after_death(folder)
            if not rest:
                if has_runs:
                    unfit = UNFIT.get(engine, ())
                    measure(folder, steps, flags_of(up), slots=up["slots"], unfit=unfit)
                return


def version_of(engine: str) -> str:
    if engine == "reference":
        return find_versions()["walkaway"]
    return load_recipes()[ENGINES[engine].recipe if engine in ENGINES else engine].version


def configuration(up: dict[str, Any], server: dict[str, Any], *words: str) -> str:
    """`server`: itself, or the one behind the hop. `words`: of `targets up`."""
    name = f"{up['name']} {version_of(up['name'])}"
    behind = "" if server is up else f" before {server['name']}"
    slots = f", {server['slots']} slots" if server["slots"] else ""
    others = [word for word in words if word not in ("--slots", str(server["slots"]))]
    return f"{name}{behind}{slots}, {' '.join(others) or up['model']}"


HEADS: Final = ("server", "applicable cases", "decided", "red", "minutes of `walkaway conform`")
ABOUT: Final = """# Real engines, measured

Each alone on two cores, by `make matrix`. [matrix.html](matrix.html) has each case of each server,
and why it is red. Written by `python -m tools.engines_matrix --table`.

"""


def write_table(files: Sequence[Path], page: Path) -> None:
    """A case is applicable if it is judged and supported."""
    rows = [HEADS, ("---", *["---:"] * (len(HEADS) - 1))]
    for file in files:
        result = read_conform(file)
        counts = Counter(one.verdict for one in result.cases)
        decided = counts[Verdict.PASS] + counts[Verdict.FAIL]
        applicable = decided + counts[Verdict.CANNOT_DECIDE] + counts[Verdict.HARNESS]
        steps: list[Step] = json.loads((file.parent / "runs.json").read_bytes())
        minutes = sum(step["seconds"] for step in steps if step["what"] == "conform") / 60
        name = result.target.configuration.replace("|", "/")
        share = f"{decided} ({decided / applicable:.0%})"
        rows.append(
            (name, str(applicable), share, str(counts[Verdict.FAIL] or ""), f"{minutes:.1f}")
        )
    page.write_text(ABOUT + "".join(f"| {' | '.join(row)} |\n" for row in rows))


def folder_of(out: Path, engine: str) -> Path:
    return out / f"{engine}-{version_of(engine)}"


def fresh(out: Path, engine: str) -> Path:
    folder = folder_of(out, engine)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engines", nargs="*", choices=[*ENGINES, *HOPS, []], metavar="ENGINE")
    parser.add_argument("--quick", action="store_true", help="the suite's quick cases only")
    parser.add_argument("--table", action="store_true", help="write the pages, measure nothing")
    parser.add_argument("--out", type=Path, default=Path("results/engines"))
    given = parser.parse_args()
    files = [folder_of(given.out, engine) / CONFORM_FILE for engine in (*ENGINES, *HOPS)]
    failed = [
        (engine, step)
        for engine in ([] if given.table else given.engines or (*ENGINES, *HOPS))
        for step in column(engine, given.out, ["--quick"] if given.quick else [])
        # A suite that finds something ends with 3 or 4: that is a result.
        if step["exit_code"] not in ((0, 3, 4) if step["what"] == "conform" else (0,))
    ]
    results = [str(file) for file in files if file.exists()]
    last: list[Step] = []
    if results:
        walkaway(last, "matrix", "matrix", *results, "-o", str(given.out / "matrix.html"))
        write_table([Path(one) for one in results], given.out / "README.md")
    failed += [("matrix", step) for step in last if step["exit_code"] != 0]
    for engine, step in failed:
        print(f"{engine}: {step['what']} ended with code {step['exit_code']}: {step['said']}")  # noqa: T201
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
