"""Benchmarks against what others use: `python -m tests.bench [NAME...] [--quick] [--out FILE]`.

A benchmark is a function `(*, quick: bool = False) -> Iterable[Ratio]` of a module in this folder.
It compares ours with theirs in rounds that take turns, so that a noisy machine hits both, and
yields a `Ratio` (ratio.py) for every line of the table: the median of the rounds' ratios, which
need not be that of the two medians beside it. With `quick` it takes the smallest sizes: the figures
mean nothing then, but every line of it runs. Where it cannot run it raises `UnavailableError`.
Progress goes to stderr; the exit status is 1 if a bound is broken or nothing was measured.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from tests.bench.ratio import Ratio, UnavailableError

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


def run(names: Iterable[str], *, quick: bool) -> Iterator[Ratio]:
    """All lines of the named benchmarks; one that cannot run says so and is left out."""
    for name in names:
        print(f"{name} ...", file=sys.stderr)  # noqa: T201
        try:
            module = import_module(f"tests.bench.{BENCHMARKS[name]}")
            yield from getattr(module, name)(quick=quick)
        except UnavailableError as error:
            print(f"{name} left out: {error}", file=sys.stderr)  # noqa: T201


def table(ratios: list[Ratio]) -> str:
    rows: list[tuple[str, ...]] = [("", "ours", "theirs", "ratio", "quartiles", "bound", "")]
    rows += [_row(ratio) for ratio in ratios]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for what, *cells in rows:
        right = (f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join((f"{what:<{widths[0]}}", *right)).rstrip())
    return "\n".join(lines)


def _row(ratio: Ratio) -> tuple[str, ...]:
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


def report(ratios: list[Ratio]) -> int:
    """Print the table; the exit status."""
    print(table(ratios) if ratios else "nothing measured")  # noqa: T201
    return 0 if ratios and all(ratio.holds for ratio in ratios) else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument(
        "--quick",
        "--rehearse",
        action="store_true",
        help="smallest sizes, of a GPU's benchmark on the CPU: does it run at all?",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="the lines as JSON, too")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(BENCHMARKS):
        parser.error(
            f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}"
        )
    ratios = list(run(arguments.names or BENCHMARKS, quick=arguments.quick))
    if arguments.out is not None:
        lines = [asdict(ratio) | {"holds": ratio.holds} for ratio in ratios]
        arguments.out.write_text(json.dumps(lines, indent=2) + "\n")
    return report(ratios)


if __name__ == "__main__":
    sys.exit(main())
