"""The reference engine's own account: its lifecycle events, its steps, and its clock.

An answer of a log is NDJSON. Its headers give the position after it, the log's last position, and
the number of rows that fell out of the log unread. An answer may hold fewer rows than the limit, as
the engine bounds its bytes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Generic, NamedTuple, TypeVar

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


class _Page(NamedTuple, Generic[Row]):
    """`begins`: it was asked for from the beginning of the log."""

    rows: list[Row]
    begins: bool
    next_after: int
    last: int
    dropped: int


class LogFollower(Generic[Row]):
    """Reads one log from where it last stopped; `keep` gets the rows of each page.

    A process that was killed and started again begins its log anew: its last row lies before the
    position, or its first row is another. The second is asked for only after a failed reading.
    """

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
        self._first: Row | None = None
        self._has_failed = False

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
        if self._has_failed:
            first = self._page(0, 1)
            if not first.dropped and first.rows != [self._first]:
                self._after = 0
        is_more = True
        while is_more:
            page = self._page(self._after, PAGE)
            if page.last < self._after:
                page = self._page(0, PAGE)
            if page.rows and page.begins:
                self._first = page.rows[0]
            self._after = page.next_after
            is_more = self._after < page.last
            yield page.rows, page.dropped

    def _page(self, after: int, limit: int) -> _Page[Row]:
        self._has_failed = True
        try:
            response = self._client.get(self._url, params={"after": after, "limit": limit})
            response.raise_for_status()
            next_after = int(response.headers[NEXT_AFTER])
            page = _Page(
                rows=self._decoder.decode_lines(response.content),
                begins=after == 0,
                next_after=next_after,
                last=int(response.headers.get(LAST, next_after)),
                dropped=int(response.headers.get(DROPPED, 0)),
            )
        except (httpx.HTTPError, msgspec.MsgspecError, KeyError, ValueError) as error:
            raise SourceError(f"{self._url} could not be read ({why_unread(error)})") from error
        self._has_failed = False
        return page


class SharedLog(Generic[Row]):
    """A log that several servers keep alike, read from the first that answers."""

    def __init__(self, copies: Sequence[LogFollower[Row]]) -> None:
        self._copies: Sequence[LogFollower[Row]] = copies

    def skip_history(self) -> None:
        for copy in self._copies:
            copy.skip_history()

    def catch_up(self) -> None:
        """Raises SourceError if none of them answers."""
        for copy in self._copies[:-1]:
            with suppress(SourceError):
                copy.catch_up()
                return
        self._copies[-1].catch_up()


class NewSteps:
    """Keeps the steps that no other copy of the log gave before: each worker's come in order."""

    def __init__(self, keep: Callable[[list[StepRow]], None]) -> None:
        self._keep = keep
        self._newest_ns: dict[str, int] = {}

    def __call__(self, rows: list[StepRow]) -> None:
        new = [row for row in rows if row.started_ns > self._newest_ns.get(row.worker, 0)]
        self._newest_ns |= {row.worker: row.started_ns for row in new}
        self._keep(new)


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
            raise SourceError(f"{url} could not be read ({why_unread(error)})") from error
        round_trips_ns.append(after_ns - before_ns)
    return ClockCheck(comparable=is_ours, round_trip_ns=min(round_trips_ns))
