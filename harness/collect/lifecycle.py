"""Follow the reference engine's two logs: its lifecycle events and its steps.

Each answer is NDJSON and says in its headers where to go on and how much fell out of the engine's
ring before it was asked for.
"""

from typing import Generic, TypeVar

import httpx
import msgspec

from harness.collect.source import Notes, SourceError
from harness.records import LifecycleEvent, StepRow

NEXT_AFTER = "x-walkaway-next-after"
DROPPED = "x-walkaway-dropped"

PAGE = 10_000

Row = TypeVar("Row", LifecycleEvent, StepRow)


class LogFollower(Generic[Row]):
    """Reads one log from where it last stopped. `rows` is appended to by the caller's thread."""

    def __init__(self, client: httpx.Client, url: str, row_type: type[Row], notes: Notes) -> None:
        self._client = client
        self._url = url
        self._decoder: msgspec.json.Decoder[Row] = msgspec.json.Decoder(row_type)
        self._notes = notes
        self._after = 0
        self.rows: list[Row] = []

    def skip_history(self) -> None:
        """Begin after everything that is there by now: a server may have served others before.

        Raises SourceError.
        """
        while len(self._read_page()[0]) == PAGE:
            pass

    def catch_up(self) -> None:
        """Read everything that came since. Raises SourceError where the log cannot be read."""
        is_more = True
        while is_more:
            rows, dropped = self._read_page()
            self.rows += rows
            if dropped:
                self._notes.warn(f"{self._url}: {dropped} rows fell out of the engine's log unread")
            is_more = len(rows) == PAGE

    def _read_page(self) -> tuple[list[Row], int]:
        try:
            response = self._client.get(self._url, params={"after": self._after, "limit": PAGE})
            response.raise_for_status()
            rows = self._decoder.decode_lines(response.content)
            self._after = int(response.headers[NEXT_AFTER])
            return rows, int(response.headers.get(DROPPED, 0))
        except (httpx.HTTPError, msgspec.MsgspecError, KeyError, ValueError) as error:
            raise SourceError(f"{self._url} could not be read ({type(error).__name__})") from error
