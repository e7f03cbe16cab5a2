"""Expected failures in families, each with an exit code.

`harness.cli` turns them into exit codes. A message says what happened, where, and what to do.
`in_words` and `did_you_mean` are parts of such messages.
"""

import difflib
import errno
import re
from collections.abc import Iterable
from importlib.util import find_spec
from typing import ClassVar, Final

_NUMBERED: Final = re.compile(r"\[errno -?\d+\] ", re.IGNORECASE)  # pyarrow puts it into its words
# What is installed only where it is asked for, by extra.
EXTRAS: Final = {
    "load": ("locust", "numpy", "pandas", "plotly", "pyarrow", "scipy"),
    "gguf": ("gguf", "numpy"),
}
NO_ROOM: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class WalkawayError(Exception):
    """An expected failure: shown to the user as one message, never as a traceback."""

    exit_code: ClassVar[int]


class ConfigError(WalkawayError):
    """Wrong usage: a bad file, key, value or flag."""

    exit_code = 2


class TargetError(WalkawayError):
    """The server under test, or a process of the run, cannot be reached or has died."""

    exit_code = 5


class StorageError(TargetError):
    """What was measured cannot be written, by no mistake of the user: the disk is full."""


class PlanError(WalkawayError):
    """The load could not do what its plan says: the run is whole, but it shows nothing."""

    exit_code = 5


class UndecidedError(WalkawayError):
    """The run is whole, but invalid: the load could not keep up, so its figures say nothing of the
    server."""

    exit_code = 4


class InterruptedRunError(WalkawayError):
    """The user pressed Ctrl-C; what had been collected is kept."""

    exit_code = 130


def in_words(error: Exception) -> str:
    """Why a file or a connection failed, without the number of the error and without the path,
    which the message around it names: "No such file or directory"."""
    if isinstance(error, UnicodeDecodeError):
        return f"it is not text in UTF-8 (at byte {error.start})"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if text == "Input data was truncated":  # msgspec's words, for an empty file too
        return "it is empty, or ends in the middle"
    return _NUMBERED.sub("", text.rpartition("Detail: ")[2]) or type(error).__name__


def check_extra(extra: str, what: str) -> None:
    """Raise ConfigError if `what` needs packages of this extra that are not installed."""
    lacking = [module for module in EXTRAS[extra] if find_spec(module) is None]
    if lacking:
        raise ConfigError(
            f"{what} needs {', '.join(lacking)}: pip install 'walkaway[{extra}]' (from its "
            f"sources: pip install '.[{extra}]')"
        )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a complaint, "; did you mean `demo`?", with the nearest names; "" if none is."""
    lower = {one.lower(): one for one in known}
    near = [f"`{lower[one]}`" for one in difflib.get_close_matches(name.lower(), lower)]
    *others, last = near or [""]
    named = f"{', '.join(others)} or {last}" if others else last
    return f"; did you mean {named}?" if named else ""


def check_text(name: str) -> None:
    """Raise ConfigError for a name whose bytes are no UTF-8, which the files of a run are in."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        before, after = (
            re.split('[<>"\\n]', part) for part in (name[: error.end], name[error.end :])
        )
        wrong = before[-1] + after[0]  # of a page, the text between two tags
        shown = wrong.encode(errors="surrogateescape").decode(errors="backslashreplace")
        raise ConfigError(
            f"{shown}: this name holds bytes that are not text in UTF-8; take another name"
        ) from error
