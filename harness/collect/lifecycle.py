"""Follow the reference engine's two logs: its lifecycle events and its steps.

Each answer is NDJSON and says in its headers where to go on, how far the log went when it was
written, and how much fell out of the log before it was asked for. An answer may hold fewer rows
than were asked for, since the engine bounds its bytes.
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

PAGE = 1_000  # a row names all that run: of hundreds, more rows than these are too long an answer

Row = TypeVar("Row", LifecycleEvent, StepRow)


class _Page(NamedTuple, Generic[Row]):
    """`is_more`: the log went further when this was written."""

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
        """Begin after everything that is there by now: a server may have served others before.

        Raises SourceError.
        """
        while self._read_page().is_more:
            pass

    def catch_up(self) -> None:
        """Read everything that came since. Raises SourceError where the log cannot be read."""
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
