"""The files that a user names for a command's output, such as `--junit FILE` and `-o FILE`.

`-` is standard output. A file is written whole or not at all, and what is there already is written
over only if it is empty, as CI hands over its step summary, or an earlier output of the same kind.
"""

import errno
import os
import sys
import tempfile
from pathlib import Path
from typing import Final

from harness.errors import NO_ROOM, ConfigError, StorageError, WalkawayError, in_words

STDOUT: Final = Path("-")
_HEAD_BYTES: Final = 4096


def cannot_write(place: Path | str, error: OSError, *, what: str = "written") -> WalkawayError:
    """A full disk is no wrong usage."""
    if error.errno in NO_ROOM:  # pyarrow's errors have words of their own
        return StorageError(f"{place}: cannot be {what}: {os.strerror(error.errno)}; make room")
    return ConfigError(f"{place}: cannot be {what}: {in_words(error)}; name another place")


def is_stdout(path: Path | None) -> bool:
    return path == STDOUT


def check_output(
    path: Path | None, *, ours: bytes | None, may_overwrite: bool | None = None
) -> None:
    """Refuse, before the work is done, a place that cannot be written or must not be.

    `ours`: bytes in the head of each output of this kind; None: nothing that is there is written
    over. `may_overwrite`: --force was given; None: the command has no such flag. Raises
    ConfigError.
    """
    if path is None or is_stdout(path):
        return
    place = path.resolve()  # where it is a link: what it leads to
    try:
        if place.is_dir():
            raise ConfigError(f"{path}: cannot be written: it is a folder; name a file in it")
        if place.exists() and not place.is_file():  # /dev/stdout, say
            return
        with tempfile.TemporaryFile(dir=next(one for one in place.parents if one.exists())):
            pass
        head = _head(place) if place.exists() else b""
    except OSError as error:
        raise cannot_write(path, error) from error
    if head and not may_overwrite and (ours is None or ours not in head):
        what = "" if ours is None else " and is no earlier output of this command"
        remedy = "move it away" if may_overwrite is None else "replace it with --force"
        raise ConfigError(f"{path}: exists already{what}; name another file, or {remedy}")


def write_output(
    path: Path, content: bytes, *, ours: bytes | None, may_overwrite: bool | None = None
) -> None:
    """Print or write it. Raises ConfigError as `check_output` does, and StorageError."""
    if is_stdout(path):
        try:
            sys.stdout.flush()
            sys.stdout.buffer.write(content)
            sys.stdout.buffer.flush()
        except OSError as error:
            raise stdout_problem(error) from error
        return
    check_output(path, ours=ours, may_overwrite=may_overwrite)
    place = path.resolve()
    part = place.with_name(f"{place.name}.part")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.exists() and not place.stat().st_size:  # nothing can be lost; a device, too
            place.write_bytes(content)
            return
        try:
            part.write_bytes(content)
            part.replace(place)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from error


def _head(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(_HEAD_BYTES)


def why_no_room(folder: Path) -> str | None:
    """Why there is no room, in words; None: there is some."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(_HEAD_BYTES))
    except OSError as error:
        return str(cannot_write(folder, error)) if error.errno in NO_ROOM else None
    return None


def finish_stdout() -> None:
    """Write what is left in the buffer. Raises StorageError."""
    try:
        sys.stdout.flush()
    except OSError as error:
        raise stdout_problem(error) from error


def stdout_problem(error: OSError) -> StorageError:
    """Nothing more is written there: Python would try again as it ends, and say so."""
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
    if error.errno == errno.EPIPE:
        return StorageError("standard output was closed before all was written to it")
    remedy = "; make room" if error.errno in NO_ROOM else ""
    return StorageError(f"standard output cannot be written: {in_words(error)}{remedy}")
