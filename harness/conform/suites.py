"""The dated suites: lists of cases that stay as they are once they are released.

suites/DATE.txt names a case a line. A case that comes later is in a later suite, and none is ever
renamed, so a suite asks for the same cases in each version.
"""

from collections.abc import Iterable
from importlib.resources import files

from harness.conform.case import Case
from harness.errors import ConfigError

_FOLDER = files("harness.conform") / "suites"


def known_suites() -> list[str]:
    """The oldest first."""
    names = (file.name for file in _FOLDER.iterdir())
    return sorted(name.removesuffix(".txt") for name in names if name.endswith(".txt"))


def cases_of(suite: str, cases: Iterable[Case]) -> list[Case]:
    """Those of `cases` that are in the suite. Raises ConfigError for an unknown one."""
    known = known_suites()
    if suite not in known:
        raise ConfigError(f"--suite {suite}: there is no such suite; known: {', '.join(known)}")
    ids = set((_FOLDER / f"{suite}.txt").read_text(encoding="utf-8").split())
    return [case for case in cases if case.id in ids]
