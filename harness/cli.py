"""The entry point of the command line: only here do errors become messages and exit codes.

0 good · 1 a bug of ours · 2 wrong usage or configuration · 3 a gate failed · 4 it could not
decide · 5 the target or the run failed · 130 interrupted. Results go to standard output, progress
and errors to standard error.

The commands are imported inside `main`, so a Ctrl-C while Python loads libraries is handled too.
"""

import errno
import os
import signal
import sys
from contextlib import suppress
from types import FrameType

from harness.errors import (
    NO_ROOM,
    InterruptedRunError,
    StorageError,
    WalkawayError,
    check_text,
)
from harness.store.output import cannot_write, finish_stdout, stdout_problem

BUG = 1


def main() -> None:
    signal.signal(signal.SIGINT, _leave)
    code = _code_of_command()
    with suppress(StorageError):  # of a failure, which has been said
        finish_stdout()
    sys.exit(code)


def _code_of_command() -> int:
    _open_what_is_closed()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        for argument in sys.argv:
            check_text(argument)
        code = _do()
        finish_stdout()
    except WalkawayError as error:
        _complain(str(error))
        return error.exit_code
    except Exception as error:  # noqa: BLE001  a bug of ours: one line for the user
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            _complain(str(_why_not_written(error)))
            return StorageError.exit_code
        notes = "".join(f"; {note}" for note in getattr(error, "__notes__", []))
        _complain(f"a bug in walkaway, sorry: {type(error).__name__}: {error}{notes}")
        return BUG
    return code


def _why_not_written(error: OSError) -> WalkawayError:
    """Each file is named where it is written: an error without a name is about standard output."""
    if error.filename is None:
        return stdout_problem(error)
    return cannot_write(error.filename, error)


def _open_what_is_closed() -> None:
    """The number of a standard stream that was closed (`>&-`) would be that of the next file opened
    here, and what is printed would go into that."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.dup2(descriptor, number)
            if descriptor != number:
                os.close(descriptor)
            os.set_inheritable(number, True)  # noqa: FBT003  processes that are started have it too
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def _do() -> int:
    """Typer ends with SystemExit, and so do Typer and Rich where the reader of an output has gone:
    that is said here."""
    from harness.commands.index import app

    try:
        app(prog_name="walkaway")
    except SystemExit as ended:
        cause = ended.__context__
        if isinstance(cause, OSError) and cause.errno == errno.EPIPE:
            raise stdout_problem(cause) from cause
        return ended.code if isinstance(ended.code, int) else 0
    return 0


def _leave(_signum: int, _frame: FrameType | None) -> None:
    """Handle Ctrl-C outside a run (a run has its own handler, `harness.run.process`).

    SystemExit rather than KeyboardInterrupt, for which Typer exits silently with its own code.
    """
    _complain("interrupted")
    sys.exit(InterruptedRunError.exit_code)


def _complain(text: str) -> None:
    with suppress(OSError):  # nobody may read it any more
        print(f"error: {text}", file=sys.stderr, flush=True)  # noqa: T201
