"""File handles: each open stream takes one, and a system limits how many a process may open."""

import resource
from collections.abc import Callable
from typing import Final

from harness.errors import ConfigError

_BESIDE_STREAMS: Final = 100  # files, pipes, the event loop, libraries being loaded
_ENOUGH: Final = 1 << 20  # if the system allows any number

Limits = tuple[int, int]  # the soft limit, and the hard one up to which a process may raise it


def allow_streams(
    streams: int,
    *,
    get: Callable[[int], Limits] = resource.getrlimit,
    put: Callable[[int, Limits], None] = resource.setrlimit,
) -> None:
    """Raise this process's limit as far as possible. Raises ConfigError if that is too little."""
    soft, hard = get(resource.RLIMIT_NOFILE)
    allowed = _allowed(hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        put(resource.RLIMIT_NOFILE, (allowed, hard))
    check_streams(streams, get=get)


def check_streams(streams: int, *, get: Callable[[int], Limits] = resource.getrlimit) -> None:
    allowed = _allowed(get(resource.RLIMIT_NOFILE)[1])
    if (needed := streams + _BESIDE_STREAMS) > allowed:
        raise ConfigError(
            f"{streams:,} streams at once need about {needed:,} open files in one process, and "
            f"this system allows {allowed:,}; raise the limit (ulimit -Hn, or LimitNOFILE= of the "
            "service), take fewer, or spread them over more processes (--processes)"
        )


def _allowed(hard: int) -> int:
    return _ENOUGH if hard == resource.RLIM_INFINITY else hard
