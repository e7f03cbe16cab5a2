"""The entry point of the command line: only here do errors become messages and exit codes.

0 good · 1 a bug of ours · 2 wrong usage or configuration · 5 the target or the run failed ·
130 interrupted. Results go to standard output, progress and errors to standard error.

The commands are imported inside `main`, so a Ctrl-C while Python loads libraries is handled too.
"""

import signal
import sys
from types import FrameType

from harness.errors import InterruptedRunError, WalkawayError

BUG = 1


def main() -> None:
    signal.signal(signal.SIGINT, _leave)
    try:
        from harness.commands.verbs import app

        app(prog_name="walkaway")
    except WalkawayError as error:
        _complain(str(error))
        sys.exit(error.exit_code)
    except Exception as error:  # noqa: BLE001  a bug of ours: one line for the user
        notes = "".join(f"; {note}" for note in getattr(error, "__notes__", []))
        _complain(f"a bug in walkaway, sorry: {type(error).__name__}: {error}{notes}")
        sys.exit(BUG)


def _leave(_signum: int, _frame: FrameType | None) -> None:
    """Handle Ctrl-C outside a run (a run has its own handler, `harness.run.process`).

    SystemExit rather than KeyboardInterrupt, for which Typer exits silently with its own code.
    """
    _complain("interrupted")
    sys.exit(InterruptedRunError.exit_code)


def _complain(text: str) -> None:
    print(f"error: {text}", file=sys.stderr)  # noqa: T201
