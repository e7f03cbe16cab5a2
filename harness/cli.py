"""The door of the command line. Here, and only here, errors become messages and exit codes.

0 good · 1 a bug of ours · 2 wrong usage or configuration · 5 the target or the run failed ·
130 interrupted. Results go to standard output, progress and errors to standard error.

Everything else is imported behind the door, so that a Ctrl-C while Python still loads libraries is
answered like any other.
"""

import signal
import sys
from types import FrameType

from harness.errors import InterruptedRunError, WalkawayError

BUG = 1


def main() -> None:
    """Run the command line and end the process with its exit code."""
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
    """Ctrl-C while nothing is measured (a run has a handler of its own, `harness.run.progress`).

    SystemExit and no KeyboardInterrupt: the command line's library would end with a code of its
    own, without a word.
    """
    _complain("interrupted")
    sys.exit(InterruptedRunError.exit_code)


def _complain(text: str) -> None:
    print(f"error: {text}", file=sys.stderr)  # noqa: T201
