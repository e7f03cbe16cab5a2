"""Each real gateway alone on the machine: up, the cases of `walkaway conform --upstream`, down; and
all that once more, with fresh processes.

`make gateways`, or `python -m tools.gateways_matrix [--quick] [--out DIR] [GATEWAY ...]`.
results/gateways/GATEWAY-VERSION/ keeps conform.json and its page, the wire logs of red cases, and
runs.json with every command, its exit code, how long it took, and the cases whose verdicts were
others the second time. At last index.html is written, of all that stand there. The exit code is 1
if a gateway did not start, could not be judged, or was judged otherwise the second time.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from harness.run.process import free_port
from harness.run.recipes import load_recipes
from harness.store.conform_result import CONFORM_FILE, CaseResult, Verdict, read_conform
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
    return steps


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
    """While a gateway starts: routers ask who is there."""
    command = [sys.executable, "-m", "harness", "upstream", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.terminate()


def _verdict(one: CaseResult | None) -> tuple[Verdict, str] | None:
    return None if one is None else (one.verdict, str(one.kind))


def _said(one: CaseResult | None) -> str:
    return "not run" if one is None else f"{one.verdict} {one.kind or ''} ({one.reason})"


def main() -> int:
    known = gateways()
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("gateways", nargs="*", metavar="GATEWAY", help=", ".join(known))
    parser.add_argument("--quick", action="store_true", help="the suite's quick cases only")
    parser.add_argument("--out", type=Path, default=Path("results/gateways"))
    given = parser.parse_args()
    failed = []
    for number, gateway in enumerate(given.gateways or known, start=1):
        steps = measure(gateway, given.out, ["--quick"] if given.quick else [])
        failed += [
            (gateway, step)
            for step in steps
            if step["exit_code"] not in (JUDGED if step["what"] == "conform" else (0,))
        ]
        print(f"{number}/{len(given.gateways or known)} gateways", file=sys.stderr)  # noqa: T201
    files = [str(file) for file in sorted(given.out.glob(f"*/{CONFORM_FILE}"))]
    if files:
        walkaway([], "matrix", "matrix", *files, "-o", str(given.out / "index.html"))
    for gateway, step in failed:
        print(f"{gateway}: {step['what']} ended with {step['exit_code']}: {step['said']}")  # noqa: T201
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
