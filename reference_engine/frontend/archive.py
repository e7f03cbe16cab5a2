"""Ended requests that can still be asked for: the last few, for a while.

The text of an aborted one is kept, that of a finished one is not: its client had it. Measured, with
answers of 4,000 words of 5 bytes: an aborted request takes 24 KB with one answer and 340 KB with
16, a finished one 3.5 KB and 17 KB. So a thousand, the default, are at most 24 MB where n is 1, and
340 MB where n is 16. One whose time is over is never shown, and goes when the next one comes or is
asked for.
"""

from collections import OrderedDict
from typing import NamedTuple

from reference_engine.frontend.client_request import ClientRequest


class _Entry(NamedTuple):
    request: ClientRequest
    until_ns: int


class Archive:
    """Pure: time is an argument, a monotonic stamp. Oldest first."""

    def __init__(self, capacity: int, keep_s: float) -> None:
        self._capacity = capacity
        self._keep_ns = int(keep_s * 1e9)
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._latest_of_client: dict[tuple[str, str | None], str] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, request: ClientRequest, now_ns: int) -> None:
        """Keep an ended request."""
        for choice in request.choices:
            if request.is_aborted:
                choice.join_text()
            else:
                choice.forget_text()
        self._entries[request.request_id] = _Entry(request, now_ns + self._keep_ns)
        if request.client_request_id is not None:
            name = request.client_request_id, request.owner
            self._latest_of_client[name] = request.request_id
        self._forget(now_ns)

    def by_id(self, request_id: str, now_ns: int) -> ClientRequest | None:
        self._forget(now_ns)
        entry = self._entries.get(request_id)
        return None if entry is None else entry.request

    def latest_of(self, client_id: str, owner: str | None, now_ns: int) -> ClientRequest | None:
        """The one that ended last, of an owner's requests with that id of the client's own."""
        self._forget(now_ns)
        request_id = self._latest_of_client.get((client_id, owner))
        return None if request_id is None else self._entries[request_id].request

    def _forget(self, now_ns: int) -> None:
        while self._entries:
            request_id, (request, until_ns) = next(iter(self._entries.items()))
            if len(self._entries) <= self._capacity and now_ns < until_ns:
                return
            del self._entries[request_id]
            if request.client_request_id is not None:
                name = request.client_request_id, request.owner
                if self._latest_of_client[name] == request_id:
                    del self._latest_of_client[name]
