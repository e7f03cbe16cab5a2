"""Benchmarks against what others use: `python -m tools.bench [NAME...] [--out FILE]`.

A benchmark is a function `(*, quick: bool = False) -> Iterable[Ratio]` of a module in this folder.
It compares ours with theirs in rounds that take turns, so that a noisy machine hits both, and
yields a `Ratio` (ratio.py) for every line of the table: the median of the rounds' ratios, which
need not be the ratio of the two medians in that line. With `quick` it takes the smallest sizes: the
figures mean nothing then, but every line of it runs. Where it cannot run it raises
`UnavailableError`.
Each line goes to stderr, and to FILE as JSON, as soon as it is measured; the table follows at the
end, or when interrupted. The exit status is 1 if nothing was measured or a bound is broken (with
`--report-only` a broken bound is shown and no more), and 130 if interrupted.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TextIO

from tools.bench.ratio import BenchRatio, UnavailableError

BENCHMARKS = {  # each one's module, in which it is the function of its own name
    "scheduling": "scheduling",
    "cancel_stages": "scheduling",
    "linked_contexts": "linked_contexts",
    "relayed_abort": "hand_over",
    "model_speed": "model_speed",
    "served_speed": "served_speed",
    "model_speed_gpu": "decode_floor",
    "batch_invariance": "model_speed",
    "swap_or_recompute": "preemption",
    "found_again": "found_again",
    "virtual_time": "virtual_time",
    "load_generator": "load_generator",
    "grpc_tokens": "load_generator",
    "token_stamps": "load_generator",
    "client_times": "load_generator",
    "many_streams": "load_generator",
    "analysis": "large_run",
    "report": "large_run",
    "gate": "large_run",
}


def run(
    names: Iterable[str], *, quick: bool, leave_out: Callable[[str], None]
) -> Iterator[BenchRatio]:
    """All lines of the named benchmarks; `leave_out` gets the one that cannot run, and why."""
    for name in names:
        _say(f"{name} ...")
        try:
            module = import_module(f"tools.bench.{BENCHMARKS[name]}")
            yield from getattr(module, name)(quick=quick)
        except UnavailableError as error:
            leave_out(f"{name} left out: {error}")


def measure(ratios: Iterable[BenchRatio], out: TextIO | None) -> tuple[list[BenchRatio], bool]:
    """The lines, each written to `out` as soon as it comes, and whether they all came."""
    lines: list[BenchRatio] = []
    try:
        for ratio in ratios:
            lines.append(ratio)
            _say("  ".join(filter(None, _row(ratio))))
            if out is not None:
                out.write(json.dumps(asdict(ratio) | {"holds": ratio.holds}) + "\n")
                out.flush()
    except KeyboardInterrupt:
        return lines, False
    return lines, True


def table(ratios: list[BenchRatio]) -> str:
    rows: list[tuple[str, ...]] = [("", "ours", "theirs", "ratio", "quartiles", "bound", "")]
    rows += [_row(ratio) for ratio in ratios]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for what, *cells in rows:
        right = (f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join((f"{what:<{widths[0]}}", *right)).rstrip())
    return "\n".join(lines)


def _row(ratio: BenchRatio) -> tuple[str, ...]:
    low, high = ratio.spread
    verdict = "" if ratio.bound is None else "holds" if ratio.holds else "BROKEN"
    return (
        ratio.what,
        *(f"{figure:.4g} {ratio.unit}" for figure in (ratio.ours, ratio.theirs)),
        f"{ratio.ratio:.2f}",
        f"{low:.2f}-{high:.2f}",
        "" if ratio.bound is None else f"{ratio.bound.kind} {ratio.bound.value:g}",
        verdict,
    )


def report(ratios: list[BenchRatio], *, judges: bool = True) -> int:
    """Print the table; the exit status."""
    print(table(ratios) if ratios else "nothing measured", flush=True)  # noqa: T201
    holds = not judges or all(ratio.holds for ratio in ratios)
    return 0 if ratios and holds else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.bench")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument(
        "--quick",
        "--rehearse",
        action="store_true",
        help="smallest sizes, of a GPU's benchmark on the CPU: does it run at all?",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="each line as JSON, too")
    parser.add_argument(
        "--report-only", action="store_true", help="a broken bound is no failure: exit status 0"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(BENCHMARKS):
        parser.error(
            f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}"
        )
    left_out: list[str] = []
    with nullcontext() if arguments.out is None else arguments.out.open("w") as out:
        names = arguments.names or BENCHMARKS
        lines = run(names, quick=arguments.quick, leave_out=left_out.append)
        ratios, is_whole = measure(lines, out)
    status = report(ratios, judges=not arguments.report_only)
    for text in left_out:
        _say(text)
    return status if is_whole else 130


def _say(text: str) -> None:
    print(text, file=sys.stderr)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
