"""The table fault → verdict: the cases of `walkaway conform` that a fault of the bundled engine
must turn red, and cases that must stay green; and what an odd scripted server turns red.

    python -m tools.truth.conform_cases [FAULT...] [--times 3]

Each row has an engine of its own, each case of a row one more where a case leaves the engine in a
state that the next one would be blamed for. The exit status is 1 if a verdict is another than the
table's, or differs from one time to the next. `make conform-docs` writes docs/conform/faults.md.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from harness.conform.config import OWN_ENGINE
from harness.store.conform_result import (
    CONFORM_FILE,
    CaseResult,
    ConformResult,
    Failure,
    Verdict,
    read_conform,
)
from tests.reference_engine.running_engine import RunningEngine

LONGEST_S: Final = 600


class Row(NamedTuple):
    """A fault as `--fault` takes it, the cases that it must turn red, and some that must stay
    green. `alone`: each case gets an engine of its own. `soon`: cheap enough for every change."""

    fault: str
    red: tuple[str, ...]
    green: tuple[str, ...]
    alone: bool = False
    soon: bool = False

    @property
    def ids(self) -> tuple[str, ...]:
        return self.red + self.green


LEFT = ("stream/fin-decode", "stream/rst-decode", "stream/before-first", "stream/reused-conn")
FANNED = ("n/parent", "dialect/chat")
CROWDS = ("storm/all", "retry/while-alive")
OTHERS = ("bystander/text", "bystander/ends", "next/length", "next/text")
SAME = ("same/answer", "same/prefill", "same/queue", "same/twin")

ROWS: Final = (
    Row("ignore-disconnect", (*LEFT, *FANNED, *CROWDS, "unary/leave", "ghost/rate"), OTHERS),
    Row("ignore-disconnect-unary", ("unary/leave",), ("stream/fin-decode",)),
    Row(
        "ignore-disconnect-while-waiting",
        ("stream/before-first", "queue/leave", "prefill/leave"),
        ("stream/fin-decode",),
    ),
    Row("delay-abort=0.3", (*LEFT, "unary/leave"), ("leak/slots",)),
    Row("delay-abort=0.02", (), (*LEFT, "queue/leave", "unary/leave", "leak/slots")),
    Row("lose-abort=0.02", ("ghost/rate",), ("next/length", "next/text")),
    Row("die-on-abort", ("stream/fin-decode",), (), soon=True),
    Row("abort-by-prefix", ("api/ids",), ("stream/fin-decode",)),
    Row("abort-parent-only", ("n/parent",), ("stream/fin-decode",)),
    Row("stall-survivors-on-abort=0.1", ("bystander/pace",), ("bystander/text",)),
    Row("leak-slot", (*LEFT, "leak/slots", "storm/all"), ("queue/bystander",), alone=True),
    Row("leak-blocks=2", ("leak/kv",), ("stream/fin-decode",)),
    Row("hold-blocks=10", ("leak/kv", "rest/no-traffic"), ("stream/fin-decode",), alone=True),
    Row("drop-prefix-on-cancel", (), ("prefix/survives", "stream/fin-decode", "next/text")),
    Row("double-count", ("count/aborts",), ("stream/fin-decode", "leak/slots"), soon=True),
    Row("never-count", ("count/aborts",), ("stream/fin-decode", "leak/slots")),
    Row("stale-gauge=6", ("gauge/rest",), ("count/aborts", "stream/fin-decode")),
    Row("queued-abort-ends-running", ("queue/bystander",), ("stream/fin-decode",), soon=True),
    Row("running-abort-ends-running", ("bystander/ends",), ("queue/bystander",), soon=True),
    Row("next-short", ("next/length",), ("stream/fin-decode",)),
    Row("reuse-before-step-ends", ("bystander/text", "next/text"), ("stream/fin-decode",)),
    Row(
        "wedge-after=40",
        ("wedge/health", "queue/mass", "dose/sweep"),
        ("stream/fin-decode",),
        alone=True,
    ),
    Row("clean-up-on-traffic", ("rest/no-traffic",), ("stream/fin-decode",)),
    Row("prefill-runs-on", ("prefill/leave", "dose/sweep"), ("stream/fin-decode",)),
    Row(
        "second-prefill-dies",
        ("prefill/retry-at-once", "prefill/beside"),
        ("prefill/leave",),
        alone=True,
    ),
    Row("end-twice", ("stream/last-token",), ("stream/fin-decode",), alone=True),
    Row("grow-memory=1", ("leak/process",), ("leak/slots", "leak/kv")),
    Row("abort-after-done", ("done/read-to-eof",), ("stream/fin-decode",)),
    Row("label-length", ("count/label",), ("count/aborts",)),
    Row("forget-aborted-tokens", ("count/tokens",), ("count/aborts",)),
    Row("cancel-does-nothing", ("api/cancel",), ("stream/fin-decode",), soon=True),
    Row("poll-rearms", ("watch/polling",), ("unary/leave",)),
    Row("spoil-prompt", SAME, ("next/text", "stream/fin-decode")),
    Row("count-left-as-waiting", ("gauge/rest",), ("count/aborts", "stream/fin-decode")),
    Row("grow-with-answers=0.02", (), ("leak/process",)),
    Row("abort-says-stop", ("api/label", "deadline/straddle"), ("stream/fin-decode",)),
    Row("compute-refused", ("reject/too-long",), ("stream/fin-decode",)),
)


class Odd(NamedTuple):
    """Settings of the scripted server (tools/truth/dialects.py), and how the case must fail."""

    case: str
    settings: dict[str, float | str]
    kind: Failure

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.settings.items())


ODD: Final = (
    Odd("h2/rst-one", {"rst_stream": "end all"}, Failure.HARM),
    Odd("shape/stall", {"stalled": "cut"}, Failure.HARM),
    Odd("session/clean", {"keeps_stopped": 1}, Failure.HARM),
    Odd("h2/rst-one", {"rst_stream": "ignore"}, Failure.NEVER),
    Odd("shape/stall", {"stalled": "forget"}, Failure.NEVER),
    Odd("shape/half-close", {"half_close": "ghost"}, Failure.NEVER),
    Odd("structured/leave", {"compiles_on": 1, "compile_s": 0.4}, Failure.LATE),
    Odd("n/parent", {"forgets_others": 1}, Failure.NEVER),
    Odd("n/prompts", {"forgets_others": 1}, Failure.NEVER),
    Odd("n/prompts", {"keeps_queued": 1}, Failure.NEVER),
    Odd("dialect/chat", {"deaf_route": "/chat/completions"}, Failure.NEVER),
    Odd("dialect/responses", {"deaf_route": "/responses"}, Failure.NEVER),
    Odd("dialect/messages", {"deaf_route": "/messages"}, Failure.NEVER),
)


# Habits of the scripted server of services (tools/truth/services.py).
HABITS: Final = (
    Odd("silence/leave", {"silent_tokens": 40, "deaf_between": 1}, Failure.LATE),
    Odd("tools/leave", {"piece_tokens": 40, "deaf_between": 1}, Failure.LATE),
    Odd("same/answer", {"spoils_cold": 1}, Failure.HARM),
    Odd("pooling/leave", {"ranks_on": 1}, Failure.NEVER),
    Odd("background/cancel", {"cancel": "lies"}, Failure.NEVER),
    Odd("background/cancel", {"ended": "refused"}, Failure.HARM),
    Odd("background/cancel", {"cancels_foreground": 1}, Failure.HARM),
    Odd("adapter/pinned", {"pins": 1}, Failure.NEVER),
    Odd("resume/stop", {"stop": "never"}, Failure.NEVER),
    Odd("resume/stop", {"stop": "late"}, Failure.NEVER),
    Odd("resume/abandoned", {"keeps_chars": 20}, Failure.HARM),
)


def engine_flags(fault: str, **changes: float) -> list[str]:
    """The flags of the engine that `walkaway conform` starts itself, with the fault."""
    flags = []
    for name, value in {**OWN_ENGINE.model_dump(exclude_unset=True), **changes}.items():
        flags += ["--" + name.replace("_", "-"), str(value)]
    return [*flags, "--fault", fault] if fault else flags


def conform(folder: Path, *arguments: str) -> ConformResult:
    """Run `walkaway conform`. Raises RuntimeError if it leaves no result."""
    command = [sys.executable, "-m", "harness", "conform", *arguments, "--out", str(folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LONGEST_S, check=False, cwd=folder.parent
    )
    if not (folder / CONFORM_FILE).exists():
        raise RuntimeError(f"{' '.join(command)}: {done.stderr[-600:]}")
    return read_conform(folder / CONFORM_FILE)


def judge(row: Row, folder: Path) -> dict[str, CaseResult]:
    """The results of the row's cases, in its order."""
    found: dict[str, CaseResult] = {}
    for number, ids in enumerate([[one] for one in row.ids] if row.alone else [row.ids]):
        engine = RunningEngine(*engine_flags(row.fault), stderr=subprocess.DEVNULL)
        try:
            target = ("--target", engine.url, "--engine", "reference")
            pid = ("--pid", str(engine.process.pid))
            result = conform(folder / f"{row.fault or 'none'}-{number}", *ids, *target, *pid)
        finally:
            engine.stop()  # some faults end it before
        found |= {one.id: one for one in result.cases}
    return {one: found[one] for one in row.ids}


