"""Which processes serve an endpoint: one file for each, in a folder that all can read.

A process holds a lock on its file while it lives. The kernel lets go of the lock however the
process ends, so a file without a lock is a dead process's, and the next reader removes it.
"""

import fcntl
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

_NAME: Final = re.compile(r"(?:dyn://)?([\w-]+\.[\w-]+\.[\w-]+)", re.ASCII)


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """A process that serves an endpoint. Its secret is in a file that only its user can read."""

    instance_id: int
    host: str
    port: int
    secret: str


def read_path(text: str) -> str:
    """Raises ValueError unless it is namespace.component.endpoint, with or without dyn://."""
    found = _NAME.fullmatch(text)
    if found is None:
        raise ValueError(
            f"an endpoint is named namespace.component.endpoint, of letters, digits, _ and -; "
            f"not {text!r}"
        )
    return found[1]


def discovery_folder(environment: Mapping[str, str]) -> Path:
    """DYN_FILE_KV names it, as for Dynamo, whose own files it does not disturb.

    Raises PermissionError if the usual one has been made by another user.
    """
    named = environment.get("DYN_FILE_KV")
    if named:
        return Path(named) / "walkaway"
    usual = Path(tempfile.gettempdir()) / f"walkaway-{os.getuid()}"
    if usual.exists() and usual.stat().st_uid != os.getuid():
        raise PermissionError(f"{usual} is another user's: set DYN_FILE_KV to a folder of yours")
    return usual


@contextmanager
def registered(folder: Path, path: str, instance: Instance) -> Iterator[None]:
    """`find` finds it meanwhile, unless this process dies."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, unnamed = tempfile.mkstemp(dir=folder)  # readable for its user only
    file = folder / f"{path}.{instance.instance_id:016x}"
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        os.write(handle, msgspec.json.encode(instance))
        Path(unnamed).rename(file)
        yield
    finally:
        for name in (file, Path(unnamed)):
            name.unlink(missing_ok=True)
        os.close(handle)


def find(folder: Path, path: str) -> dict[int, Instance]:
    """The living instances of an endpoint, by their ids; files of dead ones are removed."""
    found = {}
    for file in sorted(folder.glob(f"{path}.*")):
        with suppress(FileNotFoundError), file.open("rb") as opened:  # it has ended meanwhile
            try:
                fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                instance = msgspec.json.decode(opened.read(), type=Instance)
                found[instance.instance_id] = instance
            else:
                file.unlink()
    return found
