"""The line that repeats a run: what was typed, with its seed, and without the folder it filled."""

import shlex
from collections.abc import Iterator, Sequence
from typing import Final

_SEED: Final = "run.seed="


def repeat_command(command: Sequence[str], *, seed: int) -> str:
    """A shell line that does the same again in a new folder; "" where nothing was typed.

    The seed stands in it, so that the line holds when the workload's own is changed. A hidden value
    of a header (`***`) is for whoever repeats it to fill in.
    """
    if not command:
        return ""
    kept = list(_without_folder(command))
    has_seed = any(argument.removeprefix("--set=").startswith(_SEED) for argument in kept)
    return shlex.join(kept if has_seed else [*kept, "--set", f"{_SEED}{seed}"])


def _without_folder(command: Sequence[str]) -> Iterator[str]:
    arguments = iter(command)
    for argument in arguments:
        if argument == "--out":
            next(arguments, None)
        elif not argument.startswith("--out="):
            yield argument
