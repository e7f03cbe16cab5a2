"""Run `walkaway` with many command lines in one process: their list comes on standard input, and
how each ended, what it printed and what it complained of, goes to standard output. (JSON)"""

import io
import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout

from harness.cli import main


def run(arguments: Sequence[str]) -> tuple[int, str, str]:
    """The exit code, standard output and standard error of one command."""
    sys.argv = ["walkaway", *arguments]
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, out.getvalue(), err.getvalue()


if __name__ == "__main__":
    print(json.dumps([run(arguments) for arguments in json.load(sys.stdin)]))  # noqa: T201
