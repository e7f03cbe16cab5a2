"""Do server and client read the same clock? Checked once, before the load.

The server's reading must lie between two local readings around the request, and the boot id must be
ours: a container has the same one, another host does not.
"""

from collections.abc import Callable
from dataclasses import dataclass

import httpx

from harness.collect.source import SourceError
from harness.store.manifest import boot_id

TRIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockReading:
    """A reading of the server's clock, with the local stamps around it."""

    before_ns: int
    server_ns: int
    after_ns: int
    boot_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockCheck:
    comparable: bool
    round_trip_ns: int


def judge_clock(readings: list[ClockReading], *, local_boot_id: str | None) -> ClockCheck:
    return ClockCheck(
        comparable=all(
            reading.before_ns <= reading.server_ns <= reading.after_ns
            and reading.boot_id == local_boot_id
            for reading in readings
        ),
        round_trip_ns=min(reading.after_ns - reading.before_ns for reading in readings),
    )


def read_clock(client: httpx.Client, url: str, *, clock_ns: Callable[[], int]) -> ClockReading:
    """Raises SourceError."""
    before_ns = clock_ns()
    try:
        answer = client.get(url).raise_for_status().json()
        after_ns = clock_ns()
        return ClockReading(
            before_ns=before_ns,
            server_ns=int(answer["now_ns"]),
            after_ns=after_ns,
            boot_id=str(answer["boot_id"]),
        )
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{url} could not be read ({type(error).__name__})") from error


def check_clock(client: httpx.Client, url: str, *, clock_ns: Callable[[], int]) -> ClockCheck:
    """Read the server's clock a few times and judge. Raises SourceError."""
    readings = [read_clock(client, url, clock_ns=clock_ns) for _ in range(TRIES)]
    return judge_clock(readings, local_boot_id=boot_id())