def wrong(row: Row, results: dict[str, CaseResult]) -> list[str]:
    """Each difference from the table, in a sentence."""
    lines = []
    for name, result in results.items():
        should_fail = name in row.red
        good = (Verdict.FAIL,) if should_fail else (Verdict.PASS, Verdict.INFO)
        if result.verdict not in good:
            wanted = "red" if should_fail else "green"
            lines.append(f"{row.fault}: {name} is {result.verdict}, not {wanted}: {result.reason}")
    return lines


def kinds_of(results: dict[str, CaseResult]) -> dict[str, str]:
    return {name: str(result.kind) for name, result in results.items()}


def run_table(rows: Sequence[Row], times: int) -> int:
    problems = 0
    for row in rows:
        seen: list[dict[str, Verdict]] = []
        results: dict[str, CaseResult] = {}
        for _ in range(times):
            with tempfile.TemporaryDirectory() as folder:
                results = judge(row, Path(folder))
            found = wrong(row, results)
            problems += len(found)
            print("\n".join([f"{row.fault}: {kinds_of(results)}", *found]), flush=True)  # noqa: T201
            seen.append({name: result.verdict for name, result in results.items()})
        if any(one != seen[0] for one in seen):
            problems += 1
            print(f"{row.fault}: verdicts differ: {seen}", flush=True)  # noqa: T201
    return 1 if problems else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.truth.conform_cases")
    parser.add_argument("faults", nargs="*", help="the faults whose rows to run; default: all")
    parser.add_argument("--times", type=int, default=1, help="how often, with equal verdicts")
    given = parser.parse_args()
    rows = [row for row in ROWS if not given.faults or row.fault.split("=")[0] in given.faults]
    return run_table(rows, given.times)


if __name__ == "__main__":
    sys.exit(main())
