"""Follow the reference engine's two logs: its lifecycle events and its steps.

Each answer is NDJSON. Its headers give the position after it, the log's last position, and the
number of rows that fell out of the log unread. An answer may hold fewer rows than the limit, as the
engine bounds its bytes.
"""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import httpx
import msgspec

from harness.collect.source import Notes, SourceError
from harness.http_client import why_unread
from harness.records import LifecycleEvent, StepRow

NEXT_AFTER = "x-walkaway-next-after"
LAST = "x-walkaway-last"
DROPPED = "x-walkaway-dropped"

PAGE = 1_000  # rows; with hundreds of requests a step row is long

Row = TypeVar("Row", LifecycleEvent, StepRow)


class _Page(NamedTuple, Generic[Row]):
    """`is_more`: the log went further than this page."""

    rows: list[Row]
    dropped: int
    is_more: bool


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
        while self._read_page().is_more:
            pass

    def catch_up(self) -> None:
        """Read all new rows. Raises SourceError."""
        is_more = True
        while is_more:
            page = self._read_page()
            self._keep(page.rows)
            if page.dropped:
                self._notes.warn(
                    f"{self._url}: {page.dropped} rows fell out of the engine's log unread"
                )
            is_more = page.is_more

    def _read_page(self) -> _Page[Row]:
        try:
            response = self._client.get(self._url, params={"after": self._after, "limit": PAGE})
            response.raise_for_status()
            rows = self._decoder.decode_lines(response.content)
            self._after = int(response.headers[NEXT_AFTER])
            is_more = self._after < int(response.headers.get(LAST, self._after))
            return _Page(rows, int(response.headers.get(DROPPED, 0)), is_more)
        except (httpx.HTTPError, msgspec.MsgspecError, KeyError, ValueError) as error:
            raise SourceError(f"{self._url} could not be read ({why_unread(error)})") from error
