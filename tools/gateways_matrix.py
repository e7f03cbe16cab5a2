"""Each real gateway alone on the machine: up, the cases of `walkaway conform --upstream`, down; and
all that once more, with fresh processes.

`make gateways`, or `python -m tools.gateways_matrix [--quick] [--out DIR] [GATEWAY ...]`.
results/gateways/GATEWAY-VERSION/ keeps conform.json and its page, the wire logs of red cases, and
runs.json with every command, its exit code, how long it took, and the cases whose verdicts were
others the second time. At last matrix.html is written, of all that stand there, and README.md with
a line of each (`--table`: these two alone). The exit code is 1 if a gateway did not start, could
not be judged, or was judged otherwise the second time.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from harness.conform.gateway.case import DIALECTS
from harness.run.process import free_port
from harness.run.recipes import engines_home, load_recipes
from harness.store.conform_result import CONFORM_FILE, CaseResult, Contract, Verdict, read_conform
from tools.engines_matrix import Step, keep_what_failed, served, walkaway

TIMES: Final = 2
UPSTREAM_LOG: Final = "upstream.jsonl"
JUDGED: Final = (0, 3, 4)  # exit codes of a suite that has decided cases


def gateways() -> list[str]:
    return [name for name, one in load_recipes().items() if one.is_hop]


def measure(gateway: str, out: Path, words: list[str]) -> list[Step]:
    steps: list[Step] = []
    folder = out / f"{gateway}-{load_recipes()[gateway].version}"
    shutil.rmtree(folder, ignore_errors=True)
    walkaway(steps, "install", "targets", "install", gateway)
    first = _judged(gateway, folder, steps, words)
    for _ in range(1, TIMES):
        again = folder / "again"
        second = _judged(gateway, again, steps, words)
        others = sorted(
            f"{name}: {_said(first.get(name))}, then {_said(second.get(name))}"
            for name in first | second
            if _verdict(first.get(name)) != _verdict(second.get(name))
        )
        said = "; ".join(others) or "equal verdicts"
        if not others:
            shutil.rmtree(again, ignore_errors=True)
        steps.append({"what": "compare", "exit_code": int(bool(others)), "said": said})
        print(json.dumps(steps[-1]), flush=True)  # noqa: T201
    if (folder / CONFORM_FILE).exists():
        keep_what_failed(folder)
        (folder / "runs.json").write_text(json.dumps(steps, indent=1) + "\n")
        hide_home(folder)
    return steps


def hide_home(folder: Path) -> None:
    """The commands that are kept name no folder of this machine."""
    for file in folder.glob("*.*"):
        text = file.read_text()
        file.write_text(text.replace(str(engines_home()), "$WALKAWAY_ENGINES"))


def _judged(
    gateway: str, folder: Path, steps: list[Step], words: list[str]
) -> dict[str, CaseResult]:
    port = free_port()
    direct = f"http://127.0.0.1:{port}"
    with _upstream(port) as stand_in, served(gateway, steps, "--direct", direct) as up:
        stand_in.terminate()  # the suite starts its own
        stand_in.wait()
        if up is None:
            return {}
        asked = [*_command(gateway, up, port), *words, "--quiet", "--out", str(folder)]
        walkaway(steps, "conform", *asked)
    if not (folder / CONFORM_FILE).exists():
        return {}
    (folder / UPSTREAM_LOG).unlink(missing_ok=True)
    return {one.id: one for one in read_conform(folder / CONFORM_FILE).cases}


def _command(gateway: str, up: dict[str, Any], port: int) -> list[str]:
    flags = ["--target", up["url"], "--engine", up["target"], "--upstream", str(port)]
    flags += [word for url in up["metrics_urls"] for word in ("--metrics-url", url)]
    flags += ["--usage", up["usage"]] if up["usage"] else []
    flags += ["--pid", str(up["pids"][-1])]
    version = load_recipes()[gateway].version
    return ["conform", *flags, "--configuration", f"{gateway} {version}"]


@contextmanager
def _upstream(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """An upstream that runs while a gateway starts: routers ask who is there."""
    command = [sys.executable, "-m", "harness", "upstream", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.terminate()


HEADS: Final = (
    *("gateway", "dialects", "decided", "red", "in mid-stream", "before the headers"),
    *("unary", "after the last token", "the bill", "s of measuring"),
)
SHOWN: Final = ("hop/fin-decode", "hop/before-headers", "hop/unary", "hop/last-token")
WORST: Final[tuple[Contract, ...]] = ("never", "drain", "at next write", "cancel")
BILL: Final = {Verdict.PASS: "true", Verdict.FAIL: "false", Verdict.CANNOT_DECIDE: "open"}
ABOUT: Final = """# Real gateways, measured

