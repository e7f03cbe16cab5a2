"""The reference engine's own account: its lifecycle events, its steps, and its clock.

An answer of a log is NDJSON. Its headers give the position after it, the log's last position, and
the number of rows that fell out of the log unread. An answer may hold fewer rows than the limit, as
the engine bounds its bytes.
"""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import httpx
import msgspec

from harness.collect.source import Notes, SourceError
from harness.http_client import why_unread
from harness.records import LifecycleEvent, StepRow
from harness.store.manifest import ClockCheck, boot_id

NEXT_AFTER = "x-walkaway-next-after"
LAST = "x-walkaway-last"
DROPPED = "x-walkaway-dropped"

PAGE = 1_000  # rows; with hundreds of requests a step row is long
CLOCK_TRIES = 5

Row = TypeVar("Row", LifecycleEvent, StepRow)


class LogFollower(Generic[Row]):
    """Reads one log from where it last stopped; `keep` gets the rows of each page."""

    def __init__(
        self,
        client: httpx.Client,
        url: str,
        row_type: type[Row],
        notes: Notes,
        *,
        keep: Callable[[list[Row]], None],
    ) -> None:
        self._client = client
        self._url = url
        self._decoder: msgspec.json.Decoder[Row] = msgspec.json.Decoder(row_type)
        self._notes = notes
        self._keep: Callable[[list[Row]], None] = keep
        self._after = 0

    def skip_history(self) -> None:
        """Skip the log so far, which is of earlier clients. Raises SourceError."""
        for _ in self._pages():
            pass

    def catch_up(self) -> None:
        """Read all new rows. Raises SourceError."""
        for rows, dropped in self._pages():
            self._keep(rows)
            if dropped:
                self._notes.warn(f"{self._url}: {dropped} rows fell out of the engine's log unread")

    def _pages(self) -> Iterator[tuple[list[Row], int]]:
        is_more = True
        while is_more:
            try:
                response = self._client.get(self._url, params={"after": self._after, "limit": PAGE})
                response.raise_for_status()
                rows = self._decoder.decode_lines(response.content)
                self._after = int(response.headers[NEXT_AFTER])
                is_more = self._after < int(response.headers.get(LAST, self._after))
                dropped = int(response.headers.get(DROPPED, 0))
            except (httpx.HTTPError, msgspec.MsgspecError, KeyError, ValueError) as error:
                raise SourceError(f"{self._url} could not be read ({why_unread(error)})") from error
            yield rows, dropped


def check_clock(client: httpx.Client, url: str, *, clock_ns: Callable[[], int]) -> ClockCheck:
    """Do server and client read the same clock?

    Each reading of the server must lie between the two local readings around its request, and the
    boot id must be ours: a container has the same one, another host does not. Raises SourceError.
    """
    is_ours, round_trips_ns = True, []
    for _ in range(CLOCK_TRIES):
        before_ns = clock_ns()
        try:
            answer = client.get(url).raise_for_status().json()
            after_ns = clock_ns()
            is_between = before_ns <= int(answer["now_ns"]) <= after_ns
            is_ours &= is_between and str(answer["boot_id"]) == boot_id()
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise SourceError(f"{url} could not be read ({type(error).__name__})") from error
        round_trips_ns.append(after_ns - before_ns)
    return ClockCheck(comparable=is_ours, round_trip_ns=min(round_trips_ns))
