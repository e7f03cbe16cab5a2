"""The dashboards' command line: `python -m dashboards report RUN_DIR... -o FILE.html` and more.

Each command imports its own page: that of a conformance result needs no pandas, numpy or Plotly.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from harness.errors import WalkawayError, check_text
from harness.store.output import STDOUT, is_stdout, write_output

PROGRESS_EVERY_S: Final = 5.0


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code.

    A single argument `-` stands for a JSON list of arguments on standard input: a run starts
    this process before it has anything to draw.
    """
    if list(arguments) == ["-"]:
        line = sys.stdin.readline()
        if not line:
            return 0
        arguments = json.loads(line)
    options = _parser().parse_args(arguments)
    try:
        _write(options)
    except WalkawayError as error:
        with suppress(OSError):  # a run's log, on a disk that is full
            sys.stderr.write(f"error: {error}\n")
            sys.stderr.flush()
        return error.exit_code
    return 0


def _write(options: argparse.Namespace) -> None:
    try:
        options.write(options)
        if not is_stdout(options.output):
            write_output(STDOUT, f"{options.output}\n".encode(), ours=None)
    except UnicodeEncodeError as error:  # of a folder, say
        check_text(error.object)
        raise


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dashboards", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    report = commands.add_parser("report", help="draw finished runs as one HTML file")
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    report.set_defaults(write=_report)
    compare = commands.add_parser("compare", help="draw runs against a baseline")
    compare.add_argument("baseline", type=Path, metavar="RUN_DIR")
    compare.add_argument("candidates", nargs="+", type=Path, metavar="RUN_DIR")
    compare.set_defaults(write=_comparison)
    trend = commands.add_parser("trend", help="draw all runs of a folder over time")
    trend.add_argument("folder", type=Path, metavar="FOLDER")
    trend.set_defaults(write=_trend)
    conform = commands.add_parser("conform", help="draw a conformance result")
    conform.add_argument("folder", type=Path, metavar="DIR")
    conform.add_argument("-o", "--output", type=Path, metavar="FILE.html")
    conform.set_defaults(write=_conform)
    search = commands.add_parser("search", help="draw what a search found")
    search.add_argument("folder", type=Path, metavar="DIR")
    search.add_argument("-o", "--output", type=Path, metavar="FILE.html")
    search.set_defaults(write=_search)
    matrix = commands.add_parser("matrix", help="draw conformance results side by side")
    matrix.add_argument("results", nargs="+", type=Path, metavar="CONFORM_JSON")
    matrix.add_argument("--explanations", type=Path, metavar="FILE")
    matrix.set_defaults(write=_matrix)
    capacity = commands.add_parser("capacity", help="draw what a load needs")
    capacity.add_argument("folder", type=Path, metavar="DIR")
    capacity.set_defaults(write=_capacity)
    for command in (report, compare, trend, matrix, capacity):
        command.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.html")
    return parser


def _report(options: argparse.Namespace) -> None:
    from dashboards.report import write_report

    write_report(options.runs, options.output)


def _comparison(options: argparse.Namespace) -> None:
    from dashboards.comparison import write_comparison

    write_comparison(options.baseline, options.candidates, options.output)


def _trend(options: argparse.Namespace) -> None:
    from dashboards.trend import write_trend

    began_s = shown_s = time.monotonic()

    def watch(done: int, num: int) -> None:
        nonlocal shown_s
        now_s = time.monotonic()
        if now_s - shown_s < PROGRESS_EVERY_S:
            return
        shown_s = now_s
        left_s = (now_s - began_s) * (num - done) / done
        with suppress(OSError):
            sys.stderr.write(f"walkaway: run {done + 1} of {num}, about {left_s:.0f} s left\n")

    write_trend(options.folder, options.output, watch=watch)


def _conform(options: argparse.Namespace) -> None:
    from dashboards.conform_page import write_conform

    options.output = options.output or options.folder / "index.html"
    write_conform(options.folder, options.output)


def _search(options: argparse.Namespace) -> None:
    from dashboards.search_page import write_search

    options.output = options.output or options.folder / "index.html"
    write_search(options.folder, options.output)


def _matrix(options: argparse.Namespace) -> None:
    from dashboards.matrix import write_matrix

    write_matrix(options.results, options.output, options.explanations)


def _capacity(options: argparse.Namespace) -> None:
    from dashboards.capacity import write_capacity

    write_capacity(options.folder, options.output)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