Each alone on two cores before walkaway's upstream, twice, by `make gateways`.
[matrix.html](matrix.html) has each case in each dialect, and why it is red. A client that leaves:
does the gateway cancel its request to the server at once, at its next write, or never? Where the
dialects differ, the worst one stands here. Decided: of the cases that apply. The bill is true if
`delivered ≤ billed ≤ generated` for each request; empty where the gateway keeps none. Written by
`python -m tools.gateways_matrix --table`.

"""


def write_table(files: Sequence[Path], page: Path) -> None:
    rows = [HEADS, ("---", "---", *["---:"] * 2, *["---"] * 5, "---:")]
    rows += [_row(file) for file in files]
    page.write_text(ABOUT + "".join(f"| {' | '.join(row)} |\n" for row in rows))


def _row(file: Path) -> tuple[str, ...]:
    result = read_conform(file)
    counts = Counter(one.verdict for one in result.cases)
    decided = counts[Verdict.PASS] + counts[Verdict.FAIL]
    applicable = decided + counts[Verdict.CANNOT_DECIDE] + counts[Verdict.HARNESS]
    steps: list[Step] = json.loads((file.parent / "runs.json").read_bytes())
    seconds = next(step["seconds"] for step in steps if step["what"] == "conform")
    spoken = dict.fromkeys(one.dialect for one in result.cases if one.dialect)
    bills = {one.verdict for one in result.cases if one.id.startswith("bill/left/")}
    return (
        str(result.target.configuration),
        "all" if len(spoken) == len(DIALECTS) else ", ".join(spoken),
        f"{decided} of {applicable}",
        str(counts[Verdict.FAIL] or ""),
        *(_contract(result.cases, case) for case in SHOWN),
        next((said for verdict, said in reversed(BILL.items()) if verdict in bills), ""),
        f"{seconds:.0f}",
    )


def _contract(cases: Sequence[CaseResult], case: str) -> str:
    """The worst of the dialects."""
    kept = {one.contract for one in cases if one.id.startswith(f"{case}/")}
    return next((one for one in WORST if one in kept), "")


def _verdict(one: CaseResult | None) -> tuple[Verdict, str] | None:
    return None if one is None else (one.verdict, str(one.kind))


def _said(one: CaseResult | None) -> str:
    return "not run" if one is None else f"{one.verdict} {one.kind or ''} ({one.reason})"


def main() -> int:
    known = gateways()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("gateways", nargs="*", metavar="GATEWAY", help=", ".join(known))
    parser.add_argument("--quick", action="store_true", help="the suite's quick cases only")
    parser.add_argument("--table", action="store_true", help="write the pages, measure nothing")
    parser.add_argument("--out", type=Path, default=Path("results/gateways"))
    given = parser.parse_args()
    failed = []
    wanted = [] if given.table else given.gateways or known
    for number, gateway in enumerate(wanted, start=1):
        steps = measure(gateway, given.out, ["--quick"] if given.quick else [])
        failed += [
            (gateway, step)
            for step in steps
            if step["exit_code"] not in (JUDGED if step["what"] == "conform" else (0,))
        ]
        print(f"{number}/{len(wanted)} gateways", file=sys.stderr)  # noqa: T201
    folders = [f"{name}-{one.version}" for name, one in load_recipes().items() if one.is_hop]
    files = [given.out / folder / CONFORM_FILE for folder in folders]
    files = [file for file in files if file.exists()]
    if files:
        walkaway([], "matrix", "matrix", *map(str, files), "-o", str(given.out / "matrix.html"))
        write_table(files, given.out / "README.md")
    for gateway, step in failed:
        print(f"{gateway}: {step['what']} ended with {step['exit_code']}: {step['said']}")  # noqa: T201
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
