"""Expected failures in three families, each with an exit code of its own.

Errors are raised where they are noticed and translated to an exit code in one place, `harness.cli`.
A message says what happened, where, and what to do.
"""

from typing import ClassVar


class WalkawayError(Exception):
    """An expected failure: shown to the user as one message, never as a traceback."""

    exit_code: ClassVar[int]


class ConfigError(WalkawayError):
    """The user asked for something that cannot be: a bad file, key, value or flag."""

    exit_code = 2


class TargetError(WalkawayError):
    """The server under test, or a process of the run, cannot be reached or has died."""

    exit_code = 5


class InterruptedRunError(WalkawayError):
    """The user pressed Ctrl-C; what had been collected is kept."""

    exit_code = 130
