"""The files that a user names for a command's output, such as `--junit FILE` and `-o FILE`.

`-` is standard output. A file is written whole or not at all, and what is there already is written
over only if it is empty, as CI hands over its step summary, or an earlier output of the same kind.
"""

import sys
import tempfile
from pathlib import Path
from typing import Final

from harness.errors import ConfigError, in_words

STDOUT: Final = Path("-")
_HEAD_BYTES: Final = 4096


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
        raise ConfigError(f"{path}: cannot be written: {in_words(error)}") from error
    if head and not may_overwrite and (ours is None or ours not in head):
        what = "" if ours is None else " and is no earlier output of this command"
        remedy = "move it away" if may_overwrite is None else "replace it with --force"
        raise ConfigError(f"{path}: exists already{what}; name another file, or {remedy}")


def write_output(
    path: Path, content: bytes, *, ours: bytes | None, may_overwrite: bool | None = None
) -> None:
    """Print or write it. Raises ConfigError as `check_output` does."""
    if is_stdout(path):
        sys.stdout.flush()
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
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
        raise ConfigError(f"{path}: cannot be written: {in_words(error)}") from error


def _head(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(_HEAD_BYTES)
