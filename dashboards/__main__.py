"""The dashboards' command line: `python -m dashboards report RUN_DIR... -o FILE.html`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dashboards.report import write_report
from harness.errors import WalkawayError


def main(arguments: Sequence[str]) -> int:
    """Run the command and say where the result lies. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m dashboards", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    report = commands.add_parser("report", help="draw finished runs as one HTML file")
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    report.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.html")
    options = parser.parse_args(arguments)
    try:
        write_report(options.runs, options.output)
    except WalkawayError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    sys.stdout.write(f"{options.output}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
