"""Expected failures in three families, each with its own exit code.

`harness.cli` turns them into exit codes. A message says what happened, where, and what to do.
"""

from typing import ClassVar


class WalkawayError(Exception):
    """An expected failure: shown to the user as one message, never as a traceback."""

    exit_code: ClassVar[int]


class ConfigError(WalkawayError):
    """Wrong usage: a bad file, key, value or flag."""

    exit_code = 2


class TargetError(WalkawayError):
    """The server under test, or a process of the run, cannot be reached or has died."""

    exit_code = 5


class InterruptedRunError(WalkawayError):
    """The user pressed Ctrl-C; what had been collected is kept."""

    exit_code = 130
